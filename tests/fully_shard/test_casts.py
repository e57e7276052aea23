"""Mixed precision where units meet: inputs, outputs, recomputation, norms, and changed dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import MixedPrecisionPolicy, fully_shard
from tests.baselines import full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh
from tests.models import build, vector_batch

HALF = torch.float16
LOW = torch.bfloat16


class Recorder(nn.Linear):
    """A linear layer that remembers the dtypes of its inputs."""

    def __init__(self, size: int = 6) -> None:
        super().__init__(size, size)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        self.seen += [tensor.dtype for tensor in more]
        return super().forward(x)


class Pair(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.first, self.second = Recorder(), Recorder()
        self.cast = cast
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        x = self.first(x)
        return self.second(x.to(self.second.weight.dtype) if self.cast else x)


def half_of_a_model(rank: int, world_size: int) -> None:
    """float16 in one unit: the unit casts, the user's module casts, the unit before casts."""
    cases: list[tuple[str, bool, MixedPrecisionPolicy, list[torch.dtype]]] = [
        ("second", False, MixedPrecisionPolicy(param_dtype=HALF), [torch.float32, HALF]),
        (
            "second",
            True,
            MixedPrecisionPolicy(param_dtype=HALF, cast_forward_inputs=False),
            [torch.float32, torch.float32],
        ),
        (
            "first",
            False,
            MixedPrecisionPolicy(param_dtype=HALF, output_dtype=torch.float32),
            [HALF, torch.float32],
        ),
    ]
    for name, cast, policy, expected in cases:
        model = build(Pair, cast)
        unit = getattr(model, name)
        fully_shard(unit, mesh=data_mesh(), mp_policy=policy)
        fully_shard(model, mesh=data_mesh())
        if cast:  # its weight is the float32 slice here; forward sees the float16 one
            unit.register_forward_pre_hook(lambda m, args: tuple(a.to(HALF) for a in args))
        model(vector_batch(rank, 0)[0]).sum().backward()
        assert model.seen == [torch.float32]
        found = [model.first.seen[0], model.second.seen[0]]
        assert found == ([torch.float32, HALF] if cast else expected)
        for param in model.parameters():
            assert param.grad is not None and param.grad.dtype == torch.float32


@pytest.mark.dist
def test_float16_in_one_unit() -> None:
    run_ranks(half_of_a_model, 2)


class External(nn.Module):
    """The inner unit gets a float32 tensor that is not from the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Recorder(), Recorder()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.second(self.first(x), torch.ones(2))


def external_inputs(rank: int, world_size: int, cast: bool) -> None:
    model = build(External)
    policy = MixedPrecisionPolicy(param_dtype=HALF)
    inner = dataclasses.replace(policy, cast_forward_inputs=cast)
    fully_shard(model.second, mesh=data_mesh(), mp_policy=inner)
    fully_shard(model, mesh=data_mesh(), mp_policy=policy)
    model(vector_batch(rank, 0)[0]).sum().backward()
    assert model.seen == model.first.seen == [HALF]
    assert model.second.seen == [HALF, HALF if cast else torch.float32]


@pytest.mark.dist
@pytest.mark.parametrize("cast", [True, False])
def test_inputs_from_outside_a_unit(cast: bool) -> None:
    run_ranks(external_inputs, 2, cast)


class Recomputed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = Recorder()
        self.dtype = dtype
        self.outputs: list[torch.dtype] = []

    def _inner(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.outputs.append(x.dtype)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._inner, x.to(self.dtype), use_reentrant=False, early_stop=False)
        return x.float().sum()


def recomputation(rank: int, world_size: int, what: str) -> None:
    cast = what == "input"
    policy = MixedPrecisionPolicy(
        param_dtype=LOW,
        reduce_dtype=LOW,
        output_dtype=None if cast else torch.float32,
        cast_forward_inputs=cast,
    )
    model = build(Recomputed, torch.float32 if cast else LOW)
    fully_shard(model.inner, mesh=data_mesh(), mp_policy=policy)
    fully_shard(model, mesh=data_mesh(), mp_policy=policy)
    model(vector_batch(rank, 0)[0]).backward()
    assert model.inner.seen == [LOW, LOW]
    assert model.outputs == [LOW if cast else torch.float32] * 2
    assert full(model.inner.weight.grad).count_nonzero()


@pytest.mark.dist
@pytest.mark.parametrize("what", ["input", "output"])
def test_recomputation_casts_like_forward(what: str) -> None:
    run_ranks(recomputation, 2, what)


def norms(rank: int, world_size: int, dtype: torch.dtype) -> None:
    low = MixedPrecisionPolicy(param_dtype=dtype)
    kept = MixedPrecisionPolicy(output_dtype=dtype)  # float32 inside
    flat, image = torch.randn(4, 8), torch.randn(3, 1, 9, 9)
    cases: list[tuple[list[nn.Module], Tensor, MixedPrecisionPolicy, bool]] = [
        ([nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)], flat, low, False),
        ([nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)], flat, low, False),
        ([nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)], image, low, False),
        ([nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)], image, low, True),
        ([nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)], image, kept, False),
    ]
    for modules, x, policy, low_buffers in cases:
        model = nn.Sequential(*modules)
        fully_shard(model[1], mesh=data_mesh(), mp_policy=policy)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=data_mesh(), mp_policy=low)
        if low_buffers:
            model[1].running_mean = model[1].running_mean.to(dtype)
            model[1].running_var = model[1].running_var.to(dtype)
        elif not isinstance(model[1], nn.LayerNorm):
            assert model[1].running_mean.dtype == torch.float32, "buffers are not cast"
            if policy is low:  # which plain torch refuses on the CPU, too
                with pytest.raises(RuntimeError, match="but found Float"):
                    model(x)
                continue
        out = model(x)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        for name, param in model.named_parameters():
            assert param.grad is not None and full(param.grad).isfinite().all(), name


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_low_precision(dtype: torch.dtype) -> None:
    run_ranks(norms, 2, dtype)


def reduced_in(calls: Any) -> set[torch.dtype]:
    return {call.dtype for call in calls if call.kind == "reduce_scatter"}


def changed_dtype(rank: int, world_size: int) -> None:
    """The reduce dtype is the policy's, also after the model is cast."""
    model = nn.Sequential(*(build(nn.Linear, 6, 6, dtype=LOW, seed=i) for i in range(2)))
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=LOW)
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh(), mp_policy=policy)
    model.to(torch.float32)
    with count_collectives() as calls:
        model(vector_batch(rank, 0)[0]).sum().backward()
    assert reduced_in(calls) == {LOW}
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


