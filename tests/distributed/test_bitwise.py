"""Bits: equal to PyTorch's `fully_shard`, equal from run to run, equal on all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.baselines import TrainOptions, TrainResult, assert_same, merge_ranks, train_fsdp2
from tests.dist_pool import run_ranks
from tests.distributed.ours import train_ours
from tests.models import CASES

SIX = TrainOptions(steps=6)


def pairs(
    rank: int, world_size: int, runs: list[tuple[str, TrainOptions, dict[str, Any]]]
) -> list[tuple[TrainResult, TrainResult]]:
    """For every case our run, and PyTorch's `fully_shard` under the same options."""
    return [
        (
            train_ours(rank, world_size, name, options, fields),
            train_fsdp2(rank, world_size, name, options),
        )
        for name, options, fields in runs
    ]


def assert_equal_to_fsdp2(
    runs: list[tuple[str, TrainOptions, dict[str, Any]]],
    world_size: int,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    for (name, *_), both in zip(
        runs, zip(*run_ranks(pairs, world_size, runs, timeout=600), strict=True), strict=True
    ):
        ours, theirs = (merge_ranks(results) for results in zip(*both, strict=True))
        assert_same(ours, theirs, rtol=rtol, atol=atol, nonzero_except=CASES[name].no_grad)


@pytest.mark.dist
@pytest.mark.slow
def test_transformer_equals_fsdp2_bit_for_bit() -> None:
    assert_equal_to_fsdp2([("lm", SIX, {})], 2)


@pytest.mark.dist
def test_every_way_to_communicate_equals_fsdp2_bit_for_bit() -> None:
    kept = dataclasses.replace(SIX, reshard_after_forward=False)
    default = dataclasses.replace(SIX, reshard_after_forward=None)
    clipped = dataclasses.replace(SIX, steps=2, clip_norm=0.1, micro_batches=2)
    runs: list[tuple[str, TrainOptions, dict[str, Any]]] = [
        ("tiny", SIX, {"bucket_mb": 0}),
        ("tiny", SIX, {"bucket_mb": 1000.0}),
        ("tiny", kept, {}),
        ("tiny", default, {}),
        ("tiny", clipped, {}),
        ("tiny", dataclasses.replace(clipped, sync_every_micro=False), {}),
    ]
    runs += [
        (name, TrainOptions(steps=3), {})
        for name in ("uneven", "tied", "frozen", "unused", "two_biases", "batch_norm")
    ]
    assert_equal_to_fsdp2(runs, 2)


@pytest.mark.dist
def test_hybrid_and_pairs_equal_fsdp2_bit_for_bit() -> None:
    hybrid = TrainOptions(steps=3, mesh_shape=(2, 2))
    in_pairs = TrainOptions(steps=3, reshard_after_forward=2)
    assert_equal_to_fsdp2([("tiny", hybrid, {}), ("uneven", hybrid, {}), ("tiny", in_pairs, {})], 4)


def train_twice(
    rank: int, world_size: int, name: str, options: TrainOptions
) -> tuple[TrainResult, TrainResult, TrainResult]:
    fields = {"backend": "inductor"}
    return (
        train_ours(rank, world_size, name, options, fields),
        train_ours(rank, world_size, name, options, fields),
        train_fsdp2(rank, world_size, name, options),
    )


@pytest.mark.dist
@pytest.mark.slow
def test_inductor_is_close_and_repeats_itself() -> None:
    results = run_ranks(train_twice, 2, "lm", SIX, timeout=600)
    first, second, theirs = (merge_ranks(each) for each in zip(*results, strict=True))
    assert_same(second, first, rtol=0.0, atol=0.0)
    torch.testing.assert_close(first.losses, theirs.losses, rtol=1e-6, atol=0.0)
    assert_same(first, theirs, rtol=1e-4, atol=1e-5)
