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
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from hyper_parallel.errors import PlacementError, PolicyError
from hyper_parallel.explain import IGNORED_REASON, explain_axes, explain_plan
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import (
    combine_placements,
    dtensor_placements,
    local_shape,
    model_parallel_placements,
    normalise_dim,
    shard_lengths,
)
from hyper_parallel.policy import Policy
from hyper_parallel.torch_compat.distributed import (
    is_strided_shard,
    shard_dim_of,
    split_factor_of,
)

__all__ = [
    "ParamLike",
    "ParamPlan",
    "copy_axes",
    "plan_param",
    "plan_params",
    "replan_param",
    "resolve_enable_param_shard",
    "with_sum_axes",
]


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
        batch_ranks: Ranks over whose data the mean is taken: all batch dims. More than
            ``rank_size`` when a plan cuts the parameter over a batch dim; its gradient then comes
            summed over it.
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
        whole: Why FSDP leaves it whole; empty if it cuts it.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    unsharded_placements: tuple[Placement, ...]
    rank_size: int
    batch_ranks: int
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
    whole: str = ""

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
    if ignored:
        return _ignored_plan(fqn, shape, like, layout)
    cut = model_parallel_placements(fqn, shape, layout, mp_placements)
    domain = tuple(axis for axis in layout.batch_dims if axis not in cut)
    shard_axes = tuple(axis for axis in domain if axis in layout.roles.shard)
    shard_dim: int | None = None
    packed = _packed_dims(layout, cut)
    whole = _why_whole(shape, shard_axes, layout, policy, packed)
    if whole:
        shard_axes = ()
    else:
        shard_dim, shard_axes = _resolve_cut(
            fqn, shape, like if param is None else param, shard_axes, policy, packed
        )
    replica_axes = tuple(axis for axis in domain if axis not in shard_axes)
    sum_axes = _check_sum_axes(fqn, layout, sum_axes, {*domain, *cut})
    shard_size, dp_size = layout.size(shard_axes), layout.size(replica_axes)
    _check_reshard(layout, policy, shard_axes, f"{fqn}: ")
    placements, unsharded = combine_placements(layout, cut, shard_axes, shard_dim)
    local = local_shape(shape, layout, cut)
    factors = tuple(layout.size(axis) for axis in shard_axes)
    sharded_ranks = layout.ranks_along(shard_axes)
    return ParamPlan(
        fqn=fqn,
        shape=shape,
        dtype=like.dtype,
        placements=placements,
        unsharded_placements=unsharded,
        rank_size=layout.size(domain),
        batch_ranks=layout.size(layout.batch_dims),
        shard_size=shard_size,
        dp_size=dp_size,
        sharded_ranks=sharded_ranks,
        unsharded_ranks=layout.ranks_along(replica_axes),
        reduction=_reduction(shard_size, dp_size) if like.requires_grad else "none",
        reason=explain_plan(
            layout,
            model_parallel=cut,
            shard_axes=shard_axes,
            replica_axes=replica_axes,
            sum_axes=sum_axes,
            shard_dim=shard_dim,
            whole=whole,
            requires_grad=like.requires_grad,
        ),
        requires_grad=bool(like.requires_grad),
        shard_dim=shard_dim,
        shard_axes=shard_axes,
        replica_axes=replica_axes,
        sum_axes=sum_axes,
        local_shape=local,
        lengths=() if shard_dim is None else shard_lengths(local[shard_dim], factors),
        shard_index=sharded_ranks.index(layout.rank),
        whole=whole,
    )


def copy_axes(plan: ParamPlan, layout: MeshLayout) -> tuple[str, ...]:
    """Returns the mesh dims along which all ranks should hold the same part of a parameter.

    Besides the replicas that average its gradient these are tp and ep dims that do not cut it.

    Args:
        plan: Its plan.
        layout: The mesh of the plan.
    """
    placed = zip(layout.dim_names, plan.placements, strict=True)
    return tuple(axis for axis, p in placed if p.is_replicate() and layout.size(axis) > 1)


def replan_param(
    plan: ParamPlan, layout: MeshLayout, *, requires_grad: bool, dtype: torch.dtype
) -> ParamPlan:
    """Returns the plan of a parameter that was frozen, unfrozen or cast after it was sharded.

    Args:
        plan: What :func:`plan_param` said about it.
        layout: The mesh of the plan.
        requires_grad: Whether it is trained now.
        dtype: The dtype in which it is stored now.
    """
    if plan.ignored:
        return replace(plan, requires_grad=requires_grad, dtype=dtype)
    reduction = _reduction(plan.shard_size, plan.dp_size) if requires_grad else "none"
    return _explained(
        replace(plan, requires_grad=requires_grad, dtype=dtype, reduction=reduction), layout
    )


