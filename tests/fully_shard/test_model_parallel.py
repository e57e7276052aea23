"""Tensor and expert parallel parameters: rows 3 to 7 of the matrix, in eager form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hyper_parallel import HSDPModule, MixedPrecisionPolicy, fully_shard
from hyper_parallel.placement import format_placements
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.models import build

BATCH, SEQUENCE, DIM = 2, 4, 8


class Net(nn.Module):
    """Two MLPs, the second one normed first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 16)
        self.down = nn.Linear(16, DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


def batch(index: int) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, DIM, generator=torch.Generator().manual_seed(index))


def data_index(mesh: DeviceMesh, dims: tuple[str, ...]) -> tuple[int, int]:
    """Return this rank's position along the data dims and their size."""
    index, total = 0, 1
    for dim in dims:
        index = index * mesh[dim].size() + mesh.get_local_rank(dim)
        total *= mesh[dim].size()
    return index, total


def reference_grads(total: int, model: nn.Module) -> dict[str, Tensor]:
    """Return the mean over the data ranks of the unsharded model's gradients."""
    model = copy.deepcopy(model)
    loss = sum(model(batch(index)).square().mean() for index in range(total)) / total
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def apply_tp(model: Net, mesh: DeviceMesh, sequence: bool) -> None:
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan)


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.grad.full_tensor()
        for name, param in model.named_parameters()
        if isinstance(param.grad, DTensor)
    }


def tensor_parallel(
    rank: int,
    world_size: int,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    whole_mesh: bool,
    sequence: bool,
    reshard: bool | int,
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = tuple(name for name in names if name != "tp")
    model = build(Net)
    assert isinstance(model, Net)
    index, total = data_index(mesh, data)
    expected = reference_grads(total, model)
    apply_tp(model, mesh["tp"], sequence)
    fully_shard(model, mesh=mesh if whole_mesh else mesh[data], reshard_after_forward=reshard)
    assert isinstance(model, HSDPModule)
    params = {p.fqn: p for p in model.hsdp_params()}
    up = params["up.weight"]
    tp_before = up.sharded_param.placements[-1]
    seen: list[Any] = []
    model.up.register_forward_pre_hook(lambda m, _: seen.append(m.weight))
    x = batch(index)
    if sequence:
        x = distribute_tensor(x, mesh["tp"], [Shard(1)], src_data_rank=None)
    model(x).square().mean().backward()
    model.check_replicas()  # bit for bit, over tp too
    weight = seen[0]
    assert isinstance(weight, DTensor), "forward sees the TP placement"
    assert weight.device_mesh == mesh["tp"] and weight.placements == (Shard(0),)
    assert up.sharded_param.placements[-1] == tp_before == Shard(0)
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=2e-6, msg=name)
    assert set(full_grads(model)) == set(expected)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), dict(build(Net).named_parameters())[name]), name


@pytest.mark.dist
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("whole_mesh", [False, True])
def test_two_dims_with_tp(whole_mesh: bool, sequence: bool) -> None:
    run_ranks(tensor_parallel, 4, ("dp", "tp"), (2, 2), whole_mesh, sequence, True)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "shape", "reshard"), [(4, (2, 1, 2), True), (4, (1, 2, 2), False)]
)
def test_three_dims_with_tp(world: int, shape: tuple[int, ...], reshard: bool) -> None:
    names = ("dp_replicate", "dp_shard", "tp")
    run_ranks(tensor_parallel, world, names, shape, True, True, reshard)


def integer_reshard(rank: int, world_size: int) -> None:
    tensor_parallel(rank, world_size, ("dp", "tp"), (4, 1), False, False, 2)


@pytest.mark.dist
def test_integer_reshard_of_tp_parameters() -> None:
    run_ranks(integer_reshard, 4)


def unshard_keeps(rank: int, world_size: int) -> tuple[str, str, str]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "ep"))
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(
        distribute_tensor(torch.zeros(8, 4), mesh["tp", "ep"], [Shard(0), Shard(1)])
    )
    fully_shard(model, mesh=mesh)
    assert isinstance(model, HSDPModule)
    (param,) = model.hsdp_params()
    before = format_placements(param.sharded_param.placements)
    model.unshard()
    weight = model.weight
    assert isinstance(weight, DTensor) and weight.to_local().shape == (8, 2)
    during = format_placements(weight.placements)
    model.reshard()
    return before, during, format_placements(model.weight.placements)


@pytest.mark.dist
def test_unshard_changes_only_the_data_entry() -> None:
    for before, during, after in run_ranks(unshard_keeps, 4):
        assert before == after == "[S(0), S(0), S(1)]"
        assert during == "[S(0), S(1)]"


