"""Units with what else a training script uses: TP, DDP, groups, scalers, optimizers in backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel import CPUOffloadPolicy, HSDPModule, ShardedStateError, fully_shard
from tests.baselines import TrainOptions, full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, build, vector_batch

LM = CASES["lm"]
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


class MLP(nn.Module):
    def __init__(self, dim: int = 8, factor: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(dim, factor * dim)
        self.down = nn.Linear(factor * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def mlps(count: int = 3, dim: int = 8, factor: int = 4) -> nn.Sequential:
    return nn.Sequential(*(build(MLP, dim, factor, seed=i) for i in range(count)))


def with_tp(mesh: DeviceMesh, dim: int = 8, factor: int = 4) -> nn.Sequential:
    model = mlps(dim=dim, factor=factor)
    for mlp in model:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(mlp, mesh["tp"], plan)
    return model


def tp_mesh(world_size: int, replicas: int = 0) -> tuple[DeviceMesh, Any]:
    """Return the whole mesh and its data dims."""
    if replicas:
        mesh = init_device_mesh(
            "cpu", (replicas, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
        )
        return mesh, mesh["dp_replicate", "dp_shard"]
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    return mesh, mesh["dp"]


def other_dim(rank: int, world_size: int) -> None:
    """TP cuts one dim of a weight and the units the other one."""
    mesh, data = tp_mesh(world_size)
    plain, model = mlps(), with_tp(mesh)

    def place(param: nn.Parameter) -> Shard:
        assert isinstance(param, DTensor)
        cut = [p.dim for p in param.placements if isinstance(p, Shard)]
        return Shard(param.ndim - 1 - cut[0]) if cut else Shard(0)

    for module in (*model, model):
        fully_shard(module, mesh=data, shard_placement_fn=place)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(param), other), name
        if param.ndim == 2:
            assert sorted(p.dim for p in param.placements) == [0, 1], name
    for module in (model, plain):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(data.get_local_rank()))
        module(x).square().sum().backward()
    compare_mean(model, plain, data.get_group())


def compare_mean(model: nn.Module, plain: nn.Module, group: Any = None) -> None:
    """Compare the gradients of `model` with the mean over a group of those of `plain`."""
    ranks = dist.get_world_size(group)
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            mean = other.grad.clone()
            dist.all_reduce(mean, group=group)
            torch.testing.assert_close(full(param.grad), mean / ranks, **CLOSE, msg=name)


@pytest.mark.dist
def test_tp_and_units_cut_different_dims() -> None:
    run_ranks(other_dim, 4)


def tp_state_dict(rank: int, world_size: int, replicas: int, factor: int) -> None:
    mesh, data = tp_mesh(world_size, replicas)
    plain, model = mlps(factor=factor), with_tp(mesh, factor=factor)
    for module in (*model, model):
        fully_shard(module, mesh=data)
    saved = model.state_dict()
    for key, value in plain.state_dict().items():
        assert isinstance(saved[key], DTensor) and torch.equal(full(saved[key]), value), key
    where = {name: param.to_local().data_ptr() for name, param in model.named_parameters()}
    assert {key: value.to_local().data_ptr() for key, value in saved.items()} == where
    model.load_state_dict({key: value.detach().clone().fill_(7) for key, value in saved.items()})
    assert {name: param.to_local().data_ptr() for name, param in model.named_parameters()} == where
    assert all((param.to_local() == 7).all() for param in model.parameters())
    model.load_state_dict(plain.state_dict())  # full plain tensors
    for name, param in model.named_parameters():
        assert torch.equal(full(param), plain.state_dict()[name]), name


@pytest.mark.dist
@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize("factor", [4, 1])
def test_state_dicts_of_tp_parameters(replicas: int, factor: int) -> None:
    run_ranks(tp_state_dict, 4, replicas, factor)


def groups(rank: int, world_size: int) -> None:
    """A hybrid mesh from groups that the user made gives the same numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pairs = [dist.new_group(pair) for pair in ([0, 2], [1, 3], [0, 1], [2, 3])]
    other = DeviceMesh.from_group(
        [pairs[rank % 2], pairs[2 + rank // 2]],
        "cpu",
        mesh=torch.arange(4).view(2, 2),
        mesh_dim_names=("replicate", "shard"),
    )
    models = [build(MLP), build(MLP)]
    for model, its_mesh in zip(models, (mesh, other), strict=True):
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=its_mesh)
        with count_collectives() as calls:
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))
            model(x).square().sum().backward()
        assert calls.kinds()["all_reduce"] == calls.kinds()["reduce_scatter"] == 2
    for mine, its in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine.to_local(), its.to_local())
        assert torch.equal(mine.grad.to_local(), its.grad.to_local())
        assert torch.equal(mine.device_mesh.mesh, its.device_mesh.mesh)


