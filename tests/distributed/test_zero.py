"""ZeRO levels: what is gathered and reduced in each micro-batch, counted from outside, and the same training."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

import hp_compile
from hp_compile import Policy
from tests.baselines import (
    TrainOptions,
    TrainResult,
    assert_same,
    merge_ranks,
    train,
    train_unsharded,
)
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.distributed.ours import make_mesh
from tests.models import CASES

OPTIONS = TrainOptions(steps=2, micro_batches=3)
PARAMETERS = 9
UNITS = 3  # two blocks, and what is outside
GATHER, SCATTER = "all_gather", "reduce_scatter"


def train_level(rank: int, world_size: int, level: int) -> tuple[TrainResult, list[dict[str, int]]]:
    """Training, and for every micro-batch the collectives that ran, in forward and backward."""
    case = CASES["tiny"]
    policy = Policy.zero(level, backend="aot_eager")
    model: Any = hp_compile.shard(case.make(), make_mesh(OPTIONS, world_size), policy)
    counts: list[Counter[str]] = []

    def before_micro(last: bool) -> None:
        model.set_is_last_backward(last)
        if level == 1:
            model.set_requires_gradient_sync(last)

    def call(inputs: Any) -> Any:
        with count_collectives() as calls:
            out = model(inputs)
        counts.append(Counter(f"forward {c.kind}" for c in calls))
        return out

    def batch(index: int) -> Any:
        return case.batch(rank, index)

    with count_collectives() as everything:
        result = train(
            model,
            functools.partial(batch),
            case.loss,
            OPTIONS,
            call=call,
            before_micro=before_micro,
        )
    total = Counter(c.kind for c in everything if c.op.startswith("_c10d"))
    return result, [*map(dict, counts), dict(total)]


EXPECTED = {
    # Gathers in forward of the three micro-batches of a step; all reduce-scatters of a step.
    1: ((UNITS, UNITS, UNITS), UNITS),
    2: ((UNITS, 0, 0), 3 * UNITS),
    3: ((UNITS, UNITS, UNITS), 3 * UNITS),
}


@pytest.mark.dist
@pytest.mark.parametrize("level", [1, 2, 3])
def test_level(level: int) -> None:
    results, counts = zip(*run_ranks(train_level, 2, level), strict=True)
    expected = train_unsharded("tiny", 2, OPTIONS)
    assert_same(merge_ranks(results), expected, rtol=2e-5, atol=2e-6)
    forward, scatters = EXPECTED[level]
    for *micros, total in counts:
        gathers = [m.get(f"forward {GATHER}", 0) for m in micros]
        assert gathers == [*forward, *forward]
        assert total[SCATTER] == 2 * scatters
        recorded = 3 * PARAMETERS  # what `train` reads in full: gradients of two steps, and weights
        again = total[GATHER] - sum(gathers) - recorded
        assert again == (2 * 3 * UNITS if level == 3 else 0)