def experts(rank: int, world_size: int) -> None:
    """Cut experts over a dim whose ranks see different data: the mean is over all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep"))
    roles = {"shard": ("dp_shard", "ep"), "ep": "ep"}
    model = nn.Linear(4, 8)
    weight = torch.zeros(8, 4)
    model.weight = nn.Parameter(distribute_tensor(weight, mesh["ep"], [Shard(0)]))
    model.bias = nn.Parameter(torch.zeros(8))
    fully_shard(model, mesh=mesh, roles=roles)
    assert isinstance(model, HSDPModule)
    expert, dense = model.hsdp_params()
    assert (expert.rank_size, expert.shard_size, dense.shard_size) == (2, 2, 4)
    model.unshard()
    full, bias = expert.unsharded_param, dense.unsharded_param
    local = full.to_local()  # type: ignore[attr-defined]
    # Every rank's tokens reach the experts: the term is already summed over ep.
    term = sum(10.0 ** (2 * mesh.get_local_rank("dp_shard") + e) for e in range(2))
    full.grad = DTensor.from_local(torch.full_like(local, term), mesh["ep"], [Shard(0)])
    bias.grad = torch.full((8,), 10.0**rank)
    unit = model._hsdp_unit_state
    unit.post_backward()
    unit.context.finish_reductions()
    mean = (1 + 10 + 100 + 1000) / 4
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((8, 4), mean))
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((8,), mean))


@pytest.mark.dist
def test_mean_over_a_batch_dim_that_cuts_experts() -> None:
    run_ranks(experts, 4)


def pure_tp(rank: int, world_size: int, enable: bool | None) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build(Net)
    assert isinstance(model, Net)
    expected = reference_grads(1, model)
    apply_tp(model, mesh, False)
    fully_shard(model, mesh=mesh, enable_param_shard=enable)
    assert isinstance(model, HSDPModule)
    for param in model.hsdp_params():
        assert (param.rank_size, param.shard_size, param.dp_size) == (1, 1, 1)
        assert param.plan.reduction == "none"
    with count_collectives() as calls:
        model(batch(0)).square().mean().backward()
    model.check_replicas()
    assert "reduce_scatter" not in calls.kinds() and "all_gather" not in calls.kinds()
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=2e-6, msg=name)
    assert set(full_grads(model)) == set(expected)


@pytest.mark.dist
@pytest.mark.parametrize("enable", [None, False])
def test_pure_tp_has_no_data_domain(enable: bool | None) -> None:
    run_ranks(pure_tp, 2, enable)


def sharding_off(rank: int, world_size: int) -> None:
    """The seed's compatible path: the mesh is the data domain, and nothing is cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(Net)
    assert isinstance(model, Net)
    index, total = data_index(mesh, ("dp",))
    expected = reference_grads(total, model)
    apply_tp(model, mesh["tp"], False)
    fully_shard(model, mesh=mesh, enable_param_shard=False)
    assert isinstance(model, HSDPModule)
    for param in model.hsdp_params():
        assert (param.shard_size, param.dp_size) == (1, 2)
        assert param.local_tensor.shape == param.plan.local_shape
    with count_collectives() as calls:
        model(batch(index)).square().mean().backward()
    groups = calls.by_group()
    replicas = (rank % 2, rank % 2 + 2)
    assert groups["all_reduce", replicas] == 1
    assert {kind for kind, ranks in groups if ranks == replicas} == {"all_reduce"}
    assert "reduce_scatter" not in calls.kinds()
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.dist
def test_sharding_off_reduces_over_the_unsharded_group() -> None:
    run_ranks(sharding_off, 4)


def inferred(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(Net)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, HSDPModule)
    for param in model.hsdp_params():
        assert (param.shard_size, param.dp_size) == (2, 1)
        assert param.plan.reduction == "RS"


@pytest.mark.dist
def test_a_full_mesh_is_not_taken_for_pure_tp() -> None:
    run_ranks(inferred, 4)


def partial_sums(rank: int, world_size: int) -> list[float]:
    """bfloat16 terms of a tensor-parallel sum, reduced in float32."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    model = nn.LayerNorm(4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, HSDPModule)
    model.unshard()
    (param,) = model.hsdp_params()
    from torch.distributed.tensor import Partial

    term = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    param.unsharded_param.grad = DTensor.from_local(term, mesh["tp"], [Partial()])
    unit = model._hsdp_unit_state
    unit.post_backward()
    unit.context.finish_reductions()
    return model.weight.grad.full_tensor().tolist()


@pytest.mark.dist
def test_a_partial_sum_is_cast_before_it_is_summed() -> None:
    assert run_ranks(partial_sums, 4) == [[259.0] * 4] * 4


def names_in_any_order(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "dp_replicate"))
    model = build(Net)
    index, total = data_index(mesh, ("dp_shard", "dp_replicate"))
    expected = reference_grads(total, model)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, HSDPModule)
    (first, *_) = model.hsdp_params()
    assert first.sharded_param.placements == (Shard(0), Replicate())
    with count_collectives() as calls:
        model(batch(index)).square().mean().backward()
    groups = calls.by_group()
    assert groups["reduce_scatter", (rank % 2, rank % 2 + 2)] == 1
    assert groups["all_reduce", (0, 1) if rank < 2 else (2, 3)] == 1
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.dist
def test_mesh_dims_in_the_other_order() -> None:
    run_ranks(names_in_any_order, 4)


def context_parallel(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    model = build(Net)
    expected = reference_grads(4, model)
    fully_shard(model, mesh=mesh, roles={"shard": ("dp_shard", "cp")})
    assert isinstance(model, HSDPModule)
    (first, *_) = model.hsdp_params()
    assert (first.shard_size, first.dp_size) == (2, 2)
    model(batch(rank)).square().mean().backward()
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.dist
def test_hybrid_sharding_with_context_parallel() -> None:
    run_ranks(context_parallel, 4)