def with_sum_axes(plan: ParamPlan, layout: MeshLayout, sum_axes: Sequence[str]) -> ParamPlan:
    """Returns the plan of a parameter whose gradient is a term of a sum over mesh dims.

    Args:
        plan: What :func:`plan_param` said about it.
        layout: The mesh of the plan.
        sum_axes: tp or ep dims that neither cut it nor split the batch.

    Raises:
        PlacementError: A dim that cannot leave a partial sum.
    """
    if plan.ignored or not plan.requires_grad:
        return plan
    placed = zip(layout.dim_names, plan.unsharded_placements, strict=True)
    taken = {axis for axis, p in placed if not p.is_replicate()}
    taken |= {*plan.shard_axes, *plan.replica_axes}
    return _explained(
        replace(plan, sum_axes=_check_sum_axes(plan.fqn, layout, sum_axes, taken)), layout
    )


def _explained(plan: ParamPlan, layout: MeshLayout) -> ParamPlan:
    """The plan with the reason that its fields give."""
    placed = zip(layout.dim_names, plan.unsharded_placements, strict=True)
    reason = explain_plan(
        layout,
        model_parallel={axis: p for axis, p in placed if not p.is_replicate()},
        shard_axes=plan.shard_axes,
        replica_axes=plan.replica_axes,
        sum_axes=plan.sum_axes,
        shard_dim=plan.shard_dim,
        whole=plan.whole,
        requires_grad=plan.requires_grad,
    )
    return replace(plan, reason=reason)


def plan_params(
    module: nn.Module,
    layout: MeshLayout,
    policy: Policy,
    mp: Mapping[str, Mapping[str, Placement]] | None = None,
    sum_axes: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, ParamPlan]:
    """Plans every parameter of a module, in registration order.

    A tied parameter occurs once, under its first name; it is ignored if any of its names matches.

    Args:
        module: The module; its parameters may live on the meta device.
        layout: The mesh, seen from one rank.
        policy: The policy.
        mp: For parameters that a TP/EP plan places: FQN to mesh dim to placement. None reads the
            placements of parameters that are DTensors already.
        sum_axes: FQN to the tp/ep dims that leave the parameter's gradient a partial sum.

    Raises:
        PolicyError: The policy does not fit the mesh or the module.
        PlacementError: A placement is not legal for a parameter.
    """
    resolve_enable_param_shard(layout, policy)
    _check_reshard(layout, policy, layout.roles.shard)
    sum_axes = sum_axes or {}
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    unknown = sorted({*(mp or {}), *sum_axes} - {aliases[0] for aliases in names.values()})
    if unknown:
        raise PlacementError(
            f"{unknown[0]}: a TP/EP plan places it, but no parameter has this FQN (a tied "
            f"parameter is known by its first name)"
        )
    ignored = _ignored_ids(params, names, policy)
    plans = {}
    for key, (fqn, *_) in names.items():
        param = params[key]
        placed = dtensor_placements(fqn, param, layout) if mp is None else mp.get(fqn)
        plans[fqn] = plan_param(
            fqn,
            param,
            layout=layout,
            policy=policy,
            mp_placements=placed,
            sum_axes=sum_axes.get(fqn, ()),
            ignored=key in ignored,
        )
    return plans


def _ignored_ids(
    params: Mapping[int, nn.Parameter], names: Mapping[int, Sequence[str]], policy: Policy
) -> set[int]:
    wanted: Any = policy.ignored_params
    ignored = params.keys() & {id(item) for item in wanted if not isinstance(item, str)}
    for glob in sorted(item for item in wanted if isinstance(item, str)):
        hits = {key for key, aliases in names.items() if any(fnmatchcase(a, glob) for a in aliases)}
        if not hits:
            known = ", ".join(aliases[0] for aliases in list(names.values())[:3])
            raise PolicyError(
                f"Policy.ignored_params: {glob!r} matches no parameter; the names are "
                f"{known or '(none)'}{', …' if len(names) > 3 else ''}"
            )
        ignored |= hits
    return ignored


def _check_reshard(
    layout: MeshLayout, policy: Policy, axes: Sequence[str], prefix: str = ""
) -> None:
    """Checks that an integer ``reshard_after_forward`` divides a shard axis that is cut."""
    size, total = policy.reshard_after_forward, layout.size(axes)
    if size is None or isinstance(size, bool) or policy.enable_param_shard is False:
        return
    if total % size and (total > 1 or not prefix):
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        shown = explain_axes(layout, axes) or "no shard dim"
        raise PolicyError(
            f"{prefix}Policy.reshard_after_forward: {size} does not divide the shard axis of "
            f"{total} ranks ({shown}); choose one of {divisors}"
        )


