"""What a parameter's plan says its buffers hold: the reference side of every comparison."""

from __future__ import annotations

import math

from torch.distributed.tensor import Replicate

from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from passes.verify.packing import Column, Grid, Pack, Run, concat, whole
from passes.verify.report import error
from passes.verify.sources import ShardAt


def full_parameter(plan: ParamPlan) -> Pack:
    """The full local parameter, put together from everybody's padded shards."""
    if plan.shard_dim is None or plan.shard_size == 1:
        raise ValueError(f"{plan.fqn} is not cut")
    dim, shape = plan.shard_dim, plan.local_shape
    rows, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    width = plan.padded_rows * inner
    parts = [(ShardAt(plan.fqn, r), length * inner) for r, length in enumerate(plan.lengths)]
    if rows == 1:
        return Pack(shape, [Run(source, 0, size) for source, size in parts])
    if math.prod(shape) == 0:
        return Pack(shape, ())
    return Pack(shape, [Grid(rows, tuple(Column(s, 0, width, n) for s, n in parts if n))])


def gradient_shard(plan: ParamPlan, gradient: Pack, rank: int) -> Pack:
    """The padded shard of a gradient that rank ``rank`` of the shard group should hold, before it is summed."""
    assert plan.shard_dim is not None
    dim, length = plan.shard_dim, plan.lengths[rank]
    start = sum(plan.lengths[:rank])
    piece = gradient.reshape(plan.local_shape).slice(dim, start, start + length)
    missing = plan.padded_rows - length
    if missing:
        shape = (*piece.shape[:dim], missing, *piece.shape[dim + 1 :])
        piece = concat([piece, whole(None, shape)], dim)
    return piece


def check_plan(plan: ParamPlan, layout: MeshLayout) -> None:
    """A plan must agree with its own mesh: sizes, rank lists, decision matrix, rows.

    Raises:
        VerificationError: it does not.
    """
    if plan.ignored:
        return
    batch, shard, replica = layout.batch_dims, plan.shard_axes, plan.replica_axes
    kept = zip(layout.dim_names, plan.unsharded_placements, strict=True)
    cut = {axis for axis, placement in kept if not isinstance(placement, Replicate)}
    kind = {(True, True): "RS+AR", (True, False): "RS", (False, True): "AR"}
    reduction = kind.get((plan.shard_size > 1, plan.dp_size > 1), "none")
    checks: tuple[tuple[str, object, object], ...] = (
        ("shard_size", plan.shard_size, layout.size(shard)),
        ("dp_size", plan.dp_size, layout.size(replica)),
        ("batch_ranks", plan.batch_ranks, layout.size(batch)),
        ("sharded_ranks", plan.sharded_ranks, layout.ranks_along(shard)),
        ("unsharded_ranks", plan.unsharded_ranks, layout.ranks_along(replica)),
        ("reduction", plan.reduction, reduction if plan.requires_grad else "none"),
        ("axes both cut and replicated", {*shard} & {*replica}, set()),
        ("axes of the mean", {*shard, *replica}, {*batch} - cut),
    )
    for name, found, expected in checks:
        _equal(plan, name, found, expected)
    if plan.shard_size > 1:
        assert plan.shard_dim is not None
        _equal(plan, "rows of all ranks", sum(plan.lengths), plan.local_shape[plan.shard_dim])
        _equal(plan, "ranks with rows", len(plan.lengths), plan.shard_size)


def _equal(plan: ParamPlan, name: str, found: object, expected: object) -> None:
    if found != expected:
        raise error(
            f"{plan.fqn}: its plan disagrees with the mesh in {name}",
            found=str(found),
            expected=str(expected),
            cause="the plan was made for another mesh, or changed by hand; make it with plan_params",
        )
