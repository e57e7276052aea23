"""In which order units are gathered and reduced; also where a prefetch misses its target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint

from hyper_parallel import fully_shard
from tests.baselines import full
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, record_events
from tests.models import CASES, LMConfig, TransformerLM, build, vector_batch

LM = CASES["lm"]
FORWARD = ["start root", "start blocks.0", "start blocks.1", "start blocks.2"]
BACKWARD = [
    *("start blocks.2", "start blocks.1", "reduce blocks.2", "start blocks.0"),
    *("reduce blocks.1", "reduce blocks.0"),
]


def taken(events: list[str]) -> list[str]:
    """Return the starts and reductions so far and forget them."""
    found = [event for event in events if not event.startswith("use")]
    events.clear()
    return found


def blocks(kind: str, reshard: bool | int | None) -> nn.Module:
    model = build(TransformerLM, LMConfig(blocks=3, checkpoint=kind == "function"))
    for block in model.blocks:
        if kind == "composable":
            composable_checkpoint(block)
        fully_shard(block, mesh=data_mesh(), reshard_after_forward=reshard)
    fully_shard(model, mesh=data_mesh(), reshard_after_forward=reshard)
    return model


def loss_of(model: nn.Module, rank: int) -> Tensor:
    inputs, targets = LM.batch(rank, 0)
    return LM.loss(model(inputs), targets)


def orders(rank: int, world_size: int, kind: str) -> None:
    for reshard in (True, False, None, 2) if world_size > 2 else (True, False, None):
        model = blocks(kind, reshard)
        events = record_events(model)
        root_again = [] if reshard is None else ["start root"]
        for _ in range(2):
            loss = loss_of(model, rank)
            assert taken(events) == FORWARD
            loss.backward()
            expected = [*root_again, *BACKWARD, "reduce root"]
            if reshard is False:
                expected = [event for event in expected if event.startswith("reduce")]
            assert taken(events) == expected, reshard
        # Two forwards before one backward: each unit is reduced twice, the root at the end.
        losses = [loss_of(model, rank) for _ in range(2)]
        again = [] if reshard is False else [*root_again, *FORWARD[1:]]
        assert taken(events) == [*FORWARD, *again], reshard
        (losses[0] + losses[1]).backward()
        first = [*root_again, *BACKWARD]
        if reshard is False:
            first = [event for event in first if event.startswith("reduce")]
        assert taken(events) == [*first, *BACKWARD, "reduce root"], reshard


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "kind"), [(2, "none"), (2, "function"), (2, "composable"), (4, "none")]
)
def test_order_of_one_and_of_two_forwards(world: int, kind: str) -> None:
    run_ranks(orders, world, kind)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(x))
        return torch.relu(self.left(x)), torch.relu(self.right(x))


def unused_in_one_backward(rank: int, world_size: int) -> None:
    """Two backwards, each through one of two branches: the prefetch of the first one misses."""
    plain, model = build(Fork), build(Fork)
    for module in (model.stem, model.left, model.right, model):
        fully_shard(module, mesh=data_mesh(), reshard_after_forward=True)
    events = record_events(model)
    left, right = model(vector_batch(rank, 0)[0])
    assert taken(events) == ["start stem", "start left", "start right"], "the root has none"
    model.set_is_last_backward(False)
    right.sum().backward(retain_graph=True)
    assert taken(events) == [
        *("start right", "start left", "reduce right", "start stem", "reduce left"),
        *("reduce stem", "reduce root"),
    ]
    model.set_is_last_backward(True)
    left.sum().backward()
    assert taken(events) == [  # PyTorch's would still use the gather that missed
        *("start left", "start stem", "reduce left", "reduce right", "reduce stem", "reduce root"),
    ]
    assert_mean_grads(model, plain, lambda m: sum(out.sum() for out in m(vector_batch(rank, 0)[0])))


def assert_mean_grads(model: nn.Module, plain: nn.Module, loss: Any) -> None:
    """Compare the gradients of `model` with the mean of the ones of `plain`."""
    loss(plain).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            dist.all_reduce(other.grad)
            mean = other.grad / dist.get_world_size()
            torch.testing.assert_close(full(param.grad), mean, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.dist
def test_a_prefetch_that_misses() -> None:
    run_ranks(unused_in_one_backward, 2)


def units_of_several_modules(rank: int, world_size: int) -> None:
    plain = build(TransformerLM, LMConfig(blocks=5))
    model = build(TransformerLM, LMConfig(blocks=5, checkpoint=True))
    settings: dict[str, Any] = {"mesh": data_mesh()}
    fully_shard(model.blocks[0], **settings)
    fully_shard([model.blocks[1], model.blocks[2]], **settings)
    fully_shard([model.blocks[3], model.blocks[4]], **settings)
    fully_shard([model.embed, model.position], **settings)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **settings)
    fully_shard(model, **settings)
    events = record_events(model)
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, rank)
        assert taken(events) == [
            *("start embed, position", "start blocks.0", "start blocks.1, blocks.2"),
            *("start blocks.3, blocks.4", "start norm, head"),
        ]
        loss.backward()
        assert taken(events) == [
            *("start blocks.3, blocks.4", "reduce norm, head", "start blocks.1, blocks.2"),
            *("reduce blocks.3, blocks.4", "start blocks.0", "reduce blocks.1, blocks.2"),
            *("start embed, position", "reduce blocks.0", "reduce embed, position", "reduce root"),
        ]
    assert_mean_grads(model, plain, lambda m: loss_of(m, rank))


@pytest.mark.dist
def test_order_of_units_of_several_modules() -> None:
    run_ranks(units_of_several_modules, 2)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(1, 1)
        self.used = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.used(x))


def module_that_never_runs(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(build(HalfUsed), build(HalfUsed, seed=1), build(nn.Linear, 6, 6))

    plain, model = make(), make()
    for part in model[:2]:
        fully_shard([part.unused, part.used], mesh=data_mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=data_mesh())
    first, second = "0.unused, 0.used", "1.unused, 1.used"
    events = record_events(model)
    for _ in range(2):
        model.zero_grad()
        loss = model(vector_batch(rank, 0)[0]).sum()
        assert taken(events) == ["start root", f"start {first}", f"start {second}"]
        loss.backward()
        assert taken(events) == [
            *(f"start {second}", f"start {first}", f"reduce {second}", f"reduce {first}"),
            "reduce root",
        ]
    assert_mean_grads(model, plain, lambda m: m(vector_batch(rank, 0)[0]).sum())


@pytest.mark.dist
def test_order_with_modules_that_never_run() -> None:
    run_ranks(module_that_never_runs, 2)


def wrong_direction(rank: int, world_size: int) -> None:
    """A unit that backward reaches last prefetches one that is done."""

    def make() -> nn.Module:
        return nn.Sequential(build(nn.Linear, 6, 8), nn.ReLU(), build(nn.Linear, 8, 5, seed=1))

    plain, model = make(), make()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=data_mesh())
    model[0].set_modules_to_backward_prefetch([model[2]])
    for _ in range(3):
        model.zero_grad()
        model(vector_batch(rank, 0)[0]).sum().backward()
        for param in (*model[0].hsdp_params(), *model[2].hsdp_params()):
            assert param.unsharded_param.untyped_storage().nbytes() == 0, "dropped at the end"
    assert_mean_grads(model, plain, lambda m: m(vector_batch(rank, 0)[0]).sum())


@pytest.mark.dist
def test_a_prefetch_in_the_wrong_direction() -> None:
    run_ranks(wrong_direction, 2)


class Expert(nn.Module):
    """A block whose inner part is checkpointed inside the checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.expert = nn.Linear(6, 6)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.expert(x))

    def _block(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inner, torch.tanh(self.enter(x)), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._block, x, use_reentrant=False)


