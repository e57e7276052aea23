"""The counter against what is known of PyTorch's own FSDP2, DTensor and compiled graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.baselines import TrainOptions, shard_with_fsdp2
from tests.count_collectives import (
    KINDS,
    NAMESPACES,
    NOT_COLLECTIVES,
    CollectiveCalls,
    count_collectives,
    ring_bytes,
)
from tests.dist_pool import fake_world, run_ranks
from tests.models import CASES

LM_UNITS = 3  # two blocks and the root


def fsdp2_step(rank: int, world_size: int, options: TrainOptions) -> CollectiveCalls:
    case = CASES["lm"]
    model = case.make()
    shard_with_fsdp2(model, case, options)
    inputs, targets = case.batch(rank, 0)
    with count_collectives() as calls:
        case.loss(model(inputs), targets).backward()
    return calls


def lm_bytes(shards: int, itemsize: int = 4) -> int:
    """Return the bytes of all weights of the LM, dim 0 padded to a multiple of `shards`."""
    return sum(
        -(-p.shape[0] // shards) * shards * (p.numel() // p.shape[0]) * itemsize
        for p in CASES["lm"].make().parameters()
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("reshard_after_forward", "gathers"),
    [(True, 2 * LM_UNITS), (None, 2 * LM_UNITS - 1), (False, LM_UNITS)],
)
def test_fsdp2_counts_and_bytes(reshard_after_forward: bool | None, gathers: int) -> None:
    options = TrainOptions(reshard_after_forward=reshard_after_forward)
    for calls in run_ranks(fsdp2_step, 2, options):
        assert calls.kinds() == {"all_gather": gathers, "reduce_scatter": LM_UNITS}
        assert {call.ranks for call in calls} == {(0, 1)}
        assert {call.dtype for call in calls} == {torch.float32}
        assert calls.nbytes("reduce_scatter") == lm_bytes(2) // 2
        if reshard_after_forward:
            assert calls.nbytes("all_gather") == 2 * lm_bytes(2) // 2


@pytest.mark.dist
def test_fsdp2_hybrid_groups_and_dtypes() -> None:
    options = TrainOptions(
        mesh_shape=(2, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for rank, calls in enumerate(run_ranks(fsdp2_step, 4, options)):
        shard = (0, 1) if rank < 2 else (2, 3)
        replicate = (rank % 2, rank % 2 + 2)
        assert calls.by_group() == {
            ("all_gather", shard): 2 * LM_UNITS,
            ("reduce_scatter", shard): LM_UNITS,
            ("all_reduce", replicate): LM_UNITS,
        }
        dtypes = {(call.kind, call.dtype) for call in calls}
        assert dtypes == {
            ("all_gather", torch.bfloat16),
            ("reduce_scatter", torch.float32),
            ("all_reduce", torch.float32),
        }
        # An all-reduce of 1/2 of the weights over 2 ranks: 2 * (2 - 1) / 2 of that.
        assert calls.nbytes("all_reduce") == lm_bytes(2) // 2


def dtensor_calls(rank: int, world_size: int) -> CollectiveCalls:
    mesh = init_device_mesh("cpu", (world_size,))
    value = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with count_collectives() as calls:
        value.full_tensor()
        value.sum().full_tensor()
    return calls


@pytest.mark.dist
def test_dtensor_is_counted_once() -> None:
    for calls in run_ranks(dtensor_calls, 2):
        assert [(c.op, c.input_bytes, c.nbytes) for c in calls] == [
            ("_c10d_functional.all_gather_into_tensor", 16, 16),
            ("_c10d_functional.all_reduce", 4, 4),
        ]


def exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    gathered = funcol.all_gather_tensor(x * 2, 0, group)
    scattered = funcol.reduce_scatter_tensor(gathered.sin(), "sum", 0, group)
    return funcol.all_reduce(scattered, "sum", group) + 1


def compiled_calls(rank: int, world_size: int) -> list[CollectiveCalls]:
    group = dist.group.WORLD
    x = torch.arange(6.0) + rank
    traced = make_fx(lambda v: exchange(v, group), tracing_mode="fake")(x)
    results = []
    expected = exchange(x, group)
    for callable_ in (traced, compile_fx(traced, [x])):
        with count_collectives() as calls:
            actual = callable_(x)
        actual = actual[0] if isinstance(actual, (list, tuple)) else actual
        torch.testing.assert_close(actual, expected)
        results.append(calls)
    with count_collectives() as calls:
        make_fx(lambda v: exchange(v, group), tracing_mode="fake")(x)
    results.append(calls)
    return results


@pytest.mark.slow
@pytest.mark.dist
def test_graphs_and_compiled_code_are_counted_and_tracing_is_not() -> None:
    for graph, compiled, tracing in run_ranks(compiled_calls, 2):
        for calls in (graph, compiled):
            assert calls.kinds() == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
            assert {call.ranks for call in calls} == {(0, 1)}
            assert [call.nbytes for call in calls] == [24, 24, 24]
        assert tracing == []


def plain_calls(rank: int, world_size: int) -> CollectiveCalls:
    group = dist.new_group([0, 1, 2])
    x = torch.ones(3, dtype=torch.int32)
    with count_collectives() as calls:
        if rank < 3:
            dist.all_to_all_single(torch.empty_like(x), x, group=group)
        dist.all_reduce(x.bfloat16())
        dist.all_gather([torch.empty_like(x) for _ in range(world_size)], x)
        dist.broadcast(x, 0)
        dist.barrier()
    return calls


@pytest.mark.dist
def test_plain_calls_and_subgroups() -> None:
    calls = run_ranks(plain_calls, 4)[1]
    everyone = (0, 1, 2, 3)
    assert [(c.kind, c.ranks, c.dtype, c.nbytes) for c in calls[:4]] == [
        ("all_to_all", (0, 1, 2), torch.int32, 8),
        ("all_reduce", everyone, torch.bfloat16, 9),
        ("all_gather", everyone, torch.int32, 36),
        ("broadcast", everyone, torch.int32, 12),
    ]
    assert calls[4].kind == "barrier"


def test_every_op_of_this_torch_is_known() -> None:
    known = KINDS.keys() | NOT_COLLECTIVES
    names = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.split("::")[0] in NAMESPACES
    }
    assert len(names) > 20
    assert names <= known, f"unknown collectives: {sorted(names - known)}"


def test_counts_under_a_fake_world_of_any_size() -> None:
    with fake_world(64), count_collectives() as calls:
        dist.all_reduce(torch.ones(64))
    assert [(call.kind, len(call.ranks), call.nbytes) for call in calls] == [
        ("all_reduce", 64, 2 * 63 * 4)
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_gather", 3 * 40), ("reduce_scatter", 30), ("all_reduce", 60), ("all_to_all", 30)],
)
def test_ring_bytes(kind: str, expected: int) -> None:
    assert ring_bytes(kind, 40, 4) == expected
    assert ring_bytes(kind, 40, 1) == 0
