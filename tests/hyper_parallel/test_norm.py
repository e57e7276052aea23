"""Total norms and clipping against the norm of the full tensors, for every mix of placements."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import hyper_parallel
from hyper_parallel import clip_grad_norm_, get_total_norm
from hyper_parallel.torch_compat.distributed import strided_shard
from tests.dist_pool import run_ranks

NORMS = [1.0, 2.0, 3.0, math.inf]
PLACEMENTS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
    (Replicate(), Replicate()),
    (Shard(0), Shard(1)),
    (strided_shard(0, 2), Shard(0)),
]


def full_values(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    # 1 and 3 rows leave empty shards on a 2x2 mesh; the last has no elements at all.
    sizes = [(8, 6), (3, 5), (1, 4), (5, 2), (7, 3), (8, 2), (0, 3)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def mixed_norms(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    values = full_values(dtype)
    placements = [*PLACEMENTS, PLACEMENTS[0]]
    tensors: list[Tensor] = [
        distribute_tensor(value, mesh, placement)
        for value, placement in zip(values, placements, strict=True)
    ]
    tensors.append(values[0] * 2)  # plain, equal on all ranks
    inner = mesh["b"]
    tensors.append(distribute_tensor(values[1] * 3, inner, [Shard(0)]))
    result = {}
    for norm in NORMS:
        both = [get_total_norm(tensors, norm, foreach=foreach) for foreach in (True, False)]
        assert all(type(total) is Tensor and total.shape == () for total in both)
        result[str(norm)] = [total.item() for total in both]
    return result


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_total_norm_of_every_placement_mix(dtype: torch.dtype) -> None:
    values = [value.double() for value in full_values(dtype)]
    whole = [*values, values[0] * 2, (full_values(dtype)[1] * 3).double()]
    flat = torch.cat([value.flatten() for value in whole])
    results = run_ranks(mixed_norms, 4, dtype)
    assert all(result == results[0] for result in results), "the norm differs between ranks"
    for norm in NORMS:
        expected = torch.linalg.vector_norm(flat, norm).item()
        for value in results[0][str(norm)]:
            assert value == pytest.approx(expected, rel=2e-6), norm


def partial_and_local(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("a",))
    part = DTensor.from_local(torch.full((3,), float(rank + 1)), mesh, [Partial()])
    local = torch.full((2,), float(rank))  # a plain gradient that differs per rank
    shard = distribute_tensor(torch.zeros(1), mesh, [Shard(0)])
    return (
        [get_total_norm([part], p).item() for p in NORMS],
        [get_total_norm([shard, local], p).item() for p in (2.0, math.inf)],
    )


@pytest.mark.dist
def test_partial_is_summed_first_and_local_terms_agree() -> None:
    first, second = run_ranks(partial_and_local, 2)
    assert first == second
    summed, local = first
    expected = [torch.full((3,), 3.0).norm(p).item() for p in NORMS]
    assert summed == pytest.approx(expected, rel=1e-6)
    assert local == pytest.approx([1.0, 1.0])  # sqrt((0 + 2 * 1) / 2), and the largest


def clip_mixed(
    rank: int, world_size: int, norm: float, limit: float
) -> tuple[float, list[Tensor], list[bool]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    params = []
    for value, placement in zip(full_values()[:-1], PLACEMENTS, strict=True):
        param = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, placement))
        param.grad = distribute_tensor(value, mesh, placement)
        params.append(param)
    unused = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, PLACEMENTS[0]))
    total = clip_grad_norm_((p for p in [*params, unused]), limit, norm)
    grads = [param.grad for param in params]
    assert unused.grad is None
    kept = [isinstance(grad, DTensor) for grad in grads]
    return total.item(), [grad.full_tensor() for grad in grads if grad is not None], kept


@pytest.mark.dist
@pytest.mark.parametrize(("norm", "limit"), [(2.0, 1.0), (1.0, 5.0), (math.inf, 0.5), (2.0, 1e6)])
def test_clipping_equals_torch_on_full_tensors(norm: float, limit: float) -> None:
    params = []
    for value in full_values()[:-1]:
        param = nn.Parameter(torch.zeros_like(value))
        param.grad = value.clone()
        params.append(param)
    expected = nn.utils.clip_grad_norm_(params, limit, norm)
    results = run_ranks(clip_mixed, 4, norm, limit)
    assert len({total for total, _, _ in results}) == 1
    for total, grads, kept in results:
        assert total == pytest.approx(expected.item(), rel=2e-6)
        assert all(kept)
        for grad, param in zip(grads, params, strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=2e-6, atol=0)


def some_ranks_lack_gradients(rank: int, world_size: int) -> tuple[float, bool]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("a",))
    param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    if rank == 0:
        param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    return clip_grad_norm_([param], 1.0).item(), param.grad is None


@pytest.mark.dist
def test_rank_without_gradients_takes_part() -> None:
    results = run_ranks(some_ranks_lack_gradients, 2)
    assert [total for total, _ in results] == pytest.approx([math.sqrt(2.0)] * 2)
    assert [none for _, none in results] == [False, True]


def nonfinite(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("a",))
    value = torch.ones(4)
    value[0] = math.inf  # only rank 0 has it
    shard = distribute_tensor(value, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="non-finite") as error:
        get_total_norm([shard], error_if_nonfinite=True)
    return str(error.value)


@pytest.mark.dist
def test_nonfinite_total_raises_on_every_rank() -> None:
    assert len(run_ranks(nonfinite, 2)) == 2


@pytest.mark.parametrize("norm", [*NORMS, -math.inf])
def test_plain_tensors_need_no_process_group(norm: float) -> None:
    assert not dist.is_initialized()
    values = full_values()[:-1]
    expected = nn.utils.get_total_norm(values, norm)
    torch.testing.assert_close(get_total_norm(values, norm), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(get_total_norm(values[0], norm), values[0].norm(norm))
    assert get_total_norm([], norm).item() == 0.0
    assert clip_grad_norm_([], 1.0, norm).item() == 0.0


def test_signature_is_torch_s() -> None:
    import inspect

    for name in ("clip_grad_norm_", "get_total_norm"):
        ours = inspect.signature(getattr(hyper_parallel, name)).parameters
        theirs = inspect.signature(getattr(nn.utils, name)).parameters
        for mine, other in itertools.zip_longest(ours.values(), theirs.values()):
            assert (mine.name, mine.default) == (other.name, other.default), name
