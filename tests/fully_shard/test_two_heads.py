"""Units that run forward on all ranks and get a gradient on some only: an error or zeros, no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel import HSDPModule, UnusedParameterError, fully_shard
from tests.baselines import full
from tests.count_collectives import count_collectives
from tests.dist_pool import RanksFailed, run_ranks
from tests.fully_shard.runs import data_mesh
from tests.models import build, vector_batch

CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


class TwoHeads(nn.Module):
    """Both heads run on every rank; of equal or of different size."""

    def __init__(self, equal: bool) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.a = nn.Linear(8, 5)
        self.b = nn.Linear(8, 5 if equal else 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.a(x), self.b(x)


def loss_of(model: nn.Module, rank: int) -> Tensor:
    """The loss of head a on even ranks, of head b on odd ones."""
    return model(vector_batch(rank, 0)[0])[rank % 2].square().sum()


def sharded(equal: bool, units: str, reshard: bool, shape: tuple[int, ...]) -> Any:
    model = build(TwoHeads, equal)
    settings: dict[str, Any] = {"mesh": data_mesh(shape), "reshard_after_forward": reshard}
    if units == "heads":
        fully_shard(model.a, **settings)
        fully_shard(model.b, **settings)
    elif units == "group":
        fully_shard([model.a, model.b], **settings)
    fully_shard(model, **settings)
    assert isinstance(model, HSDPModule)
    return model


ARGUMENTS = ("world", "shape", "units", "reshard")
SETUPS: list[tuple[int, tuple[int, ...], str, bool]] = [
    *((2, (2,), units, keep) for units in ("root", "group", "heads") for keep in (True, False)),
    (2, (2, 1), "heads", False),
    (4, (2, 2), "group", True),
    (4, (2, 2), "heads", True),
    (4, (2, 2), "heads", False),
]
#: Ranks that gather different units get an error also where zeros are asked for.
SAME_GATHERS = [s for s in SETUPS if not (s[2] == "heads" and s[3])]


def without_zeros(
    rank: int, world_size: int, shape: tuple[int, ...], equal: bool, units: str, reshard: bool
) -> str:
    model = sharded(equal, units, reshard, shape)
    loss = loss_of(model, rank)
    if not equal:  # what is raised, if anything, is checked by the caller
        loss.backward()
    with pytest.raises(UnusedParameterError) as error:
        loss.backward()
    if units != "heads":  # nobody is out of step, so the model is usable
        model.zero_grad()
        sum(out.sum() for out in model(vector_batch(rank, 0)[0])).backward()
        assert all(param.grad is not None for param in model.parameters())
    return str(error.value)


@pytest.mark.dist
@pytest.mark.parametrize(ARGUMENTS, SETUPS)
def test_an_error_that_names_parameters_or_units(
    world: int, shape: tuple[int, ...], units: str, reshard: bool
) -> None:
    texts = run_ranks(without_zeros, world, shape, True, units, reshard, timeout=60)
    for rank, text in enumerate(texts):
        name = "ab"[rank % 2]
        if units != "heads":
            here = "did" if rank % 2 == 0 else "did not"
            assert text.startswith("a.weight, and 3 more parameters: ")
            assert f"this rank, {rank}, {here})" in text
        elif reshard:
            assert f"unit '{name}' on rank {rank} was gathered while" in text
        else:
            assert f"this rank, {rank}, reduced the gradients of {name}.weight, {name}.b" in text
        assert "set_reduce_scatter_unused_params(True)" in text


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_units_of_different_size_end_the_run_with_the_fix_in_an_error(reshard: bool) -> None:
    """Gloo ends a process that gets more than it expects; another one says what to do."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(without_zeros, 2, (2,), False, "heads", reshard, timeout=60)
    assert failed.value.died and not failed.value.silent, str(failed.value)
    for text in failed.value.errors.values():
        assert "UnusedParameterError: " in text and "set_reduce_scatter_unused_params" in text


def with_zeros(
    rank: int, world_size: int, shape: tuple[int, ...], equal: bool, units: str, reshard: bool
) -> None:
    plain = build(TwoHeads, equal)
    (sum(loss_of(plain, r) for r in range(world_size)) / world_size).backward()
    model = sharded(equal, units, reshard, shape)
    model.set_reduce_scatter_unused_params(True)
    units_reduced = 3 if units == "heads" else 2 if units == "group" else 1
    for index in range(3):
        model.zero_grad()
        with count_collectives() as calls:
            loss_of(model, rank).backward()
        assert calls.kinds().get("reduce_scatter", units_reduced) == units_reduced
        if index == 1:  # accumulate on top
            loss_of(model, rank).backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert other.grad is not None and other.grad.count_nonzero()
            torch.testing.assert_close(
                full(param.grad), other.grad * (1 + (index == 1)), **CLOSE, msg=name
            )


def first_output_only(rank: int, world_size: int, reshard: bool) -> None:
    """All ranks use the output of the first module of a unit, none that of the last one."""
    plain, model = build(TwoHeads, True), sharded(True, "group", reshard, (world_size,))
    (sum(loss_of(plain, 2 * r) for r in range(world_size)) / world_size).backward()
    loss_of(model, 2 * rank).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None) == name.startswith("b.")
        if param.grad is not None:
            torch.testing.assert_close(full(param.grad), other.grad, **CLOSE, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_a_loss_on_the_first_module_of_a_unit(reshard: bool) -> None:
    run_ranks(first_output_only, 2, reshard)


@pytest.mark.dist
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(ARGUMENTS, SAME_GATHERS)
def test_zeros_where_a_rank_has_no_gradient(
    world: int, shape: tuple[int, ...], units: str, reshard: bool, equal: bool
) -> None:
    run_ranks(with_zeros, world, shape, equal, units, reshard, timeout=60)
