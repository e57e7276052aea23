"""Between a tensor-parallel plan, in placements of parameters, and the pass, in layouts of values in an exported forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import fx
from torch.distributed.tensor import Placement

from hp_compile.dump import graph_text
from hp_compile.pipeline import verification
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan, with_sum_axes
from hyper_parallel.tensor_parallel import TensorParallelPlan
from hyper_parallel.torch_compat.distributed import shard_dim_of, split_factor_of
from hyper_parallel.torch_compat.tracing import trace_artifact
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
        f"{_PREFIX}{fqn}": Boundary(
            _maybe_layout(b.enters), _maybe_layout(b.given), _maybe_layout(b.leaves), b.least_rank
        )
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
        trace_artifact("hp_compile_exported_tensor_parallel", lambda: graph_text(made.forward))
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


def notes_of(
    plan: TensorParallelPlan | None,
    gathered: Collection[Gathered],
    uncut: Mapping[str, tuple[int, int]],
) -> tuple[str, ...]:
    """What a reader of the plan should know about its tensor parallelism, one sentence each.

    Args:
        plan: the tensor-parallel plan, if there is one.
        gathered: values that were gathered for operators that cannot run on their parts.
        uncut: modules at which a value was to be cut and is not, with the dim and its length.
    """
    if plan is None:
        return ()
    alike: dict[tuple[str, str, str], list[Gathered]] = {}
    for one in gathered:
        alike.setdefault((_starred(one.module), one.operator, one.reason), []).append(one)
    lines = []
    for (module, operator, reason), found in alike.items():
        what = "1 value is" if len(found) == 1 else f"{len(found)} values are"
        where = f" ({found[0].where.rpartition('/')[2]})" if found[0].where else ""
        lines.append(
            f"{what} gathered for {operator} in {module or 'the root module'}{where}: {reason}"
        )
    whole: dict[tuple[int, int], list[str]] = {}
    for module, cut in uncut.items():
        whole.setdefault(cut, []).append(_starred(module.removeprefix(_PREFIX)))
    for (dim, length), modules in whole.items():
        names = ", ".join(dict.fromkeys(modules))
        lines.append(
            f"activations stay whole on dim {dim} at {names}: its length {length} does not divide over {plan.size} ranks, so "
            "nothing is saved there; pad to a multiple"
        )
    return (*plan.notes, *lines)


def _starred(module: str) -> str:
    """Layers that differ in their number only, under one name."""
    return re.sub(r"\b\d+\b", "*", module)
