"""Parameters that are DTensors on the whole mesh already, whole along its data dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from hyper_parallel import HSDPModule, MeshError, PlacementError, fully_shard
from tests.baselines import full
from tests.dist_pool import run_ranks
from tests.models import build


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the weights over the last dim of the mesh."""
    for key, param in list(module.named_parameters(recurse=False)):
        cut = Shard(0 if name == "up" else 1) if key == "weight" else Replicate()
        placements = [*[Replicate()] * (mesh.ndim - 1), cut]
        setattr(module, key, nn.Parameter(distribute_tensor(param, mesh, placements)))


def whole_mesh(
    rank: int,
    world_size: int,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    roles: dict[str, Any] | None,
    reshard: bool,
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    tp = "tp" in names
    plain, model = build(MLP), build(MLP)
    distribute_module(model, mesh, partition if tp else None)
    fully_shard(model, mesh=mesh, roles=roles, reshard_after_forward=reshard)
    assert isinstance(model, HSDPModule)
    for param in model.hsdp_params():
        assert param.sharded_param.device_mesh == mesh
        assert len(param.sharded_param.placements) == mesh.ndim
    index = rank // 2 if tp else rank
    total = world_size // 2 if tp else world_size
    batches = [torch.randn(2, 8, generator=torch.Generator().manual_seed(i)) for i in range(total)]
    (sum(plain(x).square().sum() for x in batches) / total).backward()
    for _ in range(2):
        model.zero_grad()
        # Whole along every dim, although the data dims hold different batches, as in data parallelism.
        x = DTensor.from_local(batches[index], mesh, [Replicate()] * mesh.ndim, run_check=False)
        model(x).square().sum().backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), other.grad, rtol=2e-5, atol=2e-6, msg=name)
            assert torch.equal(full(param), other), name


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "names", "shape", "roles", "reshard"),
    [
        (2, ("dp_shard",), (2,), None, True),
        (2, ("dp_shard",), (2,), None, False),
        (2, ("dp_replicate",), (2,), None, True),
        (4, ("dp_replicate", "dp_shard"), (2, 2), None, True),
        (4, ("dp_shard", "cp"), (2, 2), {"shard": ("dp_shard", "cp")}, True),
        (4, ("dp_shard", "tp"), (2, 2), None, True),
        (4, ("dp_shard", "tp"), (2, 2), None, False),
        (4, ("dp_replicate", "dp_shard", "tp"), (1, 2, 2), None, True),
    ],
)
def test_dtensors_on_the_whole_mesh(
    world: int,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    roles: dict[str, Any] | None,
    reshard: bool,
) -> None:
    run_ranks(whole_mesh, world, names, shape, roles, reshard)


class Experts(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        for name in ("used", "unused", "sometimes"):
            value = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor, all_of_them: bool) -> Tensor:
        out = self.used.to_local().sum() * x.sum()
        return out + 4 * self.sometimes.to_local().sum() if all_of_them else out


def unused(rank: int, world_size: int) -> None:
    """A parameter that no rank uses has no gradient; PyTorch's has one of zeros."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Experts(mesh["ep"])
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    assert isinstance(model, HSDPModule)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1), rank < 2).backward()
    assert torch.equal(full(model.used.grad), torch.ones(8, 4))
    assert torch.equal(full(model.sometimes.grad), torch.full((8, 4), 2.0))
    assert model.unused.grad is None


@pytest.mark.dist
def test_expert_parameters_that_some_or_no_ranks_use() -> None:
    run_ranks(unused, 4)


def refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0)]))
    with pytest.raises(PlacementError, match=r"weight: it is a DTensor that is S\(0\) on mesh dim"):
        fully_shard(model, mesh=mesh)
    with pytest.raises(MeshError, match="nonexistent"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, roles={"shard": "nonexistent"})


@pytest.mark.dist
def test_dtensors_that_are_cut_over_a_data_dim_are_refused() -> None:
    run_ranks(refused, 2)
