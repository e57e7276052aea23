"""A parameter that forward changes: the change is made on the gathered copy, so it must not pass silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from hyper_parallel import (
    CPUOffloadPolicy,
    HSDPModule,
    MixedPrecisionPolicy,
    ShardedStateError,
    fully_shard,
)
from tests.baselines import TrainOptions, full
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, build

LM = CASES["lm"]


def multiply(layer: Layer) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


def multiply_a_view(layer: Layer) -> None:
    with torch.no_grad():
        layer.weight[:2].view(-1).add_(1.0)


def replace_data(layer: Layer) -> None:
    layer.weight.data = layer.weight.data * 0.5


def renormalise(layer: Layer) -> None:
    torch.embedding_renorm_(layer.weight.detach(), torch.tensor([0, 1]), 0.1, 2.0)


def leave(layer: Layer) -> None:
    layer.steps += 1


class Layer(nn.Module):
    def __init__(self, change: Callable[[Layer], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return torch.tanh(x @ self.weight + self.bias)


def two_layers(change: Callable[[Layer], None]) -> nn.Module:
    return build(lambda: nn.Sequential(Layer(leave), Layer(change)))


def changed(
    rank: int,
    world_size: int,
    change: Callable[[Layer], None],
    settings: dict[str, Any],
    mode: str,
) -> None:
    model = two_layers(change)
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh(), **settings)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    before = [full(param).clone() for param in model.parameters()]
    context = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }[mode]
    for _ in range(2):
        with context(), pytest.raises(ShardedStateError, match=r"changed in place.*: 1\.weight\."):
            model(x)
    # The model goes on from the weights that it had.
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(full(param), value)
    model[1].change = leave
    model(x).square().sum().backward()
    expected = two_layers(leave)
    expected(x).square().sum().backward()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        dist.all_reduce(other.grad)
        torch.testing.assert_close(full(param.grad), other.grad / world_size)


WAYS = [multiply, multiply_a_view, replace_data, renormalise]
SETTINGS: dict[str, dict[str, Any]] = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "group of 2": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.dist
@pytest.mark.parametrize("change", WAYS)
def test_every_way_to_change_a_parameter(change: Callable[[Layer], None]) -> None:
    run_ranks(changed, 2, change, {}, "grad")


@pytest.mark.dist
def test_data_of_a_parameter_that_is_not_cut() -> None:
    run_ranks(changed, 2, replace_data, {"enable_param_shard": False}, "grad")


@pytest.mark.dist
@pytest.mark.parametrize("name", SETTINGS)
def test_in_every_lifetime(name: str) -> None:
    run_ranks(changed, 4 if name == "group of 2" else 2, multiply, SETTINGS[name], "grad")


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("reshard", [True, False])
def test_in_evaluation(reshard: bool, mode: str) -> None:
    run_ranks(changed, 2, multiply, {"reshard_after_forward": reshard}, mode)


def embedded(rank: int, world_size: int) -> None:
    model = nn.Embedding(8, 4, max_norm=0.5)
    fully_shard(model, mesh=data_mesh())
    with pytest.raises(ShardedStateError, match="make what forward updates a buffer"):
        model(torch.tensor([1, 2]))


@pytest.mark.dist
def test_max_norm_of_an_embedding() -> None:
    run_ranks(embedded, 2)


def by_hand(rank: int, world_size: int) -> None:
    """A change between unshard and reshard, by hand or by state_dict, is lost too."""
    model = two_layers(leave)
    fully_shard(model, mesh=data_mesh())
    assert isinstance(model, HSDPModule)
    for end in (model.reshard, model.state_dict):
        model.unshard()
        with torch.no_grad():
            nn.init.ones_(model[0].weight)
        with pytest.raises(ShardedStateError, match=r"changed in place while gathered: 0\.weight"):
            end()
        end()
        assert not torch.equal(full(model[0].weight), torch.ones(6, 6))
    with torch.no_grad():  # sharded, it is kept
        nn.init.ones_(model[0].weight)
    model.unshard()
    assert torch.equal(model[0].weight, torch.ones(6, 6))
    model.reshard()


@pytest.mark.dist
def test_changes_while_gathered_by_hand() -> None:
    run_ranks(by_hand, 2)


def tensor_parallel(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = two_layers(multiply)
    for layer in model:
        for name in ("weight", "bias"):
            placed = distribute_tensor(getattr(layer, name), mesh["tp"], [Replicate()])
            setattr(layer, name, nn.Parameter(placed))
    fully_shard(model, mesh=mesh)
    x = distribute_tensor(torch.randn(3, 6), mesh["tp"], [Replicate()])
    with pytest.raises(ShardedStateError, match=r"changed in place while gathered: 1\.weight"):
        model(x)


@pytest.mark.dist
def test_a_parameter_of_tensor_parallelism() -> None:
    run_ranks(tensor_parallel, 4)


def whole(rank: int, world_size: int) -> None:
    """A parameter that is not cut has no copy: it keeps the change, as under DDP."""
    model, plain = two_layers(multiply), two_layers(multiply)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh)
    x = torch.randn(3, 6)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(param), other)


@pytest.mark.dist
def test_parameters_that_are_not_cut_keep_changes() -> None:
    run_ranks(whole, 2)


def trained(rank: int, world_size: int, zero: int, mode: str) -> None:
    """What is no change: optimizer steps, clipping, zeroed gradients, evaluation, loading."""
    model = LM.make()
    sharded = shard(model, LM, TrainOptions(reshard_after_forward=zero == 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = None
    for step in range(3):
        for micro in range(2):
            sharded.set_requires_gradient_sync(zero != 1 or micro == 1)
            sharded.set_reshard_after_backward(zero != 2 or micro == 1)
            inputs, targets = LM.batch(rank, 2 * step + micro)
            LM.loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
            model(inputs)
        if step == 1:
            model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        now = full(next(model.parameters())).clone()
        assert before is None or not torch.equal(now, before)
        before = now


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_training_is_no_change(zero: int, mode: str) -> None:
    run_ranks(trained, 2, zero, mode)


def made_in_inference_mode(rank: int, world_size: int) -> None:
    """Inference tensors count no changes: a model made of them runs as before, and can be trained."""
    with torch.inference_mode():
        model, plain = two_layers(leave), two_layers(leave)
        fully_shard(model, mesh=data_mesh())
        x = torch.randn(3, 6)
        for _ in range(2):
            torch.testing.assert_close(model(x), plain(x))
    for layer in model:
        layer.change = id  # its buffer is an inference tensor for good
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()
    assert not torch.equal(full(model[0].weight), plain[0].weight)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_made_in_inference_mode(ranks: int) -> None:
    run_ranks(made_in_inference_mode, ranks)
