"""HSDPParam by itself: states, storage, uneven slices, and what is not allowed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel import (
    HSDPParam,
    MeshLayout,
    MixedPrecisionPolicy,
    PlacementError,
    Policy,
    ShardedState,
    ShardedStateError,
    plan_param,
)
from hyper_parallel.fully_shard.slice import ParamSlot
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh


def make(
    value: Tensor,
    *,
    shape: tuple[int, ...] | None = None,
    dim: int = 0,
    mp_policy: MixedPrecisionPolicy | None = None,
    slots: tuple[ParamSlot, ...] = (),
    enable: bool | None = None,
) -> HSDPParam:
    mesh = data_mesh(shape)
    layout = MeshLayout.from_mesh(mesh)
    policy = Policy(shard_placement_fn=lambda _: Shard(dim), enable_param_shard=enable)
    param = nn.Parameter(value)
    plan = plan_param("weight", param, layout=layout, policy=policy)
    return HSDPParam(param, plan, mesh, layout, mp_policy, slots=slots)


def gather(param: HSDPParam) -> None:
    """Gather one parameter by hand, through its own methods only."""
    (sent,) = param.all_gather_inputs
    info = param.sharded_group_info
    gathered = sent.new_empty(info.rank_size * sent.numel())
    dist.all_gather_into_tensor(gathered, sent, group=info.group)
    param.init_all_gather_outputs()
    param.alloc_all_gather_outputs()
    assert param.geometry is not None
    param.geometry.copy_out(gathered.view(info.rank_size, -1), param.all_gather_outputs[0])
    param.init_unsharded_param()
    param.to_unsharded()


def states(rank: int, world_size: int) -> None:
    value = torch.arange(21.0).reshape(7, 3)
    module = nn.Linear(3, 7, bias=False)
    param = make(value, slots=(ParamSlot(module, "weight"),))
    assert param.sharded_state is ShardedState.SHARDED
    assert module.weight is param.sharded_param
    with pytest.raises(ShardedStateError, match="weight: it has no unsharded parameter before"):
        _ = param.unsharded_param
    with pytest.raises(ShardedStateError, match="to_unsharded needs gathered data"):
        param.to_unsharded()
    with pytest.raises(ShardedStateError, match="needs state UNSHARDED, it is SHARDED"):
        param.to_sharded_post_forward()
    gather(param)
    full = param.unsharded_param
    assert param.sharded_state is ShardedState.UNSHARDED
    assert module.weight is full and torch.equal(full, value)
    with pytest.raises(ShardedStateError, match="SHARDED or SHARDED_POST_FORWARD, it is UNSHARDED"):
        _ = param.all_gather_inputs
    with pytest.raises(ShardedStateError, match="integer reshard_after_forward"):
        param.to_sharded_post_forward()
    view = full.detach()[2:]
    param.to_sharded()
    assert param.sharded_state is ShardedState.SHARDED
    assert module.weight is param.sharded_param
    assert full.untyped_storage().nbytes() == 0 == view.untyped_storage().nbytes()
    with pytest.raises(ShardedStateError, match="to_unsharded needs gathered data"):
        param.to_unsharded()
    version = full._version
    gather(param)
    assert param.unsharded_param is full, "the object is kept"
    assert torch.equal(view, value[2:]), "views see the data again"
    assert isinstance(version, int)
    param.to_sharded()


@pytest.mark.dist
def test_states_and_storage() -> None:
    run_ranks(states, 2)


def every_cut(rank: int, world_size: int, shape: tuple[int, ...] | None) -> None:
    for size in [(8, 6), (7, 5), (3, 4), (1, 2), (5, 0), (10, 3)]:
        for dim in (0, 1, -1):
            value = torch.arange(float(size[0] * size[1])).reshape(size)
            param = make(value, shape=shape, dim=dim)
            sharded = param.sharded_param
            assert isinstance(sharded, DTensor) and tuple(sharded.shape) == size
            assert torch.equal(sharded.full_tensor(), value), (size, dim)
            if param.geometry is None:
                continue
            gather(param)
            assert torch.equal(param.unsharded_param, value), (size, dim)
            wire = param.geometry.gradient_wire(value + 1)
            rows = -(-wire.shape[0] // param.shard_size)
            padded = torch.zeros(rows * param.shard_size, *wire.shape[1:])
            padded[: wire.shape[0]] = wire
            mine = padded.unflatten(0, (param.shard_size, rows))[param.shard_index]
            local = param.geometry.local_of_wire(mine.reshape(-1))
            expected = param.geometry.take(value + 1)
            assert torch.equal(local, expected), (size, dim)


@pytest.mark.dist
@pytest.mark.parametrize(("world", "shape"), [(2, None), (3, None), (4, (2, 2))])
def test_every_uneven_cut_on_every_dim(world: int, shape: tuple[int, ...] | None) -> None:
    run_ranks(every_cut, world, shape)


def flattened_axis(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    layout = MeshLayout.from_mesh(mesh, {"shard": ("dp_shard", "cp")})
    for dim, size in [(0, (10, 3)), (1, (3, 10)), (0, (5, 2)), (0, (2, 2))]:
        value = torch.arange(float(size[0] * size[1])).reshape(size)
        policy = Policy(shard_placement_fn=lambda _, d=dim: Shard(d))
        plan = plan_param("w", value, layout=layout, policy=policy)
        param = HSDPParam(nn.Parameter(value), plan, mesh, layout)
        assert param.shard_size == 4 and param.dp_size == 1
        assert torch.equal(param.sharded_param.full_tensor(), value)
        gather(param)
        assert torch.equal(param.unsharded_param, value), (dim, size)


@pytest.mark.dist
def test_hierarchical_padding_inside_the_wire() -> None:
    run_ranks(flattened_axis, 4)


def sizes_and_groups(rank: int, world_size: int) -> None:
    param = make(torch.zeros(8, 2), shape=(2, 2))
    assert (param.rank_size, param.shard_size, param.dp_size) == (4, 2, 2)
    assert param.sharded_group_info.rank_size == param.unsharded_group_info.rank_size == 2
    pair = [0, 1] if rank < 2 else [2, 3]
    assert dist.get_process_group_ranks(param.sharded_group_info.group) == pair
    assert dist.get_process_group_ranks(param.unsharded_group_info.group) == [
        rank % 2,
        rank % 2 + 2,
    ]
    whole = make(torch.zeros(8, 2), shape=(2, 2), enable=False)
    assert (whole.rank_size, whole.shard_size, whole.dp_size) == (4, 1, 4)
    assert whole.sharded_group_info.group is None
    assert whole.unsharded_group_info.rank_size == 4
    assert whole.local_tensor.shape == (8, 2)
    whole.init_unsharded_param()
    whole.to_unsharded()
    assert whole.unsharded_param.data_ptr() == whole.local_tensor.data_ptr(), "no copy"


@pytest.mark.dist
def test_sizes_and_groups_are_the_plan_s() -> None:
    run_ranks(sizes_and_groups, 4)


def gradients_accumulate(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    param = make(torch.zeros(4), mp_policy=policy)
    gather(param)
    full = param.unsharded_param
    assert full.dtype == torch.bfloat16 and param.reduce_dtype == torch.float32
    for value in (256.0, *[1.0] * 8):
        (full * value).sum().backward()
        param.accumulate_unsharded_grad_if_needed()
        param.to_accumulated_grad_if_needed()
        assert full.grad is None
    accumulated = param.unsharded_accumulated_grad
    assert accumulated is not None and accumulated.dtype == torch.float32
    assert accumulated.tolist() == [264.0] * 4  # bfloat16 would stay at 256
    assert param.has_gradient and param.take_gradient() is accumulated
    assert not param.has_gradient and param.take_gradient() is None


@pytest.mark.dist
def test_gradients_accumulate_in_the_reduce_dtype() -> None:
    run_ranks(gradients_accumulate, 2)


def adopted(rank: int, world_size: int) -> None:
    first = make(torch.arange(10.0).reshape(5, 2))
    again = HSDPParam(
        first.sharded_param, first.plan, first.mesh, first.layout, already_sharded=True
    )
    assert again.sharded_param is first.sharded_param
    gather(again)
    assert torch.equal(again.unsharded_param, torch.arange(10.0).reshape(5, 2))
    with pytest.raises(PlacementError, match="weight: expected a DTensor with placements"):
        HSDPParam(nn.Parameter(torch.zeros(5, 2)), first.plan, first.mesh, already_sharded=True)
    with pytest.raises(PlacementError, match=r"the plan is for shape \(5, 2\), got \(4, 2\)"):
        HSDPParam(nn.Parameter(torch.zeros(4, 2)), first.plan, first.mesh)
    rows = first.plan.shard_shape[0]
    with pytest.raises(PlacementError, match=rf"slice has shape \({rows}, 2\), got \(9, 2\)"):
        first.to_sharded_dtensor(torch.zeros(9, 2))
    full = torch.rand(5, 2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.shard_like(full).full_tensor(), full)


@pytest.mark.dist
def test_a_sharded_parameter_is_taken_as_it_is() -> None:
    run_ranks(adopted, 2)


def synced(rank: int, world_size: int) -> list[float]:
    param = make(torch.full((4,), float(rank)), shape=(2, 1))
    param.sync_weights()
    return param.local_tensor.tolist()


@pytest.mark.dist
def test_sync_weights_takes_the_first_replica() -> None:
    assert run_ranks(synced, 2) == [[0.0] * 4] * 2
