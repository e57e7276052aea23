"""Replicas that differ are found on all ranks, with the right name; equal ones pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hp_compile
from hp_compile import CPUOffloadPolicy, MixedPrecisionPolicy, Policy, ReplicaError
from hyper_parallel.replicas import VARIABLE
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.distributed.test_tensor_parallel import SEQUENCE
from tests.fully_shard.runs import data_mesh
from tests.models import CASES

HSDP = ((2, 2), ("dp_replicate", "dp_shard"))
SHARD_TP = ((2, 2), ("dp_shard", "tp"))
TINY_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TINY, LM, UNEVEN = CASES["tiny"], CASES["lm"], CASES["uneven"]


def make(case: Any, mesh: Any, prepare: Callable[[Any], Any] | None = None, **fields: Any) -> Any:
    model = case.make()
    if prepare is not None:
        prepare(model)
    device_mesh = init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1])
    return hp_compile.shard(model, device_mesh, Policy(backend="aot_eager", **fields))


def damage(param: Any, change: Callable[[torch.Tensor], Any]) -> None:
    """Change this rank's part of a parameter or gradient."""
    with torch.no_grad():
        change(param.to_local() if isinstance(param, DTensor) else param)


def first_element(value: torch.Tensor) -> None:
    value.view(-1)[0] += 0.25


def error_of(check: Callable[[], Any]) -> str:
    try:
        check()
    except ReplicaError as error:
        return str(error)
    return ""


def step(model: Any, case: Any, rank: int, optimizer: Any = None) -> None:
    inputs, targets = case.batch(rank, 0)
    case.loss(model(inputs), targets).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------ asked for


def replicate(rank: int, world_size: int) -> list[str]:
    model = make(TINY, HSDP)
    step(model, TINY, rank, torch.optim.AdamW(model.parameters()))
    texts = [error_of(model.check_replicas)]
    names = dict(model.named_parameters())
    if rank == 3:
        damage(names["blocks.1.up.weight"], first_element)
        damage(names["leave.weight"], first_element)
    with count_collectives() as calls:
        texts.append(error_of(model.check_replicas))
    assert calls[0].kind == "all_gather" and calls[0].nbytes == 8 * 2 * len(names)
    return texts


@pytest.mark.dist
def test_dp_replicate() -> None:
    found = run_ranks(replicate, 4)
    assert all(texts == found[0] for texts in found)
    equal, text = found[0]
    assert equal == ""
    assert text.startswith(
        "blocks.1.up.weight: ranks that should hold the same bytes of this param"
    )
    assert "mesh dim: dp_replicate(2); placement [R, S(0)] on (dp_replicate, dp_shard)" in text
    assert "found:    rank 3 differs from rank 1 in 1 element, by up to 0.25" in text
    assert "also:     leave.weight (parameter)" in text


