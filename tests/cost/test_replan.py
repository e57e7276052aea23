"""Another mesh without another capture: the same plan as capturing there gives."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Shard

from hp_compile import capture
from hp_compile.cost import replan
from hyper_parallel.errors import HPCompileError, MeshError
from tests.cost.plans import NAMES, plan_on


@pytest.mark.parametrize("case", ["uneven", "frozen"])
@pytest.mark.parametrize("shape", [(2, 4), (1, 3)])
def test_equals_a_plan_made_there(case: str, shape: tuple[int, int]) -> None:
    again = replan(plan_on((2, 2), case), dict(zip(NAMES, shape, strict=True)))
    there = plan_on(shape, case)
    assert again.dump() == there.dump()
    again.verify()


def test_placements_of_the_user_are_kept() -> None:
    options = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}
    again = replan(plan_on((2, 2), "uneven", **options), {"dp_shard": 3})
    assert again.dump() == plan_on((2, 3), "uneven", **options).dump()


def test_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on((2, 2), "tiny")
    monkeypatch.setattr(capture, "joint_trace", None)
    assert len(replan(plan, {"dp_shard": 16}).collectives) == len(plan.collectives)
    assert plan.layout.shape == (2, 2)


def test_captured_dims_keep_their_size() -> None:
    plan = plan_on((2, 2), "tiny", names=("dp_shard", "tp"))
    with pytest.raises(HPCompileError, match="tp dim 'tp' was captured with size 2"):
        replan(plan, {"tp": 4})
    with pytest.raises(MeshError, match="size of 1 or more"):
        replan(plan, {"dp_shard": 0})
