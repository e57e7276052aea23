"""Schedules of several micro-batches, hooks on reductions, meshes from groups, and init flows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hyper_parallel import CPUOffloadPolicy, HSDPModule, MixedPrecisionPolicy, fully_shard
from tests.baselines import TrainOptions, full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, build, vector_batch

LM = CASES["lm"]
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def stack() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 6), *blocks)


def modes(rank: int, world_size: int, shape: tuple[int, ...], mode: str, setter: str) -> None:
    """Turn synchronisation off for all units, for the root's own, or for some."""
    plain, model = build(stack), build(stack)
    for block in model[1:]:
        fully_shard(block, mesh=data_mesh(shape), reshard_after_forward=True)
    fully_shard(model, mesh=data_mesh(shape), reshard_after_forward=True)
    targets: dict[str, list[tuple[Any, bool]]] = {
        "all": [(model, True)],
        "root": [(model, False)],
        "some": [(block, True) for block in model[1:3]],
    }
    with count_collectives() as calls:
        for micro in range(3):
            for module, recurse in targets[mode]:
                getattr(module, setter)(micro == 2, recurse=recurse)
            model(vector_batch(rank, micro)[0]).sum().backward()
    for index in range(3):
        plain(vector_batch(rank, index)[0]).sum().backward()
    for param in plain.parameters():
        dist.all_reduce(param.grad)
        assert param.grad is not None
        param.grad /= world_size
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, **CLOSE, msg=name)
    synced = {"all": 4, "root": 4 + 2 * 3, "some": 4 + 2 * 2}[mode]
    scatters = 12 if setter == "set_requires_all_reduce" else synced
    assert calls.kinds()["reduce_scatter"] == scatters
    assert calls.kinds().get("all_reduce", 0) == (synced if len(shape) == 2 else 0)


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["all", "root", "some"])
@pytest.mark.parametrize(
    ("shape", "setter"),
    [
        ((4,), "set_requires_gradient_sync"),
        ((2, 2), "set_requires_gradient_sync"),
        ((2, 2), "set_requires_all_reduce"),
    ],
)
def test_accumulation_of_some_units(shape: tuple[int, ...], mode: str, setter: str) -> None:
    run_ranks(modes, 4, shape, mode, setter)


def one_forward_one_backward(rank: int, world_size: int, explicit: bool, keep: bool) -> None:
    plain, model = LM.make(), LM.make()
    sharded = shard(model, LM, TrainOptions(reshard_after_forward=False))
    if explicit:
        for module in (model, *model.blocks):
            module.unshard(async_op=True)
    for index in range(3):
        last = index == 2
        sharded.set_requires_gradient_sync(last)
        sharded.set_is_last_backward(last)
        if keep:
            sharded.set_reshard_after_backward(last)
        for module in (plain, model):
            inputs, targets = LM.batch(rank, index)
            LM.loss(module(inputs), targets).backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(other.grad)
        assert other.grad is not None
        torch.testing.assert_close(full(param.grad), other.grad / world_size, **CLOSE, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize(("explicit", "keep"), list(itertools.product([True, False], repeat=2)))
def test_one_forward_one_backward(explicit: bool, keep: bool) -> None:
    run_ranks(one_forward_one_backward, 2, explicit, keep)


def reduce_hook(rank: int, world_size: int) -> None:
    """A hook that reduces over the replicas itself, on a mesh of one group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    inner = DeviceMesh.from_group(mesh.get_group("shard"), "cpu", mesh_dim_names=("shard",))
    model, reference = build(stack), build(stack)
    fully_shard(reference, mesh=mesh)
    fully_shard(model, mesh=inner)
    assert isinstance(model, HSDPModule)
    sizes: list[int] = []

    def hook(flat: Tensor) -> None:
        sizes.append(flat.numel())
        dist.all_reduce(flat, group=mesh.get_group("replicate"))
        flat.div_(2)

    model.set_all_reduce_hook(hook)
    for module in (model, reference):
        module(vector_batch(rank, 0)[0]).sum().backward()
    assert len(sizes) == 1
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None
        torch.testing.assert_close(param.grad.to_local(), other.grad.to_local(), **CLOSE, msg=name)


@pytest.mark.dist
def test_all_reduce_hook_on_a_mesh_from_a_group() -> None:
    run_ranks(reduce_hook, 4)


class CountingGather:
    """A custom all-gather that counts what it allocates and runs."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append("allocate")
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls.append("run")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class CountingScatter(CountingGather):
    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.calls.append("run")
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def custom_collectives(rank: int, world_size: int) -> None:
    model, reference = build(stack), build(stack)
    for module in (model, reference):
        fully_shard(module, mesh=data_mesh())
    gather, scatter = CountingGather(), CountingScatter()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    for module in (model, reference):
        module(vector_batch(rank, 0)[0]).sum().backward()
    assert gather.calls == ["allocate", "run"]
    assert sorted(scatter.calls) == ["allocate", "allocate", "run"]
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(param.grad), full(other.grad))


