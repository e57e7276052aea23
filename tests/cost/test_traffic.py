"""Bytes: expressions of one plan, evaluated elsewhere, equal what is in the graphs that are planned there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import sympy
import torch

import hp_compile
from hp_compile.cost import CostModel, replan
from hp_compile.cost.symbols import evaluate
from hp_compile.cost.traffic import totals
from hyper_parallel.errors import HPCompileError, PolicyError
from tests.cost.plans import MESHES, NAMES, cost_of, counted, plan_on

MIXED = hp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "precision": {"mp_policy": MIXED, "reshard_after_forward": True},
    "single": {"bucket_mb": 0},
    "small": {"min_shard_numel": 20},
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_five_meshes_from_one_plan(shape: tuple[int, int]) -> None:
    """Each mesh is planned from the start: captured, sharded, bucketed."""
    model = cost_of((2, 2), "uneven")
    sizes = dict(zip(NAMES, shape, strict=True))
    there = counted(plan_on(shape, "uneven"))
    expressions = totals(model.collectives, by=("phase", "kind"))
    values = {key: evaluate(e, sizes) for key, e in expressions.items()}
    assert {key: value for key, value in values.items() if value} == there
    assert sum(model.at(sizes).sent.values()) == sum(there.values())


@pytest.mark.parametrize(
    "policy",
    ["precision", "small", *(pytest.param(p, marks=pytest.mark.slow) for p in ("kept", "single"))],
)
def test_policies(policy: str) -> None:
    """The other meshes' programs are made from the same capture, which `test_replan` compares with a fresh one."""
    plan = plan_on((2, 2), "uneven", **POLICIES[policy])
    assert_same_bytes(plan, MESHES[:2])


def test_integer_reshard() -> None:
    model = assert_same_bytes(
        plan_on((1, 4), "tiny", reshard_after_forward=2), ((1, 2), (2, 4), (3, 8))
    )
    with pytest.raises(PolicyError, match="does not divide"):
        model.at({"dp_shard": 3})


@pytest.mark.parametrize("case", ["tied", "frozen", "unused", "scalar", "two_biases", "batch_norm"])
def test_unusual_parameters(case: str) -> None:
    assert_same_bytes(plan_on((2, 2), case), ((2, 3),))


@pytest.mark.slow
def test_transformer() -> None:
    assert_same_bytes(plan_on((2, 2), "lm", dynamic=None), ((2, 5), (1, 64), (8, 1)))


def assert_same_bytes(plan: hp_compile.Plan, shapes: tuple[tuple[int, int], ...]) -> CostModel:
    model = CostModel(plan)
    for shape in shapes:
        sizes = dict(zip(NAMES, shape, strict=True))
        theirs: Counter[str] = Counter()
        for (_, kind), nbytes in counted(replan(plan, sizes)).items():
            theirs[kind] += nbytes
        assert {k: n for k, n in model.at(sizes).sent.items() if n} == theirs, shape
    return model


def test_a_plan_without_replicas_knows_replicas() -> None:
    """A dim that the mesh lacks can be added, and a dim of size 1 can grow."""
    plan = plan_on((4,), "tiny")
    model = assert_same_bytes(plan, ((2, 4), (3, 1)))
    assert model.at().sent == model.at({"dp_shard": 4}).sent


def test_expressions_are_in_the_mesh_dims() -> None:
    model = cost_of((2, 2), "tiny", dynamic=None)
    assert set(model.sent) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {str(s) for s in model.sent["all_reduce"].free_symbols} == set(NAMES)
    assert model.sent["all_gather"].has(sympy.ceiling)
    assert {str(s) for s in model.memory["saved"].free_symbols} == {"batch"}


def test_a_missing_size_is_an_error() -> None:
    model = cost_of((2, 2), "tiny", dynamic=None)
    with pytest.raises(HPCompileError, match="no size given for dp_replicate"):
        evaluate(model.sent["all_reduce"], {"dp_shard": 2})
