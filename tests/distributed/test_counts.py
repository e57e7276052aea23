"""What a real step communicates, counted from outside, is what the plan says and what the formula gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hp_compile
from hp_compile import MixedPrecisionPolicy, Policy
from passes.base import ParamInput, SavedOutput, outputs
from tests.baselines import TrainOptions
from tests.count_collectives import CollectiveCall, count_collectives
from tests.dist_pool import fake_world, run_ranks
from tests.distributed.ours import make_mesh
from tests.models import CASES

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Label, mesh shape (None: all ranks in one dim), policy fields.
POLICIES: list[tuple[str, tuple[int, ...] | None, dict[str, Any]]] = [
    ("fsdp", None, {"reshard_after_forward": True}),
    ("fsdp, kept", None, {"reshard_after_forward": False}),
    ("fsdp, root kept", None, {"reshard_after_forward": None}),
    ("fsdp, pairs", (4,), {"reshard_after_forward": 2}),
    ("fsdp, one collective a parameter", None, {"reshard_after_forward": True, "bucket_mb": 0}),
    ("fsdp, one bucket", None, {"reshard_after_forward": True, "bucket_mb": 1000.0}),
    ("hsdp", (2, 2), {"reshard_after_forward": True}),
    ("hsdp, small buckets", (2, 2), {"reshard_after_forward": True, "bucket_mb": 0.001}),
    ("hsdp, mixed precision", (2, 2), {"reshard_after_forward": True, "mp_policy": MIXED}),
    ("not cut", (2, 2), {"enable_param_shard": False}),
    ("replicas only", (4, 1), {"reshard_after_forward": True}),
]
INDUCTOR = ("fsdp", "hsdp, mixed precision")

Line = tuple[str, tuple[int, ...], torch.dtype, int]


def count_steps(rank: int, world_size: int, labels: list[str], backend: str) -> None:
    case = CASES["tiny"]
    for label, shape, fields in POLICIES:
        if label not in labels:
            continue
        policy = Policy(backend=backend, **fields)
        mesh = make_mesh(TrainOptions(mesh_shape=shape), world_size)
        model = hp_compile.shard(case.make(), mesh, policy)
        inputs, targets = case.batch(rank, 0)
        with count_collectives() as planning:
            plan = model.plan(inputs)
        assert not planning
        for _ in range(2):  # the first step compiles, and no step communicates for that
            with count_collectives() as in_forward:
                loss = case.loss(model(inputs), targets)
            with count_collectives() as in_backward:
                loss.backward()
            model.zero_grad()
            for phase, calls in (("forward", in_forward), ("backward", in_backward)):
                expected = [line(c) for c in plan.collectives if c.phase == phase]
                assert [line(c) for c in calls] == expected, (label, phase)


def line(call: CollectiveCall | hp_compile.Collective) -> Line:
    return call.kind, call.ranks, call.dtype, call.nbytes


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_step_runs_the_planned_collectives(backend: str, world_size: int) -> None:
    four = [label for label, shape, _ in POLICIES if shape is not None or label == "fsdp, pairs"]
    two = [label for label, *_ in POLICIES if label not in four]
    labels = [n for n in (two, four)[world_size == 4] if backend == "aot_eager" or n in INDUCTOR]
    run_ranks(count_steps, world_size, labels, backend, timeout=400)


@pytest.mark.parametrize("label", [label for label, *_ in POLICIES])
def test_planned_bytes_are_the_floor(label: str) -> None:
    ((_, shape, fields),) = [p for p in POLICIES if p[0] == label]
    case = CASES["tiny"]
    shape = (4,) if shape is None else shape
    with fake_world(4, rank=1):
        mesh = make_mesh(TrainOptions(mesh_shape=shape), 4)
        inputs, _ = case.batch(1, 0)
        plan = hp_compile.plan(case.make(), mesh, Policy(**fields), args=(inputs,))
        assert "padding: none" in plan.dump()
        check_formula(label, 1, shape, fields, [line(c) for c in plan.collectives])
        check_saved(plan, fields, cut=fields.get("enable_param_shard", True) and shape[-1] > 1)


def check_saved(plan: hp_compile.Plan, fields: dict[str, Any], cut: bool) -> None:
    """With resharding nothing that is made of weights alone is saved but shards, whole or of a smaller group."""
    forward = plan.graphs["forward"]
    of_weights: dict[Any, bool] = {}
    for node in forward.graph.nodes:
        if node.op == "placeholder":
            of_weights[node] = isinstance(node.meta["role"], ParamInput)
        else:
            of_weights[node] = bool(node.all_input_nodes) and all(
                of_weights[n] for n in node.all_input_nodes
            )
    gathered = [
        node.meta["val"].numel()
        for _, node, _ in outputs(forward, SavedOutput)
        if of_weights[node] and node.op != "placeholder"
    ]
    inner = fields.get("reshard_after_forward")
    if not cut:
        return  # views of weights that the module holds whole cost nothing
    if inner is True:
        assert gathered == []
    elif inner is False:
        assert gathered and max(gathered) == 128  # what the check is there to find
    elif inner is None:
        assert gathered == [32]  # the root's
    else:
        assert gathered and max(gathered) == 128 // inner


def test_padding_is_stated() -> None:
    case = CASES["uneven"]
    with fake_world(4):
        mesh = make_mesh(TrainOptions(), 4)
        policy = Policy(reshard_after_forward=False)
        plan = hp_compile.plan(case.make(), mesh, policy, args=(case.batch(0, 0)[0],))
    rows = {n: p.padded_rows * 4 - sum(p.lengths) for n, p in plan.params.items()}
    padding = sum(rows[n] * math.prod(p.shape) // p.shape[0] for n, p in plan.params.items())
    total = sum(math.prod(p.shape) for p in plan.params.values())
    sent = sum(c.nbytes for c in plan.collectives if c.kind == "all_gather")
    assert padding > 0
    assert sent == 3 * (total + padding) * 4 // 4
    first = next(n for n, r in rows.items() if r)
    assert f"padding: {first} +{rows[first]} rows" in plan.dump()


def check_formula(
    label: str, rank: int, shape: tuple[int, ...], fields: dict[str, Any], calls: list[Line]
) -> None:
    """The floor: (F-1)/F·P·e a gather, the same a reduce-scatter, 2(R-1)/R·P/F·e an all-reduce; nothing is padded here."""
    sizes = {n: p.numel() for n, p in CASES["tiny"].make().named_parameters()}
    total = sum(sizes.values())
    cut = fields.get("enable_param_shard", True)
    shards = shape[-1] if cut else 1
    replicas = math.prod(shape) // shards
    gathered = 2 if fields.get("mp_policy") else 4  # bytes an element on the wire
    sent: dict[str, int] = {}
    for kind, ranks, _, nbytes in calls:
        assert rank in ranks
        sent[kind] = sent.get(kind, 0) + nbytes
    scatter = (shards - 1) * total * 4 // shards
    reduce = 2 * (replicas - 1) * (total // shards) * 4 // replicas
    assert sent.get("reduce_scatter", 0) == scatter, label
    assert sent.get("all_reduce", 0) == reduce, label
    once = (shards - 1) * total * gathered // shards
    again = sum(backward_bytes(sizes, fields, shards, gathered).values())
    assert sent.get("all_gather", 0) == once + again, label


def backward_bytes(
    sizes: dict[str, int], fields: dict[str, Any], shards: int, element: int
) -> dict[str, int]:
    """What is gathered again: every weight whose value backward needs; no bias, and no weight of the first layer."""
    reshard = fields.get("reshard_after_forward")
    if reshard is False:
        return {}
    needed = {n: s for n, s in sizes.items() if "bias" not in n and "enter" not in n}
    if reshard is None:
        needed = {n: s for n, s in needed.items() if n.startswith("blocks.")}
    group = reshard if isinstance(reshard, int) and reshard > 1 else shards
    return {n: (group - 1) * s * element // group for n, s in needed.items()}
