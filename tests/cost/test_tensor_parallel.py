"""Bytes of a tensor-parallel plan on other data meshes: expressions of one capture against graphs planned from the start."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hp_compile import Plan
from hp_compile.cost import CostModel, sweep
from tests.passes.test_tensor_parallel import MEGATRON, SEQUENCE, Model, plan_of, seeded, tokens


def plan_on(data: int, tp: int, tp_plan: Any) -> Plan:
    mesh = ((data, tp), ("dp_shard", "tp"))
    return plan_of(seeded(Model), tp_plan, tuple(tokens(0)), mesh)


@pytest.mark.parametrize("tp_plan", [MEGATRON, SEQUENCE], ids=["tensor", "sequence"])
def test_bytes_on_other_data_meshes(tp_plan: Any) -> None:
    model = CostModel(plan_on(2, 2, tp_plan))
    for data in (3, 4):
        there: Counter[str] = Counter()
        for collective in plan_on(data, 2, tp_plan).collectives:
            there[collective.kind] += collective.nbytes
        assert model.at({"dp_shard": data}).sent == there


def test_a_sweep_over_tensor_parallel_sizes() -> None:
    rows = sweep([plan_on(2, 2, MEGATRON), plan_on(2, 4, MEGATRON)], 8, profile="h100")
    found = {tuple(sorted(row.sizes.items())) for row in rows}
    assert (("dp_replicate", 1), ("dp_shard", 4), ("tp", 2)) in found
    assert (("dp_replicate", 1), ("dp_shard", 2), ("tp", 4)) in found
