"""Frozen parameters: in a unit, in every other unit, and in layers that run several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint

from hyper_parallel import fully_shard
from tests.baselines import full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, record_events
from tests.models import build, vector_batch

RESHARDS = pytest.mark.parametrize(("world", "reshard"), [(2, True), (2, False), (4, 2)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(build(Block, seed=i) for i in range(3)))


def train_biases(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name)


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            mean = other.grad.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            torch.testing.assert_close(full(param.grad), mean, rtol=2e-5, atol=2e-6, msg=name)


def in_a_unit(rank: int, world_size: int, reshard: Any, checkpointed: bool, later: bool) -> None:
    """Only biases are trained: what is reduced is theirs, and during backward."""
    plain, model = blocks(), blocks()
    train_biases(plain)
    if not later:
        train_biases(model)
    for block in model:
        if checkpointed:
            checkpoint(block)
        fully_shard(block, mesh=data_mesh(), reshard_after_forward=reshard)
    fully_shard(model, mesh=data_mesh(), reshard_after_forward=reshard)
    if later:
        train_biases(model)
    events = record_events(model)
    for index in range(3):
        for module in (plain, model):
            module.zero_grad(set_to_none=index % 2 == 0)
            with count_collectives() as calls:
                module(vector_batch(rank, index)[0]).square().sum().backward()
        compare(model, plain)
        reduced = [call for call in calls if call.kind == "reduce_scatter"]
        rows = -(-8 // world_size) + -(-6 // world_size)  # both biases, padded
        # Behind them: one count a parameter and the hash of their names.
        assert [call.input_bytes for call in reduced] == [world_size * 4 * (rows + 2 + 16)] * 3
        order = [event for event in events if event.startswith("reduce")]
        assert order == ["reduce 2", "reduce 1", "reduce 0", "reduce root"]
        events.clear()


@pytest.mark.dist
@pytest.mark.parametrize(("checkpointed", "later"), [(False, False), (True, False), (True, True)])
@RESHARDS
def test_frozen_parameters_in_a_unit(
    world: int, reshard: Any, checkpointed: bool, later: bool
) -> None:
    run_ranks(in_a_unit, world, reshard, checkpointed, later)


def every_other(rank: int, world_size: int, reshard: Any, unfreeze: bool) -> None:
    def make() -> nn.Sequential:
        layers = [(build(nn.Linear, 6, 6, seed=i), nn.Tanh()) for i in range(6)]
        return nn.Sequential(*(module for pair in layers for module in pair))

    def freeze(model: nn.Sequential, frozen: bool) -> None:
        for layer in model[::4]:
            layer.requires_grad_(not frozen)

    plain, model = make(), make()
    for layer in model[::2]:
        fully_shard(layer, mesh=data_mesh(), reshard_after_forward=reshard)
    fully_shard(model, mesh=data_mesh(), reshard_after_forward=reshard)
    for module in (plain, model):
        freeze(module, True)
    for index in range(4):
        losses = []
        for module in (plain, model):
            if unfreeze and index == 3:
                freeze(module, False)
            module.zero_grad()
            if index == 1:
                with torch.no_grad():
                    losses.append(module(vector_batch(rank, index)[0]).square().sum())
                continue
            losses.append(module(vector_batch(rank, index)[0]).square().sum())
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        compare(model, plain)
    grads = sum(param.grad is not None for param in model.parameters())
    assert grads == (12 if unfreeze else 6)


@pytest.mark.dist
@pytest.mark.parametrize("unfreeze", [True, False])
@RESHARDS
def test_every_other_unit_is_frozen(world: int, reshard: Any, unfreeze: bool) -> None:
    run_ranks(every_other, world, reshard, unfreeze)


class Loop(nn.Module):
    """A frozen and a trained layer that run three times, the trained one also without grad."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.trained = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = self.frozen(torch.tanh(self.trained(x)))
            with torch.no_grad():
                x += torch.tanh(self.trained(x))
        return x


def several_times(rank: int, world_size: int, reshard: Any) -> None:
    plain, model = build(Loop), build(Loop)
    for module in (model.enter, model.frozen, model.trained, model):
        fully_shard(module, mesh=data_mesh(), reshard_after_forward=reshard)
    for index in range(3):
        losses = []
        for module in (plain, model):
            module.zero_grad()
            losses.append(module(vector_batch(rank, index)[0]).square().sum())
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        compare(model, plain)


@pytest.mark.dist
@RESHARDS
def test_frozen_and_trained_layers_run_several_times(world: int, reshard: Any) -> None:
    run_ranks(several_times, world, reshard)