@pytest.mark.dist
def test_a_hybrid_mesh_from_groups() -> None:
    run_ranks(groups, 4)


class Holder(nn.Module):
    """A parameter around a unit, and a child that the unit ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Sequential(build(nn.Linear, 6, 6), build(nn.Linear, 6, 6, seed=1))
        self.offset = nn.Parameter(torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x) + self.offset


def inside_ddp(rank: int, world_size: int) -> None:
    """DDP reduces what the unit does not: its surroundings and its ignored parameters."""
    plain, model = build(Holder), build(Holder)
    ignored = set(model.unit[1].parameters())
    fully_shard(model.unit, mesh=data_mesh(), ignored_params=ignored)
    managed = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    assert managed == ["unit.0.weight", "unit.0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, managed)
    models = [DistributedDataParallel(plain), DistributedDataParallel(model)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in models]
    for index in range(3):
        for module, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            module(vector_batch(rank, index)[0]).square().sum().backward()
            with implicit_replication():
                optimizer.step()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), other.grad, **CLOSE, msg=name)
            torch.testing.assert_close(full(param), other.detach(), rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.dist
def test_a_unit_with_ignored_parameters_inside_ddp() -> None:
    run_ranks(inside_ddp, 2)


def in_backward(rank: int, world_size: int) -> None:
    """An optimizer a parameter that steps as soon as its gradient is there."""
    models = [LM.make(), LM.make()]
    for model in models:
        shard(model, LM, TrainOptions(reshard_after_forward=True))
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    optimizer = torch.optim.AdamW(models[0].parameters(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    own: dict[Any, Any] = {}
    for param in models[1].parameters():
        single = torch.optim.AdamW([param], **options)
        own[param] = (single, torch.optim.lr_scheduler.StepLR(single, step_size=2))

        def step(p: Any) -> None:
            own[p][0].step()
            own[p][0].zero_grad()
            own[p][1].step()

        param.register_post_accumulate_grad_hook(step)
    for index in range(5):
        losses = []
        for model in models:
            inputs, targets = LM.batch(rank, index)
            losses.append(LM.loss(model(inputs), targets))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert torch.equal(*losses)
        assert all(param.grad is None for param in models[1].parameters()), "freed at once"
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())


@pytest.mark.dist
def test_an_optimizer_in_backward() -> None:
    run_ranks(in_backward, 2)


def scaler_with_tp(rank: int, world_size: int, broken: bool) -> None:
    mesh, data = tp_mesh(world_size)
    model = with_tp(mesh)
    for module in (*model, model):
        fully_shard(module, mesh=data)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler.scale(
        model(torch.randn(2, 8, generator=torch.Generator().manual_seed(1))).sum()
    ).backward()
    first = next(model.parameters())
    if broken and rank == 1:
        first.grad.to_local()[0, 0] = float("inf")
    before, scaled = full(first), first.grad.to_local().clone()
    scaler.unscale_(optimizer)
    assert torch.equal(first.grad.to_local(), scaled / 2)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(full(first), before) is broken
    assert bool(optimizer.state) is not broken
    assert scaler.get_scale() == (1.0 if broken else 2.0)


@pytest.mark.dist
@pytest.mark.parametrize("broken", [False, True])
def test_grad_scaler_with_tp(broken: bool) -> None:
    run_ranks(scaler_with_tp, 4, broken)


def freed(rank: int, world_size: int, trained: bool) -> None:
    model: Any = LM.make()
    shard(model, LM, TrainOptions(reshard_after_forward=False))
    inputs, targets = LM.batch(rank, 0)
    loss = LM.loss(model(inputs), targets)
    if trained:
        loss.backward()
    held: list[Any] = []
    for module in (model, *model.blocks):
        for param in module.hsdp_params():
            held += [weakref.ref(param), weakref.ref(param.sharded_param)]
            held += [weakref.ref(param.unsharded_param), weakref.ref(param.local_tensor)]
    del model, module, param, loss
    gc.collect()
    alive = [ref() for ref in held if ref() is not None]
    assert not alive, f"{len(alive)} of {len(held)}: {type(alive[0])}"


@pytest.mark.dist
@pytest.mark.parametrize("trained", [True, False])
def test_a_deleted_model_frees_its_parameters(trained: bool) -> None:
    run_ranks(freed, 2, trained)


def small_checks(rank: int, world_size: int) -> None:
    # Several modules cannot be the root.
    pair = mlps(2)
    fully_shard(list(pair), mesh=data_mesh())
    with pytest.raises(
        ShardedStateError, match=r"needs one root module, but .* several: HSDPMLP, "
    ):
        pair(torch.zeros(1, 8))
    # A unit without parameters of its own.
    model = mlps(2)
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh())
    assert isinstance(model, HSDPModule)
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert model.hsdp_params() == []
    model.reshard()
    # After backward the slices are registered, whatever forward kept.
    for reshard in (True, False, None):
        model = mlps(2)
        for module in (*model, model):
            fully_shard(module, mesh=data_mesh(), reshard_after_forward=reshard)
        model(torch.ones(2, 8)).sum().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.dist
def test_roots_and_units_without_parameters() -> None:
    run_ranks(small_checks, 2)


def offloaded_pieces(rank: int, world_size: int) -> None:
    """A model on the meta device, loaded piece by piece from CPU state dicts."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    values = {}
    for index, (name, param) in enumerate(list(model.named_parameters())):
        values[name] = torch.arange(16.0).view(4, 4) + index
        piece = distribute_tensor(values[name], param.device_mesh, param.placements)
        model.load_state_dict({name: piece}, assign=True, strict=False)
    model(torch.ones(4, 4)).sum().backward()
    for name, param in model.state_dict().items():
        assert param.device.type == "cpu" and torch.equal(full(param), values[name]), name
    assert all(param.grad.device.type == "cpu" for param in model.parameters())


