"""Parameters that are not the usual floats: complex, float64, float8, integers, booleans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hyper_parallel
from hyper_parallel import (
    CPUOffloadPolicy,
    HSDPModule,
    MixedPrecisionPolicy,
    PolicyError,
    fully_shard,
)
from tests.baselines import full
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh
from tests.models import build


class Complex(nn.Module):
    """A complex layer beside real parameters; its last weight is not always used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(3, dtype=dtype))
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.scale = nn.Parameter(torch.randn(3, dtype=dtype.to_real()))
        self.frozen = nn.Parameter(torch.randn(7, dtype=dtype), requires_grad=False)
        self.rare = nn.Parameter(torch.randn(4, 2, dtype=dtype))

    def forward(self, x: Tensor, rare: bool = True) -> Tensor:
        y = (x @ self.weight + self.bias.conj()) * self.phase
        y = y.abs() * self.scale + self.frozen.real.sum() * y.imag
        return y + self.rare.imag.sum() if rare else y


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = Complex(dtype), Complex(dtype)

    def forward(self, x: Tensor, rare: bool = True) -> Tensor:
        return self.first(x, rare) + self.second(x, rare)


def make(dtype: torch.dtype) -> nn.Module:
    return build(Layers, dtype)


def batch(rank: int, index: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(17 * rank + index)
    return torch.randn(4, 5, dtype=dtype, generator=generator)


def run_complex(
    rank: int, world_size: int, shape: tuple[int, ...], settings: dict[str, Any], how: str
) -> None:
    dtype = torch.complex128 if how == "double" else torch.complex64
    plain, model = make(dtype), make(dtype)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=data_mesh(shape), **settings)
    assert isinstance(model, HSDPModule)
    if how == "fill":
        model.set_reduce_scatter_unused_params(True)
    if how == "sum":
        model.set_reduce_op_type("sum")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.5) for m in (plain, model)]
    for step in range(2):
        for micro in range(2):
            model.set_requires_gradient_sync(how != "accumulate" or micro == 1)
            model.set_requires_all_reduce(how not in ("accumulate", "deferred") or micro == 1)
            rare = how != "fill" or rank == 0
            x = batch(rank, 2 * step + micro, dtype)
            for module in (plain, model):
                module(x, rare).square().sum().backward()
        for param in plain.parameters():
            if param.requires_grad:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad = grad.resolve_conj()
                dist.all_reduce(param.grad)
                if how != "sum":
                    param.grad /= world_size
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if other.grad is None:
                assert param.grad is None, name
                continue
            assert isinstance(param.grad, DTensor) and param.grad.dtype == other.dtype
            assert other.grad.count_nonzero()
            torch.testing.assert_close(
                full(param.grad), other.grad, rtol=2e-5, atol=2e-6, msg=lambda t, n=name: f"{n} {t}"
            )
        norms = [
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0),
            hyper_parallel.clip_grad_norm_(model.parameters(), 1.0),
        ]
        torch.testing.assert_close(full(norms[1]), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), other, rtol=2e-5, atol=2e-6)
    state = {name: full(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(full(p), state[name]) for name, p in model.named_parameters())


def last_of_two(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


FLOAT64 = MixedPrecisionPolicy(reduce_dtype=torch.float64)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "two ranks": ((2,), {}, ""),
    "uneven": ((3,), {}, ""),
    "one rank": ((1,), {}, ""),
    "hybrid": ((2, 2), {}, ""),
    "replicas": ((2, 1), {}, ""),
    "dim 1": ((2,), {"shard_placement_fn": last_of_two}, ""),
    "kept": ((2,), {"reshard_after_forward": False}, ""),
    "group of 2": ((4,), {"reshard_after_forward": 2}, ""),
    "complex128": ((2,), {}, "double"),
    "reduced in float64": ((2,), {"mp_policy": FLOAT64}, "accumulate"),
    "offload": ((2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, ""),
    "accumulated": ((2, 2), {}, "accumulate"),
    "deferred": ((2, 2), {}, "deferred"),
    "unused on a rank": ((2, 2), {}, "fill"),
    "summed": ((2, 2), {}, "sum"),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_complex_parameters(name: str) -> None:
    shape, settings, how = CASES[name]
    ranks = 1
    for size in shape:
        ranks *= size
    run_ranks(run_complex, ranks, shape, settings, how)


def complex_beside_fsdp2(rank: int, world_size: int) -> None:
    """Only complex parameters and no scalar: PyTorch's refuses both."""

    def layers() -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 6, dtype=torch.complex64), nn.Linear(6, 5, dtype=torch.complex64)
        )

    ours, theirs = build(layers), build(layers)
    mesh = init_device_mesh("cpu", (world_size,))
    for our, their in ((ours[0], theirs[0]), (ours[1], theirs[1]), (ours, theirs)):
        fully_shard(our, mesh=data_mesh())
        torch_fully_shard(their, mesh=mesh)
    x = batch(rank, 0, torch.complex64)
    for module in (ours, theirs):
        module(x).abs().square().sum().backward()
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert full(other.grad).count_nonzero()
        assert torch.equal(full(param.grad), full(other.grad))


@pytest.mark.dist
def test_complex_gradients_are_those_of_fsdp2() -> None:
    run_ranks(complex_beside_fsdp2, 2)


def complex_partial(rank: int, world_size: int) -> None:
    """Terms that tensor parallelism leaves on a replicated complex parameter are summed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.real = nn.Parameter(torch.randn(4))

        def forward(self, x: Any) -> Any:
            return x * self.weight * self.real

    plain, model = build(Scale), build(Scale)
    for name in ("weight", "real"):
        placed = distribute_tensor(getattr(model, name).detach(), mesh["tp"], [Replicate()])
        setattr(model, name, nn.Parameter(placed))
    fully_shard(model, mesh=mesh)
    x = batch(rank // 2, 0, torch.complex64)[:, :4]
    plain(x).abs().square().sum().backward()
    model(distribute_tensor(x, mesh["tp"], [Shard(0)])).to_local().abs().square().sum().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(other.grad, group=mesh["dp_shard"].get_group())
        torch.testing.assert_close(full(param.grad), other.grad / 2, rtol=2e-5, atol=2e-6)


@pytest.mark.dist
def test_partial_complex_gradients() -> None:
    run_ranks(complex_partial, 4)


class Frozen(nn.Module):
    """A frozen parameter of a dtype, alone or beside a trained one."""

    def __init__(self, dtype: torch.dtype, beside: bool) -> None:
        super().__init__()
        values = torch.arange(15).reshape(5, 3)
        values = values % 2 == 1 if dtype is torch.bool else values.to(dtype)
        self.table = nn.Parameter(values, requires_grad=False)
        self.weight = nn.Parameter(torch.randn(3, 5)) if beside else None

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.table.to(torch.float32)
        return y if self.weight is None else y.to(self.weight.dtype) @ self.weight


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.float64,
    torch.complex64,
]


def frozen(rank: int, world_size: int, beside: bool, policy: MixedPrecisionPolicy) -> None:
    for dtype in DTYPES:
        plain, model = build(Frozen, dtype, beside), build(Frozen, dtype, beside)
        fully_shard(model, mesh=data_mesh(), mp_policy=policy)
        low = dtype.is_floating_point and policy.param_dtype is not None
        for step in range(2):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank + 2 * step))
            ours, theirs = model(x), plain(x)
            if not low and not (beside and policy.param_dtype):
                assert torch.equal(ours, theirs), dtype
            if beside:
                for output in (ours, theirs):
                    output.float().sum().backward()
                dist.all_reduce(plain.weight.grad)
                expected = plain.weight.grad / world_size
                tolerance = 2e-5 if policy.param_dtype is None else 2e-2
                torch.testing.assert_close(
                    full(model.weight.grad), expected, rtol=tolerance, atol=tolerance
                )
                for module in (model, plain):
                    module.zero_grad()
        model.reshard()
        assert model.table.dtype == dtype
        assert model.table.grad is None
        state = model.state_dict()["table"].to_local()
        expected = torch.chunk(plain.table.view(torch.uint8), world_size)[rank]
        assert torch.equal(state.view(torch.uint8), expected), dtype


@pytest.mark.dist
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("low", [True, False])
def test_frozen_parameters_of_every_dtype(beside: bool, low: bool) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None,
        reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False,
    )
    run_ranks(frozen, 2, beside, policy)


def doubles(rank: int, world_size: int) -> None:
    plain, model = build(nn.Linear, 5, 3).double(), build(nn.Linear, 5, 3).double()
    fully_shard(model, mesh=data_mesh())
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for module in (plain, model):
        module(x).square().sum().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(other.grad)
        torch.testing.assert_close(full(param.grad), other.grad / world_size, rtol=1e-12, atol=0)


@pytest.mark.dist
def test_float64_is_reduced_in_float64() -> None:
    run_ranks(doubles, 2)


def irreducible(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    weight = model[0].weight
    with pytest.raises(PolicyError, match=r"0\.weight: its gradient would be reduced in torch.flo"):
        fully_shard(
            model, mesh=data_mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float8_e5m2)
        )
    assert model[0].weight is weight and not isinstance(model, HSDPModule)
    model[0].weight = nn.Parameter(weight.detach().to(torch.float8_e4m3fn))
    with pytest.raises(PolicyError, match=r"float8_e4m3fn, which collectives cannot sum; pass"):
        fully_shard(model, mesh=data_mesh())
    model[0].weight.requires_grad_(False)
    fully_shard(model, mesh=data_mesh())


@pytest.mark.dist
def test_gradients_that_cannot_be_summed_are_refused() -> None:
    run_ranks(irreducible, 2)