def _check_sum_axes(
    fqn: str, layout: MeshLayout, sum_axes: Sequence[str], taken: set[str]
) -> tuple[str, ...]:
    for axis in layout.axes(sum_axes):
        if axis in taken or axis not in layout.roles.tp + layout.roles.ep:
            raise PlacementError(
                f"{fqn}: its gradient cannot be a partial sum over mesh dim {axis!r} (role "
                f"{'/'.join(layout.roles.of(axis))}); only a tp or ep dim that neither cuts the "
                f"parameter nor splits the batch leaves one"
            )
    return layout.axes(sum_axes)


def _why_whole(
    shape: tuple[int, ...],
    shard_axes: tuple[str, ...],
    layout: MeshLayout,
    policy: Policy,
    packed: frozenset[int],
) -> str:
    """Returns why FSDP leaves a parameter whole, or an empty text if it cuts it."""
    if not resolve_enable_param_shard(layout, policy):
        off = policy.enable_param_shard is False
        return "enable_param_shard is False" if off else "the mesh has no data-parallel dim"
    if not layout.roles.shard:
        return "the mesh has no shard dim"
    if not shard_axes:
        return "its plan already uses every shard dim"
    if not shape:
        return "it is a scalar"
    if len(packed) == len(shape):
        return "the tensor-parallel plan cuts it block by block, which leaves no dim to cut again"
    numel = math.prod(shape)
    if numel < policy.min_shard_numel:
        return f"its {numel} elements are fewer than min_shard_numel={policy.min_shard_numel}"
    return ""


def _resolve_cut(
    fqn: str,
    shape: tuple[int, ...],
    param: Any,
    shard_axes: tuple[str, ...],
    policy: Policy,
    packed: frozenset[int],
) -> tuple[int, tuple[str, ...]]:
    """Returns which tensor dim FSDP cuts, and over which of the possible mesh dims."""
    default = next(dim for dim in range(len(shape)) if dim not in packed)
    if policy.shard_placement_fn is None:
        return default, shard_axes
    answer = policy.shard_placement_fn(param)
    placement, axes = answer, shard_axes
    if isinstance(answer, tuple) and len(answer) == 2:
        placement, chosen = answer
        chosen = (chosen,) if isinstance(chosen, str) else chosen
        axes = tuple(axis for axis in shard_axes if axis in chosen)
        if set(axes) != set(chosen) or not axes:
            raise PlacementError(
                f"{fqn}: shard_placement_fn chose the mesh dims {chosen!r}; the shard dims open to "
                f"this parameter are {shard_axes}"
            )
    if placement is None:
        return default, axes
    if not isinstance(placement, Shard):
        raise PlacementError(
            f"{fqn}: shard_placement_fn returned {answer!r} of type {type(answer).__name__}; "
            f"expected Shard(dim) with a dim of shape {shape}, or None for Shard(0)"
        )
    dim = normalise_dim(fqn, shape, placement.dim)
    if dim in packed:
        raise PlacementError(
            f"{fqn}: shard_placement_fn returned Shard({placement.dim}), but the tensor-parallel plan cuts dim {dim} block by "
            f"block, and no DTensor placement says both; return Shard({default}) or None"
        )
    return dim, axes


def _packed_dims(layout: MeshLayout, cut: Mapping[str, Placement]) -> frozenset[int]:
    """Dims that a TP plan cuts block by block: no placement says that FSDP cuts such a dim once more.

    A strided shard is no such cut where it only says that mesh dims to its right have cut the dim before.
    """
    packed = set()
    for axis, placement in cut.items():
        dim = shard_dim_of(placement)
        right = layout.dim_names[layout.dim_names.index(axis) + 1 :]
        before = layout.size([a for a in right if a in cut and shard_dim_of(cut[a]) == dim])
        if dim is not None and is_strided_shard(placement) and split_factor_of(placement) != before:
            packed.add(dim)
    return frozenset(packed)


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
        batch_ranks=1,
        shard_size=1,
        dp_size=1,
        sharded_ranks=(layout.rank,),
        unsharded_ranks=(layout.rank,),
        reduction="none",
        reason=IGNORED_REASON,
        requires_grad=bool(like.requires_grad),
        ignored=True,
        local_shape=shape,
    )