@pytest.mark.dist
def test_an_offloaded_model_is_loaded_in_pieces() -> None:
    run_ranks(offloaded_pieces, 2)


def cached(rank: int, world_size: int) -> None:
    """A state dict that was taken once shows every later step, until the storage is replaced."""
    for size in (2, 3, 5):
        model = build(nn.Linear, size, size, bias=False)
        fully_shard(model, mesh=data_mesh(), reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        saved = model.state_dict()["weight"]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, size)).sum().backward()
            optimizer.step()
            now = model.weight.to_local()
            assert now.untyped_storage().data_ptr() == saved.to_local().untyped_storage().data_ptr()
            assert torch.equal(saved.to_local(), now)


@pytest.mark.dist
def test_a_cached_state_dict_follows_training() -> None:
    run_ranks(cached, 2)


def clipped(rank: int, world_size: int, tp: bool, norm: float) -> None:
    mesh, data = tp_mesh(world_size) if tp else (data_mesh(), data_mesh())
    plain, model = mlps(), with_tp(mesh) if tp else mlps()
    for module in (*model, model):
        fully_shard(module, mesh=data)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(data.get_local_rank()))
    for module in (plain, model):
        module(x).square().sum().mul(50).backward()
    group = data.get_group()
    for param in plain.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)
    before = [param.grad.to_local().clone() for param in model.parameters()]
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type=norm)
    with count_collectives() as calls:
        total = torch.nn.utils.clip_grad_norm_(
            model.parameters(), 1.0, norm_type=norm, foreach=True
        )
    assert calls.kinds() == {"all_reduce": mesh.ndim}, "one a mesh dim"
    torch.testing.assert_close(full(total), expected, rtol=1e-5, atol=0)
    for param, other, old in zip(model.parameters(), plain.parameters(), before, strict=True):
        torch.testing.assert_close(full(param.grad), other.grad, **CLOSE)
        assert not torch.equal(param.grad.to_local(), old)


@pytest.mark.dist
@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("tp", [False, True])
def test_clipping_by_torch(tp: bool, norm: float) -> None:
    run_ranks(clipped, 4 if tp else 2, tp, norm)