def inside_checkpoints(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(build(Expert, seed=i) for i in range(3)), build(nn.Linear, 6, 6))

    plain, model = make(), make()
    for part in model[:3]:
        fully_shard(part.expert, mesh=data_mesh(), reshard_after_forward=True)
        fully_shard(part, mesh=data_mesh(), reshard_after_forward=True)
    fully_shard(model[3], mesh=data_mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=data_mesh())
    events = record_events(model)
    loss = model(vector_batch(rank, 0)[0]).sum()
    names = ["0", "0.expert", "1", "1.expert", "2", "2.expert", "3"]
    assert taken(events) == [f"start {name}" for name in names]
    loss.backward()
    assert taken(events) == [
        *("start 3", "start 2", "reduce 3", "start 2.expert", "start 1"),
        *("reduce 2.expert", "reduce 2", "start 1.expert", "start 0"),
        *("reduce 1.expert", "reduce 1", "start 0.expert"),
        *("reduce 0.expert", "reduce 0", "reduce root"),
    ]
    assert_mean_grads(model, plain, lambda m: m(vector_batch(rank, 0)[0]).sum())
    model[3].set_modules_to_backward_prefetch([model[2]])
    for index in (2, 1):
        before = model[index - 1]
        model[index].set_modules_to_backward_prefetch([before, before.expert])
    loss = model(vector_batch(rank, 0)[0]).sum()
    events.clear()
    loss.backward()
    assert taken(events) == [
        *("start 3", "start 2", "reduce 3", "start 1", "start 1.expert"),
        "start 2.expert",  # in the recomputation, after what was asked for
        *("reduce 2.expert", "reduce 2", "start 0", "start 0.expert"),
        *("reduce 1.expert", "reduce 1", "reduce 0.expert", "reduce 0", "reduce root"),
    ]


@pytest.mark.dist
def test_prefetch_inside_checkpoints() -> None:
    run_ranks(inside_checkpoints, 2)
