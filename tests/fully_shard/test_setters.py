"""What the setters of a module change: counts of collectives, numbers, and what stays registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import HSDPModule, MixedPrecisionPolicy, fully_shard
from tests.baselines import TrainOptions, full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, LMConfig, TransformerLM, build, vector_batch

LM = CASES["lm"]
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def compare_mean(model: nn.Module, plain: nn.Module, factor: float | None = None) -> None:
    """Compare gradients with the sum over the ranks of those of `plain`, divided."""
    factor = factor or dist.get_world_size()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            total = other.grad.float().clone()
            dist.all_reduce(total)
            torch.testing.assert_close(full(param.grad), total / factor, **CLOSE, msg=name)


def resharding(rank: int, world_size: int, value: bool, recurse: bool) -> dict[str, int]:
    model = build(TransformerLM, LMConfig(blocks=3))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data_mesh(), reshard_after_forward=not value)
    assert isinstance(model, HSDPModule)
    model.set_reshard_after_forward(value, recurse=recurse)
    inputs, targets = LM.batch(rank, 0)
    with count_collectives() as calls:
        loss = LM.loss(model(inputs), targets)
    assert calls.kinds() == {"all_gather": 4}
    with count_collectives() as calls:
        loss.backward()
    return calls.kinds()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("value", "recurse", "gathers"),
    [(True, True, 4), (True, False, 1), (False, True, 0), (False, False, 3)],
)
def test_resharding_of_the_root_or_of_all(value: bool, recurse: bool, gathers: int) -> None:
    expected = {"reduce_scatter": 4} | ({"all_gather": gathers} if gathers else {})
    assert run_ranks(resharding, 2, value, recurse) == [expected] * 2


def divided(rank: int, world_size: int, shape: tuple[int, ...], factor: float, low: bool) -> None:
    """A factor of the root's unit only; the other units divide by the number of ranks."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None
    )
    plain, model = build(TransformerLM, LMConfig()), build(TransformerLM, LMConfig())
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data_mesh(shape), mp_policy=policy, reshard_after_forward=False)
    assert isinstance(model, HSDPModule)
    model.set_gradient_divide_factor(factor)
    inputs, targets = LM.batch(rank, 0)
    if low:
        plain.to(torch.bfloat16)
    for module in (plain, model):
        LM.loss(module(inputs), targets).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        total = other.grad.float().clone()
        dist.all_reduce(total)
        expected = total / (world_size if name.startswith("blocks") else factor)
        torch.testing.assert_close(full(param.grad), expected, **CLOSE, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("factor", [4.0, 8.0])
@pytest.mark.parametrize(
    ("shape", "low"), [((4,), False), ((2, 2), False), ((4, 1), False), ((4,), True)]
)
def test_divide_factor_of_one_unit(shape: tuple[int, ...], low: bool, factor: float) -> None:
    run_ranks(divided, 4, shape, factor, low)


class Divisions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "div" in func.__name__
        return func(*args, **(kwargs or {}))


def alone(rank: int, world_size: int, factor: float | None) -> None:
    model = nn.Linear(8, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)))
    assert isinstance(model, HSDPModule)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    loss = model(torch.ones(3, 8)).sum()
    with Divisions() as mode, count_collectives() as calls:
        loss.backward()
    assert calls.kinds() == {}
    assert mode.count == int(factor not in (None, 1.0)), "nothing is divided by one"
    assert torch.equal(model.weight.grad.to_local(), torch.full((4, 8), 3 / (factor or 1)))


@pytest.mark.dist
@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_one_rank_divides_only_if_asked(factor: float | None) -> None:
    run_ranks(alone, 1, factor)


class Reduced(nn.Module):
    """Computes, then starts an all-reduce of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = F.relu(x @ self.weight)
        with torch.no_grad():
            work = dist.all_reduce(y, async_op=True)
        return y, work


class Overlapped(nn.Module):
    """Gathers its later layers while its first ones run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Reduced(6) for _ in range(3))
        self.later = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pending = []
        for first, later in zip(self.first, self.later, strict=True):
            pending.append(first(x))
            if isinstance(later, HSDPModule):
                later.unshard(async_op=True)
        total = torch.zeros_like(x)
        for (y, work), later in zip(pending, self.later, strict=True):
            work.wait()
            total = total + later(y)
        return total


