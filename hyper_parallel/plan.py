"""ParamPlan: the one function that turns (parameter, layout, policy) into placement and reduction.

The eager path, the passes and ``hp_compile`` all call :func:`plan_params`, so they cannot disagree.
The decision matrix for a gradient, where it is written down and nowhere else:

============== =========== =====================================================================
shard_size     dp_size     reduction
============== =========== =====================================================================
> 1            1           ``RS``: reduce-scatter over the shard axes
> 1            > 1         ``RS+AR``: reduce-scatter, then all-reduce over the replica axes
1              > 1         ``AR``: all-reduce over the replica axes, no reduce-scatter exists
1              1           ``none``: the local gradient stays
============== =========== =====================================================================

A frozen or an ignored parameter has reduction ``none`` whatever its sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from hyper_parallel.errors import PlacementError, PolicyError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import (
    combine_placements,
    local_shape,
    model_parallel_placements,
    normalise_dim,
    shard_lengths,
)
from hyper_parallel.policy import Policy

__all__ = ["ParamLike", "ParamPlan", "plan_param", "plan_params", "resolve_enable_param_shard"]


class ParamLike(Protocol):
    """What planning needs to know of a parameter: any tensor has it."""

    @property
    def shape(self) -> Sequence[int]:
        """The full shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        ...

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        ...


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """Everything about one parameter on one mesh: layout, groups, reduction, and why.

    Attributes:
        fqn: The parameter's name; a tied parameter's first name.
        shape: The full shape.
        dtype: The dtype of the stored parameter and of its gradient.
        placements: The combined placement, one entry a mesh dim.
        unsharded_placements: The same after unshard; differs on the shard axes only.
        rank_size: Ranks of the data-parallel domain of this parameter.
        shard_size: Slices that FSDP makes; 1 means not cut.
        dp_size: Replicas of each slice: ``rank_size // shard_size``.
        sharded_ranks: Global ranks of the shard group, where RS and AG run.
        unsharded_ranks: Global ranks that hold the same slice, where AR runs.
        reduction: ``"RS"``, ``"RS+AR"``, ``"AR"`` or ``"none"``.
        reason: Why, in one sentence.
        requires_grad: Whether the parameter is trained.
        ignored: Whether it is left alone: a plain tensor, a local gradient.
        shard_dim: The tensor dim that FSDP cuts, or None.
        shard_axes: Mesh dims over which FSDP cuts, in mesh order; dims of size 1 stay in.
        replica_axes: Mesh dims over which slices must agree, in mesh order; dims of size 1 stay in.
        sum_axes: tp/ep dims over which a partial gradient must be summed.
        local_shape: The shape that TP and EP leave, before FSDP cuts: the unsharded local shape.
        lengths: Rows per rank of the shard group along ``shard_dim``; empty if that is None.
        shard_index: This rank's place in the shard group.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    unsharded_placements: tuple[Placement, ...]
    rank_size: int
    shard_size: int
    dp_size: int
    sharded_ranks: tuple[int, ...]
    unsharded_ranks: tuple[int, ...]
    reduction: str
    reason: str
    requires_grad: bool = True
    ignored: bool = False
    shard_dim: int | None = None
    shard_axes: tuple[str, ...] = ()
    replica_axes: tuple[str, ...] = ()
    sum_axes: tuple[str, ...] = ()
    local_shape: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    shard_index: int = 0

    @property
    def padded_rows(self) -> int:
        """Rows of the largest shard: what every rank sends in a gather; 0 if FSDP cuts nothing."""
        return max(self.lengths, default=0)

    @property
    def padded_shard_shape(self) -> tuple[int, ...]:
        """The shape of a shard padded to the largest one; equal on all ranks of the shard group."""
        return self._with_rows(self.padded_rows)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard, without padding."""
        return self._with_rows(self.lengths[self.shard_index] if self.lengths else 0)

    def _with_rows(self, rows: int) -> tuple[int, ...]:
        if self.shard_dim is None:
            return self.local_shape
        return (*self.local_shape[: self.shard_dim], rows, *self.local_shape[self.shard_dim + 1 :])


def resolve_enable_param_shard(layout: MeshLayout, policy: Policy) -> bool:
    """Decides whether parameters are cut at all; an explicit value always wins.

    Raises:
        PolicyError: ``enable_param_shard=True`` on a mesh without a shard dim.
    """
    if policy.enable_param_shard is None:
        return bool(layout.batch_dims)
    if policy.enable_param_shard and not layout.roles.shard:
        raise PolicyError(
            f"Policy.enable_param_shard: True needs a mesh dim with role shard, but mesh "
            f"({layout.describe()}) has {layout.roles}; name a dim 'dp_shard', pass "
            f"roles={{'shard': ...}}, or leave enable_param_shard None"
        )
    return policy.enable_param_shard


