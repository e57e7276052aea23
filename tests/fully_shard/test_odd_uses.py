"""What people do to a wrapped model besides training it, against the plain model."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel import HSDPModule, PlacementError, PolicyError, ShardedStateError, fully_shard
from tests.baselines import full
from tests.dist_pool import RanksFailed, run_ranks
from tests.fully_shard.runs import data_mesh
from tests.fully_shard.test_setters import compare_mean
from tests.models import build


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def pair(**settings: Any) -> tuple[nn.Module, Any]:
    """Return the plain model and the same one in units."""
    plain, model = build(layers), build(layers)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=data_mesh(), **settings)
    return plain, model


def inputs(rank: int, index: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + index))


def sparse(rank: int, world_size: int, accumulate: bool) -> None:
    """A sparse gradient is reduced as a dense one."""
    plain = build(nn.Embedding, 7, 4, padding_idx=0)
    model = build(nn.Embedding, 7, 4, padding_idx=0, sparse=True)
    fully_shard(model, mesh=data_mesh())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(2):
        for micro in range(2):
            model.set_requires_gradient_sync(not accumulate or micro == 1)
            tokens = torch.tensor([0, 1, 1, 2 + rank, 3 + micro + step])
            for module in (plain, model):
                module(tokens).square().sum().backward()
        compare_mean(model, plain)
        dist.all_reduce(plain.weight.grad)
        plain.weight.grad /= world_size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full(model.weight), plain.weight)


@pytest.mark.dist
@pytest.mark.parametrize("accumulate", [False, True])
def test_sparse_embeddings(accumulate: bool) -> None:
    run_ranks(sparse, 2, accumulate)


def late_optimizer(rank: int, world_size: int) -> None:
    """Built between forward and backward, it finds full parameters in the model."""
    plain, model = pair(reshard_after_forward=False)
    for module in (plain, model):
        loss = module(inputs(0)).square().sum()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        module(inputs(0, 1)).square().sum().backward()
        optimizer.step()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), other)
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])


@pytest.mark.dist
def test_an_optimizer_built_while_parameters_are_gathered() -> None:
    run_ranks(late_optimizer, 2)


def unshard_again(rank: int, world_size: int) -> None:
    plain, model = pair()
    fully_shard(root := nn.Sequential(nn.Linear(6, 6), model), mesh=data_mesh())
    plain = nn.Sequential(copy.deepcopy(nn.Linear(6, 6)), plain)
    plain[0].load_state_dict({k: full(v) for k, v in root[0].state_dict().items()})
    loss = root(inputs(rank)).square().sum()
    for _ in range(2):
        root.unshard()  # its parameters are gathered already
    loss.backward()
    handle = root.unshard(async_op=True)
    root.reshard()
    handle.wait()
    plain(inputs(rank)).square().sum().backward()
    compare_mean(root, plain)


@pytest.mark.dist
def test_unshard_of_what_is_gathered() -> None:
    run_ranks(unshard_again, 2)


def swapped(rank: int, world_size: int) -> None:
    """`functional_call` takes sharded values; plain ones are refused, and the model goes on."""
    plain, model = pair()
    values = {name: value.detach() * 2 for name, value in model.named_parameters()}
    doubled = build(layers)
    doubled.load_state_dict({name: full(value) for name, value in values.items()})
    for _ in range(2):
        actual = torch.func.functional_call(model, values, (inputs(rank),))
        torch.testing.assert_close(actual, doubled(inputs(rank)))
        torch.testing.assert_close(model(inputs(rank)), plain(inputs(rank)))
        with pytest.raises(PlacementError, match=r"0\.weight: it was replaced by Tensor of shape"):
            torch.func.functional_call(
                model, {name: full(value) for name, value in values.items()}, (inputs(rank),)
            )
        torch.testing.assert_close(model(inputs(rank)), plain(inputs(rank)))
    for module in (model, plain):
        module(inputs(rank)).square().sum().backward()
    compare_mean(model, plain)


def swapped_root(rank: int, world_size: int) -> None:
    """What is put back into a root that was gathered is its full parameter."""
    plain, model = build(nn.Linear, 6, 5), build(nn.Linear, 6, 5)
    root, reference = nn.Sequential(model, Failing()), nn.Sequential(plain, Failing())
    fully_shard(root, mesh=data_mesh())
    with torch.no_grad():
        root(inputs(rank))
    values = {name: full(value).detach() for name, value in root.named_parameters()}
    root[1].fails = True
    with pytest.raises(ZeroDivisionError):
        torch.func.functional_call(root, values, (inputs(rank),))
    root[1].fails = False
    for module in (root, reference):
        module(inputs(rank)).square().sum().backward()
    compare_mean(root, reference)


class Failing(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError
        return x


@pytest.mark.dist
@pytest.mark.parametrize("case", [swapped, swapped_root])
def test_functional_call(case: Any) -> None:
    run_ranks(case, 2)


def second_order(rank: int, world_size: int, reshard: bool) -> None:
    plain, model = pair(reshard_after_forward=reshard)
    x = inputs(rank).requires_grad_()
    loss = model(x).square().sum()
    with pytest.raises(ShardedStateError, match="create_graph=True is not supported"):
        torch.autograd.grad(loss, x, create_graph=True)
    for module in (plain, model):  # and it goes on
        module(x).square().sum().backward()
    compare_mean(model, plain)


def transformed(rank: int, world_size: int, reshard: bool) -> None:
    """Derivatives with respect to inputs by `torch.func`."""
    plain, model = pair(reshard_after_forward=reshard)
    x = inputs(rank)
    for transform in (
        lambda module: torch.func.grad(lambda x: module(x).square().sum())(x),
        lambda module: torch.func.jacrev(module)(x[0]),
        lambda module: torch.func.vmap(module)(x),
        lambda module: torch.func.jvp(module, (x,), (torch.ones_like(x),))[1],
    ):
        for _ in range(2):
            torch.testing.assert_close(transform(model), transform(plain))
    for module in (plain, model):
        module(x).square().sum().backward()
    compare_mean(model, plain)


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_derivatives_by_torch_func(reshard: bool) -> None:
    run_ranks(transformed, 2, reshard)


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_second_derivatives_are_refused(reshard: bool) -> None:
    run_ranks(second_order, 2, reshard)


def hooked(rank: int, world_size: int) -> None:
    """A hook is given the reduced slice and may replace it."""
    plain, model = pair()
    seen: list[str] = []

    def halve(grad: Tensor) -> Tensor:
        seen.append("hook")
        assert isinstance(grad, DTensor) and grad.shape == (5, 6)
        return grad / 2

    def after(param: Tensor) -> None:
        assert param.grad is not None
        seen.append("after")

    handle = model[0].weight.register_hook(halve)
    model[0].weight.register_post_accumulate_grad_hook(after)
    for index in range(2):
        for module in (plain, model):
            module(inputs(rank, index)).square().sum().backward()
    plain[0].weight.grad /= 2
    compare_mean(model, plain)
    assert seen == ["hook", "after"] * 2
    handle.remove()
    model(inputs(rank)).sum().backward()
    assert seen[4:] == ["after"]


@pytest.mark.dist
def test_gradient_hooks_of_parameters() -> None:
    run_ranks(hooked, 2)


def refused(rank: int, world_size: int) -> None:
    def check(model: nn.Module, error: type[Exception], text: str) -> None:
        before = list(model.parameters())
        with pytest.raises(error, match=text):
            fully_shard(model, mesh=data_mesh())
        assert not isinstance(model, HSDPModule)
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))

    model = build(layers)
    handle = model[2].bias.register_hook(lambda grad: None)
    check(
        model, ShardedStateError, r"would lose the gradient hooks of 2\.bias; register them after"
    )
    handle.remove()
    model(inputs(rank)).sum().backward()
    check(model, ShardedStateError, r"would lose the gradients of 0\.weight, .*, 2\.bias; finish")
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    check(scripted, PolicyError, "is a TorchScript module, which takes no hooks")
    fully_shard(model, mesh=data_mesh())


@pytest.mark.dist
def test_what_slices_would_not_have_is_refused() -> None:
    run_ranks(refused, 2)


def added(rank: int, world_size: int) -> None:
    model = build(layers)
    ignored = model[2].bias
    fully_shard(model[0], mesh=data_mesh())
    fully_shard(model, mesh=data_mesh(), ignored_params={ignored})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs(rank))
    model = build(layers)
    fully_shard(model, mesh=data_mesh())
    model.append(nn.Linear(3, 2))
    with pytest.warns(UserWarning, match=r"no unit of fully_shard has 3\.weight, 3\.bias: added"):
        model(inputs(rank))
    model = build(layers)
    fully_shard(model, mesh=data_mesh())
    model.append(nn.Linear(3, 2))
    fully_shard(model[3], mesh=data_mesh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs(rank))


@pytest.mark.dist
def test_parameters_that_came_after_wrapping() -> None:
    run_ranks(added, 2)


def killed(rank: int, world_size: int, in_forward: bool) -> None:
    _, model = pair()
    model(inputs(rank)).sum().backward()
    if not in_forward:
        loss = model(inputs(rank)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if in_forward:
        loss = model(inputs(rank)).sum()
    loss.backward()


@pytest.mark.dist
@pytest.mark.parametrize("in_forward", [True, False])
def test_a_rank_that_is_killed(in_forward: bool) -> None:
    """The others end with an error that names what they were doing, not with a hang."""
    with pytest.raises(
        RanksFailed, match=r"failed: .*See first whether another rank ended"
    ) as failure:
        run_ranks(killed, 2, in_forward)
    assert failure.value.died == {1: -signal.SIGKILL}
