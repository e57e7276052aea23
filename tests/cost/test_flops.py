"""FLOPs: as torch's own counter counts a step of the plain model."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from hp_compile.cost import CostModel
from hp_compile.cost.symbols import evaluate
from tests.cost.plans import cost_of, plan_on
from tests.models import CASES


@pytest.mark.parametrize(
    "name",
    ["uneven", "frozen", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tiny", "tied"))],
)
def test_equal_to_the_flop_counter(name: str) -> None:
    case = CASES[name]
    plain = case.make()
    inputs, targets = case.batch(0, 0)
    with FlopCounterMode(display=False) as counter:
        case.loss(plain(inputs), targets).backward()
    estimate = CostModel(plan_on((2, 2), name)).at()
    assert sum(estimate.flops.values()) == counter.get_total_flops() > 0


def test_transformer_with_attention() -> None:
    """By hand: 8 tokens, 2 blocks of width 32 and hidden 48, 4 heads of 8, vocabulary 64."""
    model = cost_of((2, 2), "lm")
    linear = 2 * (4 * 32 * 32 + 3 * 32 * 48) * 2 + 2 * 32 * 64
    attention = 2 * (2 * 2 * 4 * 8 * 8 * 8)
    a_sample = 8 * linear + attention
    assert evaluate(model.flops["forward"], {}) == 2 * a_sample
    # Two products for each one of forward; attention computes its scores again.
    assert evaluate(model.flops["backward"], {}) == 2 * (8 * 2 * linear + attention * 5 // 2)


def test_grows_with_the_batch() -> None:
    model = cost_of((2, 2), "tiny", dynamic=None)
    assert {str(s) for s in model.flops["forward"].free_symbols} == {"batch"}
    four, twelve = (sum(model.at(inputs={"batch": n}).flops.values()) for n in (4, 12))
    assert twelve == 3 * four
