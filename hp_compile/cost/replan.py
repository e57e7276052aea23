"""One captured program on another mesh: everything but the capture is done again.

The captured graph is the program of one device and knows no mesh, so a plan for other sizes of the data-parallel dims
needs new parameter plans and the passes, and no second trace. Tensor and expert parallel change the captured graph itself;
their sizes stay what they were.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from hp_compile.plan import Plan
from hp_compile.program import Program
from hyper_parallel.errors import HPCompileError, MeshError, PolicyError
from hyper_parallel.mesh import MeshLayout, infer_roles
from hyper_parallel.plan import ParamPlan, plan_param
from hyper_parallel.policy import Policy
from passes.base import info, rename_groups, set_info


@dataclass(frozen=True)
class _Stand:
    """What planning reads of a parameter that is not there any more."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def layout_like(layout: MeshLayout, policy: Policy, sizes: Mapping[str, int]) -> MeshLayout:
    """A mesh of other sizes, seen from its first rank.

    Args:
        layout: the mesh that a plan was made for.
        policy: its policy; ``roles`` say what a dim is for that the mesh did not have.
        sizes: new size of any dim; a dim that the mesh lacks comes before those that it has.

    Raises:
        MeshError: a size below 1, or a new dim without a role.
    """
    added = [name for name in sizes if name not in layout.dim_names]
    names = (*added, *layout.dim_names)
    old = dict(zip(layout.dim_names, layout.shape, strict=True))
    shape = tuple(int(sizes.get(name, old.get(name, 1))) for name in names)
    if any(size < 1 for size in shape):
        raise MeshError(f"sizes: every mesh dim needs a size of 1 or more, got {dict(sizes)}")
    roles = layout.roles
    if added:
        names, roles = infer_roles(names, shape, policy.roles)
    total = 1
    for size in shape:
        total *= size
    return MeshLayout(names, shape, tuple(range(total)), 0, roles)


def replan(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """The plan of the same captured program on a mesh of other sizes, seen from rank 0.

    Args:
        plan: a plan with a program.
        sizes: size of any mesh dim; others keep theirs. ``dp_replicate`` or another recognised dim may be new.

    Returns:
        A plan that equals ``hp_compile.plan`` on that mesh, made without capturing again.

    Raises:
        CaptureError: the plan was made without example inputs.
        HPCompileError: a tensor- or expert-parallel dim would change its size, which the captured graph depends on.
        PolicyError, MeshError: the policy does not fit the new mesh.

    Example:
        >>> replan(plan, {"dp_shard": 64}).collectives  # doctest: +SKIP
    """
    program = plan._require_program()
    layout = layout_like(plan.layout, plan.policy, sizes)
    _check_model_parallel(plan.layout, layout)
    params = {fqn: _plan_again(p, plan, layout) for fqn, p in plan.params.items()}
    gm = copy.deepcopy(program.captured.gm)
    set_info(gm, replace(info(gm), layout=layout, params=params))
    rename_groups(gm, plan.layout, layout)
    again = Program(
        replace(program.captured, gm=gm),
        program.signature,
        program.policy,
        program.reshard,
        program.gathered,
        program.traced,
    )
    return Plan(layout, plan.policy, params, again, plan._signature)


def check_sizes(plan: Plan, sizes: Mapping[str, int]) -> None:
    """Checks that a plan's policy and capture allow a mesh of other sizes.

    Raises:
        HPCompileError, PolicyError, MeshError: as for :func:`replan`.
    """
    layout = layout_like(plan.layout, plan.policy, sizes)
    _check_model_parallel(plan.layout, layout)
    inner, ranks = plan.policy.reshard_after_forward, layout.size(layout.roles.shard)
    if isinstance(inner, int) and not isinstance(inner, bool) and ranks % inner:
        raise PolicyError(
            f"Policy.reshard_after_forward: {inner} does not divide the shard axis of {ranks} ranks ({layout.describe()})"
        )
    cut = next((p for p in plan.params.values() if p.shard_dim is not None), None)
    if cut is not None:
        _plan_again(cut, plan, layout)


def _check_model_parallel(old: MeshLayout, new: MeshLayout) -> None:
    for role in ("tp", "ep"):
        for axis in getattr(new.roles, role):
            before = old.size(axis) if axis in old.dim_names else 1
            if new.size(axis) != before:
                raise HPCompileError(
                    f"sizes: {role} dim {axis!r} was captured with size {before} and cannot become {new.size(axis)} without "
                    "another capture; plan the model on a mesh with that size"
                )


def _plan_again(old: ParamPlan, plan: Plan, layout: MeshLayout) -> ParamPlan:
    """The one decision about a parameter, made again for another mesh."""
    policy = plan.policy
    stand = _Stand(old.shape, old.dtype, old.requires_grad)
    param: Any = stand
    if policy.shard_placement_fn is not None:
        param = torch.empty(old.shape, dtype=old.dtype, device="meta")
    if old.shard_dim is not None:
        limited = set(old.shard_axes) != set(plan.layout.roles.shard) - set(_cut(old, plan.layout))
        answer: Any = Shard(old.shard_dim)
        policy = replace(
            policy,
            shard_placement_fn=lambda _: (answer, old.shard_axes) if limited else answer,
        )
    return plan_param(
        old.fqn,
        stand,
        layout=layout,
        policy=policy,
        mp_placements=_cut(old, plan.layout),
        sum_axes=old.sum_axes,
        ignored=old.ignored,
        param=param,
    )


def _cut(old: ParamPlan, layout: MeshLayout) -> dict[str, Any]:
    """What tensor or expert parallel does to a parameter, by mesh dim."""
    return {
        axis: placement
        for axis, placement in zip(layout.dim_names, old.unsharded_placements, strict=True)
        if not isinstance(placement, Replicate)
    }


__all__ = ["check_sizes", "layout_like", "replan"]
