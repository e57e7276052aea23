"""The test matrix without tensor and expert parallel: gradients, weights and collectives on every kind of data mesh.

Baselines: the unsharded model on the batches of all ranks, DistributedDataParallel, PyTorch's `fully_shard`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hp_compile
from hp_compile import Policy
from hyper_parallel import build_fsdp_meshes
from tests.baselines import (
    TrainOptions,
    TrainResult,
    assert_same,
    full_weights,
    merge_ranks,
    train,
    train_ddp,
    train_fsdp2,
    train_unsharded,
)
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.models import CASES

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
STEPS = TrainOptions(steps=2)


class Row(NamedTuple):
    """One mesh and policy on 4 ranks, and what has to happen there.

    Attributes:
        shape: Shape of the mesh.
        names: Names of its dims; None for `build_fsdp_meshes` with `shape` = (context, replicas).
        fields: Policy fields.
        reduction: Of every parameter.
        kinds: Kinds of collective in backward, gathers left out.
        groups: Ranks that rank 3 shares them with, by kind.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    fields: dict[str, Any]
    reduction: str
    groups: dict[str, tuple[int, ...]]


EVERYONE = (0, 1, 2, 3)
ROWS: dict[str, Row] = {
    "r1s4": Row((4,), ("dp_shard",), {}, "RS", {"reduce_scatter": EVERYONE}),
    "unnamed 1D": Row((4,), (), {}, "RS", {"reduce_scatter": EVERYONE}),
    "r2s2": Row(
        (2, 2),
        ("dp_replicate", "dp_shard"),
        {},
        "RS+AR",
        {"reduce_scatter": (2, 3), "all_reduce": (1, 3)},
    ),
    "unnamed 2D": Row((2, 2), (), {}, "RS+AR", {"reduce_scatter": (2, 3), "all_reduce": (1, 3)}),
    "r4s1": Row((4, 1), ("dp_replicate", "dp_shard"), {}, "AR", {"all_reduce": EVERYONE}),
    "not cut": Row(
        (2, 2),
        ("dp_replicate", "dp_shard"),
        {"enable_param_shard": False},
        "AR",
        {"all_reduce": EVERYONE},
    ),
    "replicas, inferred": Row((4,), ("ddp",), {}, "AR", {"all_reduce": EVERYONE}),
    "full mesh, inferred": Row(
        (2, 1, 2),
        ("dp_replicate", "tp", "dp_shard"),
        {"enable_param_shard": None},
        "RS+AR",
        {"reduce_scatter": (2, 3), "all_reduce": (1, 3)},
    ),
    "cut over two dims": Row(
        (2, 2),
        ("dp_shard", "cp"),
        {"roles": {"shard": ("dp_shard", "cp")}},
        "RS",
        {"reduce_scatter": EVERYONE},
    ),
    "context": Row(
        (2, 2), ("dp_shard", "cp"), {}, "RS+AR", {"reduce_scatter": (1, 3), "all_reduce": (2, 3)}
    ),
    "context, cut": Row((2, 1), None, {}, "RS", {"reduce_scatter": EVERYONE}),
    "context, hybrid": Row(
        (2, 2), None, {}, "RS+AR", {"reduce_scatter": (2, 3), "all_reduce": (1, 3)}
    ),
}


def mesh_of(row: Row, world_size: int) -> DeviceMesh:
    if row.names is None:
        context, replicas = row.shape
        return build_fsdp_meshes("cpu", world_size, context, replicas)["fsdp"]
    return init_device_mesh("cpu", row.shape, mesh_dim_names=row.names or None)


def run_rows(rank: int, world_size: int, name: str, labels: list[str]) -> dict[str, TrainResult]:
    results = {}
    case = CASES[name]
    for label in labels:
        row = ROWS[label]
        plain = case.make()
        before = {fqn: p.detach().clone() for fqn, p in plain.named_parameters()}
        policy = Policy(backend="aot_eager", **row.fields)
        model: Any = hp_compile.shard(plain, mesh_of(row, world_size), policy)
        for fqn, weight in full_weights(model).items():
            assert torch.equal(weight, before[fqn]), (label, fqn)
        plans = model.plan(*case.batch(rank, 0)[:1]).params
        assert {p.reduction for p in plans.values()} == {row.reduction}, label
        with count_collectives() as calls:
            results[label] = train(model, functools.partial(case.batch, rank), case.loss, STEPS)
        if rank == 3:
            seen = {(c.kind, c.ranks) for c in calls if not c.op.startswith("c10d.")}
            reductions = {kind: ranks for kind, ranks in seen if kind != "all_gather"}
            assert reductions == row.groups, (label, seen)
    return results


def topologies(rank: int, world_size: int, name: str) -> tuple[TrainResult, TrainResult]:
    hybrid = TrainOptions(steps=2, mesh_shape=(2, 2))
    return train_ddp(rank, world_size, name, STEPS), train_fsdp2(rank, world_size, name, hybrid)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["tiny", "uneven"])
@pytest.mark.slow
def test_rows(name: str) -> None:
    labels = list(ROWS) if name == "tiny" else ["r1s4", "r2s2", "r4s1", "cut over two dims"]
    by_rank = run_ranks(run_rows, 4, name, labels, timeout=600)
    results = {label: merge_ranks([ranks[label] for ranks in by_rank]) for label in labels}
    baselines = [train_unsharded(name, 4, STEPS)]
    baselines += [merge_ranks(r) for r in zip(*run_ranks(topologies, 4, name), strict=True)]
    for label, result in results.items():
        for expected in baselines:
            assert_same(result, expected, **TOLERANCE)
        assert_same(result, results["r1s4"], **TOLERANCE), label
