"""Between a tensor-parallel plan, in placements of parameters, and the pass, in layouts of values in an exported forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import fx
from torch.distributed.tensor import Placement

from hp_compile.pipeline import verification
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan, with_sum_axes
from hyper_parallel.tensor_parallel import TensorParallelPlan
from hyper_parallel.torch_compat.distributed import shard_dim_of, split_factor_of
from passes.tensor_parallel import Boundary, Gathered, Layout, Parallelised, tensor_parallel
from passes.verify import verify_parallel

_PREFIX = "module."


def parallel_forward(
    plan: TensorParallelPlan | None,
    params: Mapping[str, ParamPlan],
    layout: MeshLayout,
    keep_outputs: bool = False,
) -> Callable[[fx.GraphModule, Any], Parallelised] | None:
    """The tensor-parallel pass for one model and mesh, or None where there is nothing to do.

    Args:
        plan: the plan, if there is one.
        params: plan of every parameter.
        layout: the mesh.
        keep_outputs: outputs that are cut on their last dim stay cut.
    """
    if plan is None or plan.size == 1:
        return None
    cut = {
        f"{_PREFIX}{fqn}": _layout(placement)
        for fqn, placement in plan.placements.items()
        if not params[fqn].ignored
    }
    boundaries = {
        f"{_PREFIX}{fqn}": Boundary(*map(_maybe_layout, (b.enters, b.given, b.leaves)))
        for fqn, b in plan.boundaries.items()
    }

    def run(forward: fx.GraphModule, mode: Any) -> Parallelised:
        made = tensor_parallel(
            forward,
            params=cut,
            boundaries=boundaries,
            size=plan.size,
            group=layout.group_name((plan.axis,)),
            mode=mode,
            keep_outputs=keep_outputs or plan.keep_outputs,
        )
        if verification() != "0":
            verify_parallel(made)
        return made

    return run


def _layout(placement: Placement) -> Layout:
    return Layout(shard_dim_of(placement), split_factor_of(placement))


def _maybe_layout(placement: Placement | None) -> Layout | None:
    return None if placement is None else _layout(placement)


def with_partial_gradients(
    params: Mapping[str, ParamPlan],
    layout: MeshLayout,
    plan: TensorParallelPlan | None,
    partial: Collection[str],
) -> Mapping[str, ParamPlan]:
    """Plans that say which gradients are terms of a sum over the tensor-parallel ranks.

    Args:
        params: plan of every parameter.
        layout: the mesh.
        plan: the tensor-parallel plan, if there is one.
        partial: parameters whose gradients are terms.
    """
    if plan is None:
        return params
    return {
        fqn: with_sum_axes(p, layout, (plan.axis,)) if fqn in partial else p
        for fqn, p in params.items()
    }


def notes_of(plan: TensorParallelPlan | None, gathered: Collection[Gathered]) -> tuple[str, ...]:
    """What a reader of the plan should know about its tensor parallelism, one sentence each.

    Args:
        plan: the tensor-parallel plan, if there is one.
        gathered: values that were gathered for operators without a rule.
    """
    if plan is None:
        return ()
    alike: dict[tuple[str, str], list[Gathered]] = {}
    for one in gathered:
        module = re.sub(r"\b\d+\b", "*", one.module)
        alike.setdefault((module, one.operator), []).append(one)
    lines = [
        f"{len(found)} values are gathered for {operator} in {module or 'the root module'}, which has no rule for parts"
        + (f" ({found[0].where.rpartition('/')[2]})" if found[0].where else "")
        for (module, operator), found in alike.items()
    ]
    return (*plan.notes, *lines)
