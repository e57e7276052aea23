"""Bytes: expressions of one plan, evaluated elsewhere, equal what is in the graphs that are planned there."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

import hp_compile
from hp_compile.cost import CostModel
from hp_compile.cost.symbols import evaluate
from hp_compile.cost.traffic import totals
from hyper_parallel.errors import HPCompileError, PolicyError
from tests.cost.plans import MESHES, NAMES, counted, plan_on

MIXED = hp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "precision": {"mp_policy": MIXED, "reshard_after_forward": True},
    "single": {"bucket_mb": 0},
    "small": {"min_shard_numel": 20},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_five_meshes_from_one_plan(policy: str) -> None:
    model = CostModel(plan_on((2, 2), "uneven", **POLICIES[policy]))
    expressions = totals(model.collectives, by=("phase", "kind"))
    for shape in MESHES:
        sizes = dict(zip(NAMES, shape, strict=True))
        mine = {key: evaluate(e, sizes) for key, e in expressions.items()}
        assert {k: n for k, n in mine.items() if n} == counted(
            plan_on(shape, "uneven", **POLICIES[policy])
        ), (policy, shape)
        sent = model.at(sizes).sent
        assert sum(sent.values()) == sum(mine.values())


def test_integer_reshard() -> None:
    model = CostModel(plan_on((1, 4), "tiny", reshard_after_forward=2))
    for shape in ((1, 2), (2, 4), (1, 6), (3, 8)):
        sizes = dict(zip(NAMES, shape, strict=True))
        theirs = counted(plan_on(shape, "tiny", reshard_after_forward=2))
        assert sum(model.at(sizes).sent.values()) == sum(theirs.values()), shape
    with pytest.raises(PolicyError, match="does not divide"):
        model.at({"dp_shard": 3})


@pytest.mark.parametrize("case", ["tied", "frozen", "unused", "scalar", "two_biases", "batch_norm"])
def test_unusual_parameters(case: str) -> None:
    model = CostModel(plan_on((2, 2), case))
    shape = (2, 3)
    assert sum(model.at(dict(zip(NAMES, shape, strict=True))).sent.values()) == sum(
        counted(plan_on(shape, case)).values()
    )


def test_a_plan_without_replicas_knows_replicas() -> None:
    """A dim that the mesh lacks can be added, and a dim of size 1 can grow."""
    model = CostModel(plan_on((4,), "tiny"))
    assert sum(model.at({"dp_replicate": 2}).sent.values()) == sum(
        counted(plan_on((2, 4), "tiny")).values()
    )
    assert model.at().sent == model.at({"dp_shard": 4}).sent


def test_expressions_are_in_the_mesh_dims() -> None:
    model = CostModel(plan_on((2, 2), "uneven"))
    assert set(model.sent) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {str(s) for s in model.sent["all_reduce"].free_symbols} == set(NAMES)
    assert model.sent["all_gather"].has(sympy.ceiling)
    assert {str(s) for s in model.memory["saved"].free_symbols} == {"batch"}


def test_a_missing_size_is_an_error() -> None:
    model = CostModel(plan_on((2, 2), "tiny"))
    with pytest.raises(HPCompileError, match="no size given for dp_replicate"):
        evaluate(model.sent["all_reduce"], {"dp_shard": 2})