@pytest.mark.dist
def test_custom_collectives() -> None:
    run_ranks(custom_collectives, 2)


def meta_init(rank: int, world_size: int, tp: bool, offload: bool) -> None:
    settings: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for low in (False, True):
        for dim in (8, 3, 1):
            if tp and dim != 8:
                continue
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim))
            mesh = data_mesh()
            if tp:
                root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
                parallelize_module(model, root["tp"], plan)
                mesh = root["dp"]
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32
            )
            for module in (*model, model):
                fully_shard(module, mesh=mesh, mp_policy=policy, **settings)
            assert all(param.is_meta for param in model.parameters())
            model.to_empty(device="cpu")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            for param in model.parameters():
                param.detach().fill_(1337.0)
            for module in model:
                module.reset_parameters()
            for param in model.parameters():
                assert (param.to_local() != 1337.0).all()
            before = [full(param) for param in model.parameters()]
            model(torch.ones(4, dim)).sum().backward()
            optimizer.step()
            changed = [
                not torch.equal(full(param), old)
                for param, old in zip(model.parameters(), before, strict=True)
            ]
            assert all(changed)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "tp", "offload"), [(4, False, False), (4, True, False), (2, False, True)]
)
def test_meta_init_by_reset_parameters(world: int, tp: bool, offload: bool) -> None:
    run_ranks(meta_init, world, tp, offload)


def replaced_before_first_forward(rank: int, world_size: int) -> None:
    """A parameter computed from others, put in place after wrapping (DoRA)."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3, bias=False)
            self.norm = nn.Parameter(torch.empty(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum() * self.norm.sum()

    with torch.device("meta"):
        model = Normed()
    fully_shard(model.layer, mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    model.layer.to_empty(device="cpu")
    nn.init.ones_(model.layer.weight)
    with torch.no_grad():
        model.norm = nn.Parameter(torch.linalg.norm(model.layer.weight, dim=1))
    model(torch.ones(2, 3)).backward()
    assert isinstance(model.norm.grad, DTensor)
    torch.testing.assert_close(full(model.norm.grad), torch.full((3,), 18.0))


@pytest.mark.dist
def test_a_parameter_replaced_before_the_first_forward() -> None:
    run_ranks(replaced_before_first_forward, 2)


def low_precision_frozen(rank: int, world_size: int) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            low = torch.ones(5, 4).to(torch.float8_e4m3fn)
            self.low = nn.Parameter(low, requires_grad=False)
            self.high = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.low.float() @ self.high

    model = Quantised()
    fully_shard(model, mesh=data_mesh())
    with count_collectives() as calls:
        model(torch.ones(2, 5)).sum().backward()
    assert calls.kinds() == {"all_gather": 1, "reduce_scatter": 1}
    assert torch.equal(full(model.high.grad), torch.full((4, 3), 10.0))
    assert model.low.grad is None


@pytest.mark.dist
def test_frozen_float8_beside_trained_float32() -> None:
    run_ranks(low_precision_frozen, 2)


def channels_last(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        return build(nn.Conv2d, 4, 6, 3).to(memory_format=torch.channels_last)

    plain, model = make(), make()
    fully_shard(model, mesh=data_mesh())
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(rank))
    for module in (plain, model):
        module(x).square().sum().backward()
    dist.all_reduce(plain.weight.grad)
    torch.testing.assert_close(full(model.weight.grad), plain.weight.grad / world_size, **CLOSE)


@pytest.mark.dist
def test_a_weight_in_another_memory_format() -> None:
    run_ranks(channels_last, 2)


def shared_module(rank: int, world_size: int) -> None:
    """A module registered twice, and a buffer shared by two modules."""
    inner = nn.Linear(6, 6)
    model, plain = nn.Sequential(inner, nn.ReLU(), inner), None
    plain_inner = nn.Linear(6, 6)
    plain_inner.load_state_dict(inner.state_dict())
    plain = nn.Sequential(plain_inner, nn.ReLU(), plain_inner)
    fully_shard(model, mesh=data_mesh())
    assert len(model.hsdp_params()) == 2
    for module in (plain, model):
        module(vector_batch(rank, 0)[0]).sum().backward()
    dist.all_reduce(plain_inner.weight.grad)
    assert plain_inner.weight.grad is not None
    torch.testing.assert_close(
        full(inner.weight.grad), plain_inner.weight.grad / world_size, **CLOSE
    )


@pytest.mark.dist
def test_a_module_registered_twice() -> None:
    run_ranks(shared_module, 2)
