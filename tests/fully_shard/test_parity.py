"""Losses, gradients and weights against PyTorch's `fully_shard`, bit by bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.baselines import TrainOptions, assert_same, merge_ranks, train_fsdp2, train_unsharded
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import train_eager
from tests.models import CASES

EQUAL_BITS = {"rtol": 0.0, "atol": 0.0}
# AdamW turns rounding of small gradients into steps; the baselines agree as far as this.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-6}


@pytest.mark.dist
@pytest.mark.parametrize("name", [n for n in CASES if n != "scalar"])
def test_bit_equal_to_fsdp2_on_two_ranks(name: str) -> None:
    options = TrainOptions(steps=6 if name == "lm" else 2)
    expected = run_ranks(train_fsdp2, 2, name, options)
    actual = run_ranks(train_eager, 2, name, options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours, theirs, **EQUAL_BITS, nonzero_except=CASES[name].no_grad)


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [False, 2, True])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_bit_equal_to_fsdp2_on_four_ranks(shape: tuple[int, ...], reshard: bool | int) -> None:
    if shape == (2, 2) and reshard == 2:
        reshard = True
    options = TrainOptions(steps=2, mesh_shape=shape, reshard_after_forward=reshard)
    expected = merge_ranks(run_ranks(train_fsdp2, 4, "uneven", options))
    actual = merge_ranks(run_ranks(train_eager, 4, "uneven", options))
    assert_same(actual, expected, **EQUAL_BITS)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("param", "reduce"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, None),
        (torch.float16, None),
        (None, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_bit_equal_to_fsdp2_in_mixed_precision(
    param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    options = TrainOptions(steps=2, param_dtype=param, reduce_dtype=reduce)
    expected = run_ranks(train_fsdp2, 2, "lm", options)
    actual = run_ranks(train_eager, 2, "lm", options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours, theirs, **EQUAL_BITS)


@pytest.mark.dist
@pytest.mark.parametrize("reduce", [None, torch.float32])
@pytest.mark.parametrize("sync", [True, False])
def test_accumulation_is_bit_equal_to_fsdp2(sync: bool, reduce: torch.dtype | None) -> None:
    options = TrainOptions(
        steps=2,
        micro_batches=3,
        sync_every_micro=sync,
        param_dtype=None if reduce is None else torch.bfloat16,
        reduce_dtype=reduce,
    )
    expected = run_ranks(train_fsdp2, 2, "lm", options)
    actual = run_ranks(train_eager, 2, "lm", options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(ours, theirs, **EQUAL_BITS)


@pytest.mark.dist
@pytest.mark.parametrize(("world", "shape"), [(1, (1,)), (3, (3,)), (4, (4, 1)), (4, (1, 4))])
@pytest.mark.parametrize("name", ["lm", "scalar"])
def test_equal_to_unsharded(world: int, shape: tuple[int, ...], name: str) -> None:
    options = TrainOptions(steps=2, mesh_shape=shape)
    expected = train_unsharded(name, world, options)
    actual = merge_ranks(run_ranks(train_eager, world, name, options))
    assert_same(actual, expected, **TOLERANCE)


@pytest.mark.dist
def test_tied_weights_that_are_cut_unevenly() -> None:
    """64 rows over 3 ranks: the last slice is short, and every row is trained."""
    options = TrainOptions(steps=3)
    expected = train_unsharded("lm_tied", 3, options)
    actual = merge_ranks(run_ranks(train_eager, 3, "lm_tied", options))
    assert_same(actual, expected, **TOLERANCE)


@pytest.mark.dist
def test_topologies_agree() -> None:
    results = [
        merge_ranks(run_ranks(train_eager, 4, "lm", TrainOptions(steps=2, mesh_shape=shape)))
        for shape in [(4,), (2, 2), (4, 1)]
    ]
    for other in results[1:]:
        assert_same(other, results[0], **TOLERANCE)
    clipped = dataclasses.replace(TrainOptions(steps=2, mesh_shape=(2, 2)), clip_norm=0.1)
    expected = train_unsharded("lm", 4, clipped)
    assert_same(merge_ranks(run_ranks(train_eager, 4, "lm", clipped)), expected, **TOLERANCE)
