"""The baselines agree with each other, so a test against one is a test against all."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from tests.baselines import (
    TrainOptions,
    TrainResult,
    assert_batches_differ,
    assert_nonzero_grads,
    assert_same,
    merge_ranks,
    train_ddp,
    train_fsdp2,
    train_unsharded,
)
from tests.dist_pool import run_ranks
from tests.models import CASES, LMConfig, TransformerLM, build

TOLERANCE = {"rtol": 2e-4, "atol": 2e-6}
# FSDP2 refuses 0-dim parameters; dropout masks differ between the ranks and one joined batch.
JOINED = [n for n, c in CASES.items() if not c.per_rank_statistics and n != "lm_dropout"]


@pytest.mark.parametrize("name", list(CASES))
def test_models_and_batches_are_deterministic(name: str) -> None:
    case = CASES[name]
    first, second = case.make(), case.make()
    torch.rand(3)
    for (fqn, left), right in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right), fqn
    changed = dict(case.make(seed=1).named_parameters())
    assert any(not torch.equal(p, changed[fqn]) for fqn, p in first.named_parameters())
    assert torch.equal(case.batch(1, 2)[0], case.batch(1, 2)[0])
    assert_batches_differ(case, 4)


@pytest.mark.dist
@pytest.mark.parametrize("name", JOINED)
def test_ddp_equals_unsharded(name: str) -> None:
    options = TrainOptions(steps=2)
    expected = train_unsharded(name, 2, options)
    actual = merge_ranks(run_ranks(train_ddp, 2, name, options))
    assert_same(actual, expected, **TOLERANCE, nonzero_except=CASES[name].no_grad)


@pytest.mark.dist
@pytest.mark.parametrize("name", [n for n in JOINED if n != "scalar"])
def test_fsdp2_equals_unsharded(name: str) -> None:
    options = TrainOptions(steps=2)
    expected = train_unsharded(name, 2, options)
    actual = merge_ranks(run_ranks(train_fsdp2, 2, name, options))
    assert_same(actual, expected, **TOLERANCE, nonzero_except=CASES[name].no_grad)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["batch_norm", "lm_dropout"])
def test_fsdp2_equals_ddp_where_ranks_differ(name: str) -> None:
    options = TrainOptions(steps=2)
    expected = merge_ranks(run_ranks(train_ddp, 2, name, options))
    actual = merge_ranks(run_ranks(train_fsdp2, 2, name, options))
    assert_same(actual, expected, **TOLERANCE)


@pytest.mark.dist
@pytest.mark.parametrize("sync_every_micro", [True, False])
def test_accumulation_and_clipping(sync_every_micro: bool) -> None:
    options = TrainOptions(
        steps=2, micro_batches=2, clip_norm=0.5, sync_every_micro=sync_every_micro
    )
    expected = train_unsharded("lm", 2, options)
    for baseline in (train_ddp, train_fsdp2):
        assert_same(merge_ranks(run_ranks(baseline, 2, "lm", options)), expected, **TOLERANCE)


@pytest.mark.dist
def test_hybrid_mesh_and_mixed_precision() -> None:
    options = TrainOptions(steps=2, mesh_shape=(2, 2))
    expected = train_unsharded("lm", 4, options)
    actual = merge_ranks(run_ranks(train_fsdp2, 4, "lm", options))
    assert_same(actual, expected, **TOLERANCE)
    mixed = dataclasses.replace(options, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rough = merge_ranks(run_ranks(train_fsdp2, 4, "lm", mixed))
    assert rough.losses != actual.losses
    torch.testing.assert_close(rough.losses, actual.losses, rtol=2e-2, atol=0.0)


def test_helpers_find_faults() -> None:
    good = train_unsharded("frozen", 2, TrainOptions(steps=1))
    with pytest.raises(AssertionError, match="has no gradient"):
        assert_nonzero_grads(good)
    with pytest.raises(AssertionError, match="no such parameters"):
        assert_nonzero_grads(good, ["misspelt"])
    bad = _with_grad(good, "outer.weight", torch.zeros(5, 8))
    with pytest.raises(AssertionError, match=r"the gradient of outer\.weight is zero"):
        assert_nonzero_grads(bad, CASES["frozen"].no_grad)
    with pytest.raises(AssertionError, match=r"rank 1 against rank 0: step 0, gradient of outer"):
        merge_ranks([good, bad])
    with pytest.raises(AssertionError, match="losses"):
        assert_same(
            dataclasses.replace(good, losses=[good.losses[0] + 1]),
            good,
            rtol=1e-6,
            atol=0.0,
            nonzero_except=CASES["frozen"].no_grad,
        )


def test_lm_options() -> None:
    tied = build(TransformerLM, LMConfig(tied=True))
    assert "head.weight" not in dict(tied.named_parameters())
    plain, checkpointed = CASES["lm"].make(), CASES["lm_checkpoint"].make()
    tokens, _ = CASES["lm"].batch(0, 0)
    assert torch.equal(plain(tokens), checkpointed(tokens))
    dropout = CASES["lm_dropout"].make()
    assert not torch.equal(dropout(tokens), dropout(tokens))


def _with_grad(result: TrainResult, name: str, grad: torch.Tensor) -> TrainResult:
    grads = copy.copy(result.grads)
    grads[0] = {**grads[0], name: grad}
    return dataclasses.replace(result, grads=grads)
