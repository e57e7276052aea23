"""How many collectives a step runs, of which kind and among which ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel import fully_shard
from tests.baselines import TrainOptions, shard_with_fsdp2
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, Block, LMConfig, ModelCase, TransformerLM, build

Groups = dict[tuple[str, tuple[int, ...]], int]
BLOCKS = 3
CASE = ModelCase(
    name="counted",
    factory=lambda: TransformerLM(LMConfig(blocks=BLOCKS)),
    batch=CASES["lm"].batch,
    loss=CASES["lm"].loss,
    units=tuple(f"blocks.{i}" for i in range(BLOCKS)),
)


def count(
    rank: int,
    world_size: int,
    shape: tuple[int, ...],
    reshard: bool | int | None,
    stock: bool = False,
    **changes: Any,
) -> tuple[Groups, Groups, Groups]:
    """Return the collectives of a first forward, its backward, and a whole second step."""
    options = TrainOptions(mesh_shape=shape, reshard_after_forward=reshard)
    model = CASE.make()
    if stock:
        shard_with_fsdp2(model, CASE, options)
    else:
        shard(model, CASE, options, **changes)
    inputs, targets = CASE.batch(rank, 0)
    with count_collectives() as forward:
        loss = CASE.loss(model(inputs), targets)
    with count_collectives() as backward:
        loss.backward()
    with count_collectives() as second:
        CASE.loss(model(inputs), targets).backward()
    return forward.by_group(), backward.by_group(), second.by_group()


@pytest.mark.dist
@pytest.mark.parametrize(("reshard", "gathers"), [(True, BLOCKS + 1), (False, 0), (None, BLOCKS)])
def test_one_dim_counts_equal_fsdp2(reshard: bool | None, gathers: int) -> None:
    ours = run_ranks(count, 2, (2,), reshard)
    assert ours == run_ranks(count, 2, (2,), reshard, True)
    world = (0, 1)
    forward, backward, second = ours[0]
    assert forward == {("all_gather", world): BLOCKS + 1}
    expected = {("reduce_scatter", world): BLOCKS + 1}
    if gathers:
        expected["all_gather", world] = gathers
    assert backward == expected
    assert second["reduce_scatter", world] == BLOCKS + 1


@pytest.mark.dist
def test_integer_reshard_gathers_in_the_subgroup() -> None:
    results = run_ranks(count, 4, (4,), 2)
    for rank, (forward, backward, _) in enumerate(results):
        pair = (0, 1) if rank < 2 else (2, 3)
        assert forward == {("all_gather", (0, 1, 2, 3)): BLOCKS + 1}
        assert backward == {
            ("all_gather", pair): BLOCKS + 1,
            ("reduce_scatter", (0, 1, 2, 3)): BLOCKS + 1,
        }


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_hybrid_adds_one_all_reduce_a_unit(reshard: bool) -> None:
    ours = run_ranks(count, 4, (2, 2), reshard)
    assert ours == run_ranks(count, 4, (2, 2), reshard, True)
    for rank, (_, backward, _) in enumerate(ours):
        shard_group = (0, 1) if rank < 2 else (2, 3)
        replicas = (rank % 2, rank % 2 + 2)
        assert backward["reduce_scatter", shard_group] == BLOCKS + 1
        assert backward["all_reduce", replicas] == BLOCKS + 1


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shape", "changes"), [((2, 1), {}), ((2,), {"enable_param_shard": False})]
)
def test_only_the_all_reduce_at_shard_size_one(
    shape: tuple[int, ...], changes: dict[str, Any]
) -> None:
    for forward, backward, second in run_ranks(_count_changed, 2, shape, changes):
        assert forward == {}
        assert backward == second == {("all_reduce", (0, 1)): BLOCKS + 1}


def _count_changed(
    rank: int, world_size: int, shape: tuple[int, ...], changes: dict[str, Any]
) -> tuple[Groups, Groups, Groups]:
    return count(rank, world_size, shape, True, **changes)


@pytest.mark.dist
def test_no_collective_on_one_rank() -> None:
    assert run_ranks(count, 1, (1,), True) == [({}, {}, {})]


def count_accumulation(rank: int, world_size: int, setter: str) -> list[dict[str, int]]:
    model = CASE.make()
    sharded = shard(model, CASE, TrainOptions(mesh_shape=(2, 2)))
    counts = []
    for last in (False, False, True):
        getattr(sharded, setter)(last)
        inputs, targets = CASE.batch(rank, 0)
        with count_collectives() as calls:
            CASE.loss(model(inputs), targets).backward()
        counts.append(calls.kinds())
        assert last or all(param.grad is None for param in model.parameters())
    return counts


@pytest.mark.dist
def test_counts_of_accumulation() -> None:
    gathers = {"all_gather": 2 * (BLOCKS + 1)}
    scatters = {"reduce_scatter": BLOCKS + 1}
    reduces = {"all_reduce": BLOCKS + 1}
    for counts in run_ranks(count_accumulation, 4, "set_requires_gradient_sync"):
        assert counts == [gathers, gathers, gathers | scatters | reduces]
    for counts in run_ranks(count_accumulation, 4, "set_requires_all_reduce"):
        assert counts == [gathers | scatters, gathers | scatters, gathers | scatters | reduces]


def zero_levels(rank: int, world_size: int, level: int) -> list[dict[str, int]]:
    model = CASE.make()
    sharded = shard(model, CASE, TrainOptions(reshard_after_forward=level == 3))
    counts = []
    for last in (False, False, True):
        if level == 1:
            sharded.set_requires_gradient_sync(last)
        if level == 2:
            sharded.set_reshard_after_backward(last)
        sharded.set_is_last_backward(last)
        inputs, targets = CASE.batch(rank, 0)
        with count_collectives() as calls:
            CASE.loss(model(inputs), targets).backward()
        counts.append(calls.kinds())
    return counts


@pytest.mark.dist
def test_counts_of_zero_levels() -> None:
    units = BLOCKS + 1
    expected = {
        1: [{"all_gather": units}] * 2 + [{"all_gather": units, "reduce_scatter": units}],
        2: [{"all_gather": units, "reduce_scatter": units}] + [{"reduce_scatter": units}] * 2,
        3: [{"all_gather": 2 * units, "reduce_scatter": units}] * 3,
    }
    for level, counts in expected.items():
        assert run_ranks(zero_levels, 2, level) == [counts] * 2


def wire_dtypes(rank: int, world_size: int) -> set[tuple[str, torch.dtype]]:
    model = CASE.make()
    options = TrainOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, CASE, options)
    inputs, targets = CASE.batch(rank, 0)
    with count_collectives() as calls:
        CASE.loss(model(inputs), targets).backward()
    return {(call.kind, call.dtype) for call in calls}


@pytest.mark.dist
def test_the_wire_carries_the_dtypes_of_the_policy() -> None:
    expected = {("all_gather", torch.bfloat16), ("reduce_scatter", torch.float32)}
    assert run_ranks(wire_dtypes, 2) == [expected] * 2


def two_groups_for_twenty_parameters(rank: int, world_size: int) -> int:
    import torch.distributed as dist

    mesh = data_mesh((2, 2))
    before = len(dist.distributed_c10d._world.pg_map)
    block = build(Block, LMConfig())
    fully_shard(block, mesh=mesh)
    fully_shard(build(Block, LMConfig()), mesh=mesh)
    return len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.dist
def test_no_new_groups_on_a_mesh_that_has_them() -> None:
    assert run_ranks(two_groups_for_twenty_parameters, 4) == [0] * 4