def plan_param(
    fqn: str,
    like: ParamLike,
    *,
    layout: MeshLayout,
    policy: Policy,
    mp_placements: Mapping[str, Placement] | None = None,
    sum_axes: Sequence[str] = (),
    ignored: bool = False,
    param: nn.Parameter | None = None,
) -> ParamPlan:
    """Plans one parameter.

    Args:
        fqn: Its name.
        like: Its full shape, dtype and requires_grad; a tensor, a fake or meta one too.
        layout: The mesh, seen from one rank.
        policy: The policy.
        mp_placements: What a TP/EP plan does to it: mesh dim to ``Shard`` or ``Replicate``.
        sum_axes: tp/ep dims that leave its gradient a partial sum.
        ignored: Leave it alone.
        param: What ``policy.shard_placement_fn`` is given; ``like`` by default.

    Raises:
        PolicyError: The policy does not fit the mesh.
        PlacementError: A placement is not legal for the parameter.
    """
    shape = tuple(int(size) for size in like.shape)
    enabled = resolve_enable_param_shard(layout, policy)
    if ignored:
        return _ignored_plan(fqn, shape, like, layout)
    cut = model_parallel_placements(fqn, shape, layout, mp_placements)
    domain = tuple(axis for axis in layout.batch_dims if axis not in cut)
    possible = tuple(axis for axis in domain if axis in layout.roles.shard)
    whole = _why_not_cut(shape, possible, enabled, policy)
    shard_axes = () if whole else possible
    shard_dim = None if whole else _shard_dim(fqn, shape, like if param is None else param, policy)
    replica_axes = tuple(axis for axis in domain if axis not in shard_axes)
    placements, unsharded = combine_placements(layout, cut, shard_axes, shard_dim)
    local = local_shape(shape, layout, cut)
    factors = tuple(layout.size(axis) for axis in shard_axes)
    sharded_ranks = layout.ranks_along(shard_axes)
    shard_size, dp_size = layout.size(shard_axes), layout.size(replica_axes)
    reduction = _reduction(shard_size, dp_size) if like.requires_grad else "none"
    return ParamPlan(
        fqn=fqn,
        shape=shape,
        dtype=like.dtype,
        placements=placements,
        unsharded_placements=unsharded,
        rank_size=layout.size(domain),
        shard_size=shard_size,
        dp_size=dp_size,
        sharded_ranks=sharded_ranks,
        unsharded_ranks=layout.ranks_along(replica_axes),
        reduction=reduction,
        reason=_reason(layout, cut, shard_axes, replica_axes, shard_dim, whole, like.requires_grad),
        requires_grad=bool(like.requires_grad),
        shard_dim=shard_dim,
        shard_axes=shard_axes,
        replica_axes=replica_axes,
        sum_axes=layout.axes(sum_axes),
        local_shape=local,
        lengths=() if shard_dim is None else shard_lengths(local[shard_dim], factors),
        shard_index=sharded_ranks.index(layout.rank),
    )


def plan_params(
    module: nn.Module,
    layout: MeshLayout,
    policy: Policy,
    mp: Mapping[str, Mapping[str, Placement]] | None = None,
) -> dict[str, ParamPlan]:
    """Plans every parameter of a module, in registration order.

    A tied parameter occurs once, under its first name; it is ignored if any of its names matches.

    Args:
        module: The module; its parameters may live on the meta device.
        layout: The mesh, seen from one rank.
        policy: The policy.
        mp: For parameters that a TP/EP plan places: FQN to mesh dim to placement.

    Raises:
        PolicyError: The policy does not fit the mesh or the module.
        PlacementError: A placement is not legal for a parameter.
    """
    mp = mp or {}
    check_reshard_after_forward(layout, policy)
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    unknown = sorted(set(mp) - {aliases[0] for aliases in names.values()})
    if unknown:
        raise PlacementError(f"{unknown[0]}: a TP/EP plan places it, but no parameter has this FQN")
    ignored = _ignored_ids(params, names, policy)
    return {
        aliases[0]: plan_param(
            aliases[0],
            params[key],
            layout=layout,
            policy=policy,
            mp_placements=mp.get(aliases[0]),
            ignored=key in ignored,
        )
        for key, aliases in names.items()
    }


def check_reshard_after_forward(layout: MeshLayout, policy: Policy) -> None:
    """Checks that an integer ``reshard_after_forward`` divides the shard axis.

    Raises:
        PolicyError: It does not; the message lists the divisors.
    """
    size = policy.reshard_after_forward
    if size is None or isinstance(size, bool):
        return
    total = layout.size(layout.roles.shard)
    if total % size:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise PolicyError(
            f"Policy.reshard_after_forward: {size} does not divide the shard axis of {total} ranks "
            f"({' × '.join(layout.roles.shard) or 'no shard dim'}); choose one of {divisors}"
        )