def unshard_ahead(rank: int, world_size: int, also_all: bool) -> None:
    plain, model = build(Overlapped), build(Overlapped)
    for later in model.later:
        fully_shard(later, mesh=data_mesh(), reshard_after_forward=False)
    fully_shard(model, mesh=data_mesh())
    if also_all:
        model._set_unshard_async_op(True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, model)]
    for index in range(3):
        losses = []
        for module in (plain, model):
            losses.append(module(vector_batch(rank, index)[0]).square().sum())
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        compare_mean(model, plain)
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= world_size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.dist
@pytest.mark.parametrize("also_all", [False, True])
def test_units_gathered_ahead_in_forward(also_all: bool) -> None:
    run_ranks(unshard_ahead, 2, also_all)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.embed(tokens))


def partial_twice(rank: int, world_size: int, reshard: bool) -> None:
    """Two forwards that skip a module of a unit, then one backward."""
    plain, model = build(Headed), build(Headed)
    settings: dict[str, Any] = {"mesh": data_mesh(), "reshard_after_forward": reshard}
    fully_shard([model.norm, model.head], **settings)
    fully_shard(model, **settings)
    generator = torch.Generator().manual_seed(rank)
    first, second = (torch.randint(16, (2, 6), generator=generator) for _ in range(2))
    for _ in range(2):
        for module in (plain, model):
            module.zero_grad()
            (module(first).square().sum() + module(second).sin().sum()).backward()
        compare_mean(model, plain)
        assert model.head.weight.grad is None


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_two_partial_forwards_before_a_backward(reshard: bool) -> None:
    run_ranks(partial_twice, 2, reshard)


def hybrid_steps(rank: int, world_size: int, reshard: bool, sync: bool) -> None:
    """Hybrid sharding, offloaded, with micro-batches, against the unsharded model."""
    from hyper_parallel import CPUOffloadPolicy

    plain, model = LM.make(), LM.make()
    options = TrainOptions(mesh_shape=(2, 2), reshard_after_forward=reshard)
    sharded = shard(model, LM, options, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for step in range(2):
        for micro in range(3):
            sharded.set_requires_gradient_sync(sync or micro == 2)
            for module in (plain, model):
                inputs, targets = LM.batch(rank, 3 * step + micro)
                LM.loss(module(inputs), targets).backward()
        compare_mean(model, plain)
        for module in (plain, model):
            module.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.dist
@pytest.mark.parametrize(("reshard", "sync"), [(True, True), (True, False), (False, False)])
def test_hybrid_offloaded_micro_batches(reshard: bool, sync: bool) -> None:
    run_ranks(hybrid_steps, 4, reshard, sync)


def broadcast_by_hand(rank: int, world_size: int) -> None:
    """The user overwrites slices and buffers from the first replica."""
    mesh = data_mesh((2, 2))
    model, reference = LM.make(), LM.make()
    for each in (model, reference):
        each.register_buffer("extra", torch.arange(4.0))
        shard(each, LM, TrainOptions(mesh_shape=(2, 2)))
    group = mesh.get_group("dp_replicate")
    source = dist.get_process_group_ranks(group)[0]
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if rank != source:
            local.detach().fill_(1337.0)
        dist.broadcast(local.detach(), source, group=group)
    inputs, targets = LM.batch(rank, 0)
    losses = [LM.loss(each(inputs), targets) for each in (model, reference)]
    assert torch.equal(*losses) and torch.equal(model.extra, reference.extra)
    losses[0].backward()


@pytest.mark.dist
def test_slices_that_the_user_broadcasts() -> None:
    run_ranks(broadcast_by_hand, 4)


def forward_mode(rank: int, world_size: int) -> None:
    """torch.func.jvp through a unit of which the differentiated input is not one."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        enter, leave = nn.Linear(8, 16, bias=False), nn.Linear(16, 6, bias=False)
    for module in (enter, leave):
        fully_shard(module, mesh=data_mesh(), mp_policy=policy, reshard_after_forward=False)
        module.to_empty(device="cpu")
        nn.init.ones_(module.weight)
    hidden = enter(torch.ones(8, dtype=torch.bfloat16))
    primal = torch.ones(6, dtype=torch.bfloat16, requires_grad=True)
    out, tangent = torch.func.jvp(lambda _: leave(hidden), (primal,), (torch.ones_like(primal),))
    assert out.dtype == torch.bfloat16 and torch.equal(
        out.detach().float(), torch.full((6,), 128.0)
    )
    assert torch.equal(tangent, torch.zeros_like(out))


@pytest.mark.dist
def test_forward_mode_past_a_unit() -> None:
    run_ranks(forward_mode, 2)