@pytest.mark.dist
def test_the_reduce_dtype_after_a_cast_of_the_model() -> None:
    run_ranks(changed_dtype, 2)


class WithInteger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.steps = nn.Parameter(torch.ones(6, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def frozen_first(rank: int, world_size: int) -> None:
    model = build(WithInteger)
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    fully_shard(model, mesh=data_mesh(), mp_policy=policy)
    model.requires_grad_(False)
    x = vector_batch(rank, 0)[0]
    with torch.no_grad():
        assert model(x).dtype == LOW
    model.layers.requires_grad_(True)
    with count_collectives() as calls:
        model(x).sum().backward()
    assert reduced_in(calls) == {torch.float32}
    for name, param in model.named_parameters():
        assert param.requires_grad is (name != "steps"), "set while the full one was registered"
        assert (param.grad is None) == (name == "steps")
        assert param.grad is None or param.grad.dtype == torch.float32


@pytest.mark.dist
def test_the_reduce_dtype_after_a_frozen_first_forward() -> None:
    run_ranks(frozen_first, 2)


@dataclasses.dataclass
class Inner:
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Outer:
    inner: Inner
    z: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Structured(nn.Module):
    """Applies one layer to every tensor of a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.tanh(self.layer(value))
        if isinstance(value, Outer):
            return Outer(self.forward(value.inner), self.forward(value.z))
        return type(value)(self.forward(value.x), self.forward(value.y))


def structures(rank: int, world_size: int, kind: str, low: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(build(Structured, seed=i) for i in range(3)))

    def loss_of(model: nn.Module, dtype: torch.dtype) -> Tensor:
        x = vector_batch(rank, 0)[0].to(dtype)
        pair = (x, x.clone())
        value: Any = {"flat": Inner(*pair), "named": Named(*pair)}.get(kind)
        out = model(Outer(Inner(*pair), x + 1) if value is None else value)
        assert type(out) is {"flat": Inner, "named": Named, "nested": Outer}[kind]
        if isinstance(out, Outer):
            return (out.inner.x * out.inner.y).sum() + out.z.sum()
        return (out.x * out.y).sum()

    plain, model = make(), make()
    policy = MixedPrecisionPolicy(
        param_dtype=LOW if low else None, reduce_dtype=torch.float32 if low else None
    )
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh(), mp_policy=policy, reshard_after_forward=True)
    if low:
        plain.to(LOW)
    losses = [loss_of(m, torch.float32 if m is model or not low else LOW) for m in (plain, model)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert other.grad is not None and param.grad.dtype == torch.float32
        mean = other.grad.float()
        dist.all_reduce(mean)
        close = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 2e-5, "atol": 2e-6}
        torch.testing.assert_close(full(param.grad), mean / world_size, **close, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", ["flat", "nested", "named"])
def test_structures_between_units(kind: str, low: bool) -> None:
    run_ranks(structures, 2, kind, low)