def _ignored_ids(
    params: Mapping[int, nn.Parameter], names: Mapping[int, Sequence[str]], policy: Policy
) -> set[int]:
    wanted: Any = policy.ignored_params
    ignored = {key for key, param in params.items() if param in wanted}
    for glob in sorted(item for item in wanted if isinstance(item, str)):
        hits = {key for key, aliases in names.items() if any(fnmatchcase(a, glob) for a in aliases)}
        if not hits:
            raise PolicyError(
                f"Policy.ignored_params: {glob!r} matches no parameter; names look like "
                f"{', '.join(aliases[0] for aliases in list(names.values())[:3]) or '(none)'}"
            )
        ignored |= hits
    return ignored


def _why_not_cut(
    shape: tuple[int, ...], possible: tuple[str, ...], enabled: bool, policy: Policy
) -> str:
    """Returns why FSDP leaves a parameter whole, or an empty text if it cuts it."""
    if policy.enable_param_shard is False:
        return "enable_param_shard is False"
    if not enabled:
        return "the mesh has no data dim"
    if not possible:
        return "no shard dim is left for it"
    if not shape:
        return "it is a scalar"
    numel = math.prod(shape)
    if numel < policy.min_shard_numel:
        return f"it has {numel} elements, fewer than min_shard_numel={policy.min_shard_numel}"
    return ""


def _shard_dim(fqn: str, shape: tuple[int, ...], param: Any, policy: Policy) -> int:
    if policy.shard_placement_fn is None:
        return 0
    answer = policy.shard_placement_fn(param)
    if answer is None:
        return 0
    if not isinstance(answer, Shard):
        raise PlacementError(
            f"{fqn}: shard_placement_fn returned {answer!r} of type {type(answer).__name__}; "
            f"expected Shard(dim) with a dim of shape {shape}, or None for Shard(0)"
        )
    return normalise_dim(fqn, shape, answer.dim)


def _reduction(shard_size: int, dp_size: int) -> str:
    steps = (["RS"] if shard_size > 1 else []) + (["AR"] if dp_size > 1 else [])
    return "+".join(steps) or "none"


def _ignored_plan(
    fqn: str, shape: tuple[int, ...], like: ParamLike, layout: MeshLayout
) -> ParamPlan:
    whole = tuple(Replicate() for _ in layout.dim_names)
    return ParamPlan(
        fqn=fqn,
        shape=shape,
        dtype=like.dtype,
        placements=whole,
        unsharded_placements=whole,
        rank_size=1,
        shard_size=1,
        dp_size=1,
        sharded_ranks=(layout.rank,),
        unsharded_ranks=(layout.rank,),
        reduction="none",
        reason="Ignored by the policy: a plain tensor on every rank, its gradient stays local.",
        requires_grad=bool(like.requires_grad),
        ignored=True,
        local_shape=shape,
    )


def _reason(
    layout: MeshLayout,
    cut: Mapping[str, Placement],
    shard_axes: tuple[str, ...],
    replica_axes: tuple[str, ...],
    shard_dim: int | None,
    whole: str,
    requires_grad: bool,
) -> str:
    """Writes one sentence for a reviewer: what is cut, over what, and what that costs."""
    parts = []
    if cut:
        parts.append(
            f"{_axes_text(layout, tuple(cut))} holds it in slices by the model-parallel plan"
        )
    if whole:
        parts.append(f"FSDP leaves it whole because {whole}")
    elif layout.size(shard_axes) == 1:
        parts.append(f"FSDP leaves it whole because {_axes_text(layout, shard_axes)} is one rank")
    else:
        parts.append(f"FSDP cuts dim {shard_dim} over {_axes_text(layout, shard_axes)}")
    scatter, replicas = layout.size(shard_axes) > 1, layout.size(replica_axes) > 1
    if not requires_grad:
        parts.append("frozen, so no gradient is reduced")
    elif scatter and replicas:
        parts.append(
            f"the gradient is reduce-scattered there, then all-reduced over "
            f"{_axes_text(layout, replica_axes)}"
        )
    elif scatter:
        parts.append("the gradient is reduce-scattered there, and no replicas are left to agree")
    elif replicas:
        parts.append(f"the gradient is all-reduced over {_axes_text(layout, replica_axes)}")
    else:
        parts.append("no other rank holds data for it, so the gradient stays local")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _axes_text(layout: MeshLayout, axes: tuple[str, ...]) -> str:
    return "×".join(f"{axis}({layout.size(axis)})" for axis in axes)
