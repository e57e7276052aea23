"""The ``reason`` of a ParamPlan: one sentence for a reviewer, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Placement

from hyper_parallel.mesh import MeshLayout
from hyper_parallel.torch_compat.distributed import shard_dim_of

__all__ = ["IGNORED_REASON", "explain_axes", "explain_plan"]

IGNORED_REASON = "The policy ignores it: it stays a plain tensor, and its gradient stays local."


def explain_plan(
    layout: MeshLayout,
    *,
    model_parallel: Mapping[str, Placement],
    shard_axes: Sequence[str],
    replica_axes: Sequence[str],
    sum_axes: Sequence[str],
    shard_dim: int | None,
    whole: str,
    requires_grad: bool,
) -> str:
    """Says what cuts a parameter, over which mesh dims, and what happens to its gradient.

    Args:
        layout: The mesh.
        model_parallel: What TP and EP cut, by mesh dim.
        shard_axes: Mesh dims over which FSDP cuts.
        replica_axes: Mesh dims over which the slices must agree.
        sum_axes: Mesh dims over which a partial gradient is summed.
        shard_dim: The tensor dim that FSDP cuts.
        whole: Why FSDP does not cut it; empty if it does.
        requires_grad: Whether it is trained.
    """
    parts = [_model_parallel_part(layout, axis, model_parallel[axis]) for axis in model_parallel]
    if whole:
        parts.append(f"FSDP leaves it whole because {whole}")
    elif layout.size(shard_axes) == 1:
        parts.append(
            f"FSDP leaves it whole because {explain_axes(layout, shard_axes)} is a single rank"
        )
    else:
        inside = " of that slice" if model_parallel else ""
        parts.append(f"FSDP cuts dim {shard_dim}{inside} over {explain_axes(layout, shard_axes)}")
    parts.append(_gradient_part(layout, shard_axes, replica_axes, sum_axes, requires_grad))
    text = ", ".join(parts[:-1]) + f", and {parts[-1]}."
    return text[0].upper() + text[1:]


def explain_axes(layout: MeshLayout, axes: Sequence[str]) -> str:
    """Returns mesh dims with their sizes, e.g. ``dp_shard(4)×cp(2)``."""
    return "×".join(f"{axis}({layout.size(axis)})" for axis in axes)


def _model_parallel_part(layout: MeshLayout, axis: str, placement: Placement) -> str:
    kind = "expert" if axis in layout.roles.ep else "tensor"
    return (
        f"the {kind}-parallel plan cuts dim {shard_dim_of(placement)} over "
        f"{explain_axes(layout, (axis,))}"
    )


def _gradient_part(
    layout: MeshLayout,
    shard_axes: Sequence[str],
    replica_axes: Sequence[str],
    sum_axes: Sequence[str],
    requires_grad: bool,
) -> str:
    if not requires_grad:
        return "it is frozen, so there is no gradient to reduce"
    steps = []
    if layout.size(sum_axes) > 1:
        steps.append(f"summed over {explain_axes(layout, sum_axes)}, of which each rank has a term")
    if layout.size(shard_axes) > 1:
        steps.append(f"reduce-scattered over {explain_axes(layout, shard_axes)}")
    if layout.size(replica_axes) > 1:
        steps.append(f"all-reduced over {explain_axes(layout, replica_axes)}")
    if not steps:
        return "its gradient stays local because no other rank sees different data for it"
    return f"its gradient is {', then '.join(steps)}"