def tensor_parallel(rank: int, world_size: int) -> list[str]:
    model = make(TINY, SHARD_TP, tp_plan=TINY_PLAN)
    step(model, TINY, rank // 2)
    names = dict(model.named_parameters())
    texts = [error_of(model.check_replicas)]
    if rank == 0:  # cut over tp and dp_shard: nobody else holds it
        damage(names["blocks.0.up.weight"], first_element)
    texts.append(error_of(model.check_replicas))
    if rank == 2:
        damage(names["leave.weight"], first_element)
    texts.append(error_of(model.check_replicas))
    model = make(LM, ((2, 2), ("dp_replicate", "tp")), tp_plan=SEQUENCE)
    step(model, LM, rank // 2)
    names = dict(model.named_parameters())
    texts.append(error_of(model.check_replicas))  # terms of a norm's gradient are summed over tp
    if rank == 0:
        damage(names["blocks.0.attention.q.weight"], first_element)
    if rank == 2:
        damage(names["blocks.1.norm1.weight"], first_element)
    texts.append(error_of(model.check_replicas))
    return texts


@pytest.mark.dist
def test_tp() -> None:
    found = run_ranks(tensor_parallel, 4)
    assert all(texts == found[0] for texts in found)
    equal, cut, leave, equal_too, both = found[0]
    assert equal == equal_too == cut == ""
    assert leave.startswith("leave.weight: ") and "mesh dim: tp(2)" in leave
    assert "rank 3 differs from rank 2" in leave and "also" not in leave
    assert both.startswith("blocks.0.attention.q.weight: ")
    assert "mesh dim: dp_replicate(2)" in both and "rank 2 differs from rank 0" in both
    assert "also:     blocks.1.norm1.weight (parameter)" in both


def odd_values(rank: int, world_size: int) -> list[str]:
    def mixed(model: nn.Module) -> None:
        model.to(torch.bfloat16)
        names = dict(model.named_parameters())
        first = next(iter(names.values()))
        first.requires_grad_(False)
        with torch.no_grad():
            list(names.values())[1].fill_(float("nan"))

    def float16(model: nn.Module) -> None:
        model.to(torch.float16)

    texts = []
    for prepare, fields in (
        (mixed, {}),
        (mixed, {"offload_policy": CPUOffloadPolicy()}),
        (float16, {"enable_param_shard": False}),
    ):
        model = make(UNEVEN, HSDP, prepare, **fields)
        texts.append(error_of(model.check_replicas))  # NaN is equal to the same NaN
        names = dict(model.named_parameters())
        if rank == 2:
            damage(next(iter(names.values())), lambda v: v.view(torch.int16).view(-1)[-1:].add_(1))
        texts.append(error_of(model.check_replicas))
    return texts


@pytest.mark.dist
def test_bf16_nan_frozen_uneven_offloaded_and_not_cut() -> None:
    found = run_ranks(odd_values, 4)
    assert all(texts == found[0] for texts in found)
    name = next(iter(dict(UNEVEN.make().named_parameters())))
    for equal, text in zip(found[0][::2], found[0][1::2], strict=True):
        assert equal == ""
        assert text.startswith(f"{name}: ") and " in 1 element, by up to " in text
        assert "rank 2 differs from rank 0" in text


def gradients(rank: int, world_size: int) -> list[str]:
    model = make(TINY, ((3,), ("dp_replicate",)))
    step(model, TINY, rank)
    texts = [error_of(model.check_replicas)]
    first, second, *_ = model.parameters()
    if rank == 0:
        damage(first.grad, first_element)
    texts.append(error_of(model.check_replicas))
    if rank == 0:
        first.grad = None
    texts.append(error_of(model.check_replicas))
    damage(second, lambda v: v.fill_(-0.0 if rank == 1 else 0.0))
    texts.append(error_of(model.check_replicas))
    return texts


@pytest.mark.dist
def test_plain_data_parallel_gradients_and_the_rank_that_is_alone() -> None:
    found = run_ranks(gradients, 3)
    assert all(texts == found[0] for texts in found)
    equal, changed, missing, sign = found[0]
    names = list(dict(TINY.make().named_parameters()))
    assert equal == ""
    assert changed.startswith(f"{names[0]}: ranks that should hold the same bytes of this gradient")
    assert "rank 0 differs from rank 1 in 1 element, by up to 0.25" in changed
    assert "rank 0 has no gradient, rank 1 has one" in missing
    assert sign.startswith(f"{names[1]}: ") and "this parameter" in sign
    assert "rank 1 differs from rank 0 in" in sign and "by up to" not in sign


# ------------------------------------------------------------------ in every step


def every_step(rank: int, world_size: int) -> dict[str, Any]:
    os.environ[VARIABLE] = "1"
    try:
        return {
            "skipped": _train(rank),
            "gradient": error_of(lambda: _same_on_tp(rank)),
            "initial": error_of(lambda: step(_seeded(rank), TINY, rank)),
            "synced": error_of(lambda: step(_seeded(rank, sync_weights=True), TINY, rank)),
            "alone": _alone(rank),
        }
    finally:
        os.environ.pop(VARIABLE, None)


def _train(rank: int) -> list[str]:
    """Texts of three steps of two micro-batches; in the second one rank's optimizer leaves out a parameter."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make(TINY, HSDP, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = []

    def one_step(index: int) -> None:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            inputs, targets = TINY.batch(rank, 2 * index + micro)
            TINY.loss(model(inputs), targets).backward()
        if index == 1 and rank == 0:
            model.blocks[0].down.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(inputs)  # does not train, so nothing is compared

    for index in range(3):
        texts.append(error_of(lambda i=index: one_step(i)))  # type: ignore[misc]
    return texts


def _same_on_tp(rank: int) -> None:
    """A step in which tp ranks see different data, as they must not."""
    model = make(TINY, SHARD_TP, tp_plan=TINY_PLAN)
    step(model, TINY, rank // 2)  # the inputs of the first call are compared before it runs
    step(model, TINY, rank)


def _seeded(rank: int, **fields: Any) -> Any:
    def other_values(model: nn.Module) -> None:
        torch.manual_seed(rank)
        with torch.no_grad():
            model.leave.weight.normal_()  # type: ignore[union-attr, operator]

    return make(TINY, HSDP, other_values, **fields)


def _alone(rank: int) -> str:
    """Only rank 0 has the variable."""
    if rank:
        del os.environ[VARIABLE]
    try:
        step(make(TINY, HSDP), TINY, rank)
    except hp_compile.VerificationError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.dist
def test_in_a_training_loop() -> None:
    found = run_ranks(every_step, 4, timeout=400)
    for result in found:
        *equal, text = result["skipped"]
        assert equal == ["", ""] and text == found[0]["skipped"][2]
        assert text.startswith("blocks.0.down.weight: ") and "this parameter" in text
        assert "rank 2 differs from rank 0" in text
        assert "of this gradient" in result["gradient"] and "mesh dim: tp(2)" in result["gradient"]
        assert result["initial"].startswith("leave.weight: ") and "also" not in result["initial"]
        assert result["synced"] == ""
        assert f"{VARIABLE}=1" in result["alone"] and f"{VARIABLE}=0" in result["alone"]


# ------------------------------------------------------------------ without a program


def eager(rank: int, world_size: int) -> list[str]:
    from hyper_parallel import fully_shard

    model: Any = TINY.make()
    mesh = data_mesh((2, 2))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    os.environ[VARIABLE] = "1"
    try:
        texts = [error_of(lambda: step(model, TINY, rank, optimizer)) for _ in range(2)]
        texts.append(error_of(model.check_replicas))
        if rank == 1:
            damage(model.blocks[1].up.weight, first_element)
        texts.append(error_of(model.check_replicas))
        texts.append(error_of(lambda: step(model, TINY, rank, optimizer)))
        if rank == 1:
            damage(model.blocks[1].up.weight, lambda v: v.view(-1)[:1].sub_(0.25))
        damage(model.blocks[1].up.weight, lambda v: v.zero_())
        texts.append(error_of(lambda: step(model, TINY, rank, optimizer)))
        step(model, TINY, rank)
        if rank == 1:
            damage(model.blocks[1].up.weight.grad, first_element)
        texts.append(error_of(lambda: step(model, TINY, rank)))
    finally:
        del os.environ[VARIABLE]
    return texts


@pytest.mark.dist
def test_eager() -> None:
    found = run_ranks(eager, 4)
    assert all(texts == found[0] for texts in found)
    *equal, asked, itself, again, gradient = found[0]
    assert equal == ["", "", ""] and again == ""
    assert asked == itself
    assert asked.startswith("blocks.1.up.weight: ") and "mesh dim: dp_replicate(2)" in asked
    assert "rank 3 differs from rank 1 in 1 element" in asked
    assert gradient.startswith("blocks.1.up.weight: ") and "this gradient" in gradient
