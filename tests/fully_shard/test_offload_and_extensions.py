"""CPU offload, all-gather extensions, memory of full parameters, and policies for whole models."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from hyper_parallel import (
    CPUOffloadPolicy,
    HSDPModule,
    MixedPrecisionPolicy,
    PlacementError,
    Policy,
    PolicyError,
    ShardedStateError,
    fully_shard,
)
from hyper_parallel.fully_shard import fully_shard_by_policy
from tests.baselines import TrainOptions, assert_same, full, merge_ranks, train, train_unsharded
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard, train_eager
from tests.models import CASES, build

LM = CASES["lm"]
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


@pytest.mark.dist
@pytest.mark.parametrize("accumulate", [1, 2])
def test_offload_on_a_cpu_mesh_changes_nothing(accumulate: int) -> None:
    options = TrainOptions(steps=2, micro_batches=accumulate)
    plain = run_ranks(train_eager, 2, "lm", options)
    offloaded = run_ranks(
        train_eager, 2, "lm", options, {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    )
    for ours, theirs in zip(offloaded, plain, strict=True):
        assert_same(ours, theirs, rtol=0, atol=0)


def offload_errors(rank: int, world_size: int) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=data_mesh(), offload_policy=CPUOffloadPolicy())
    model.to_empty(device="meta")
    with pytest.raises(ShardedStateError, match="still on the meta device: weight, bias"):
        model(torch.zeros(1, 4))


@pytest.mark.dist
def test_offload_errors_name_parameters() -> None:
    run_ranks(offload_errors, 2)


class Wrapped(torch.Tensor):
    """A tensor subclass around a plain tensor that keeps its type through every op."""

    @staticmethod
    def __new__(cls, inner: Tensor, parts: int) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner: Tensor, parts: int) -> None:
        self.inner, self.parts = inner, parts

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["inner"], self.parts

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, parts: int, size: Any, stride: Any) -> Wrapped:
        return cls(tensors["inner"], parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = [2]

        def unwrap(tensor: Wrapped) -> Tensor:
            parts[0] = tensor.parts
            return tensor.inner

        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map_only(cls, unwrap, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        out = tree_map_only(Tensor, lambda t: cls(t, parts[0]), out)
        return return_and_correct_aliasing(func, args, kwargs, out)


class HalfGather(Wrapped):
    """A float32 slice that is gathered as bfloat16, or as a value and its scale."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        assert mesh.ndim == 1
        half = self.inner.to(torch.bfloat16)
        if self.parts == 1:
            return (half,), {"shape": self.shape}
        scale = torch.ones(1, dtype=torch.float32) * 2
        return (half / 2, scale), {"shape": self.shape}

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        assert metadata["shape"] == self.shape
        value = outputs[0].to(dtype)
        if self.parts == 2:
            value = value * outputs[1][0]
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(value)
            return None
        return value, (value,)


class NewSignature(HalfGather):
    """The signature with five arguments."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert isinstance(module, nn.Linear) and outer_stride == (outer_size[1], 1)
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        return super().fsdp_pre_all_gather(mesh)


class OnlyPre(Wrapped):
    """Half of the protocol, which is refused before the method could be called."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        raise NotImplementedError


def extended(rank: int, world_size: int, kind: type[HalfGather], parts: int) -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(6, 8)
    model.weight = nn.Parameter(kind(weight.clone(), parts))
    assert isinstance(fully_shard(model, mesh=data_mesh(), reshard_after_forward=True), HSDPModule)
    bias = full(model.bias)
    for index in range(2):
        with count_collectives() as calls:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank + 10 * index))
            out = model(x)
            expected = x @ weight.to(torch.bfloat16).float().T + bias
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            out.square().sum().backward()
        assert calls.kinds() == {"all_gather": 2, "reduce_scatter": 1}, "one gather for all parts"
        grad = model.weight.grad
        assert isinstance(grad, DTensor) and grad.to_local().abs().sum() > 0
        (param, _) = model.hsdp_params()
        assert param.unsharded_param.untyped_storage().nbytes() == 0
        model.zero_grad()


@pytest.mark.dist
@pytest.mark.parametrize("kind", [HalfGather, NewSignature])
@pytest.mark.parametrize("parts", [1, 2])
def test_all_gather_extension(kind: type[HalfGather], parts: int) -> None:
    run_ranks(extended, 2, kind, parts)


def incomplete(rank: int, world_size: int) -> None:
    model = nn.Linear(6, 8)
    model.weight = nn.Parameter(OnlyPre(torch.zeros(8, 6), 1))
    with pytest.raises(PlacementError, match="OnlyPre defines only one of fsdp_pre_all_gather"):
        fully_shard(model, mesh=data_mesh())
    model = nn.Linear(6, 7)
    model.weight = nn.Parameter(HalfGather(torch.zeros(7, 6), 1))
    fully_shard(model, mesh=data_mesh())
    if model.weight.to_local().shape[0] < 4:  # only the ranks with padding can tell
        with pytest.raises(PlacementError, match=r"weight: .*padded shape \(4, 6\)"):
            _ = model.hsdp_params()[0].all_gather_inputs


@pytest.mark.dist
def test_incomplete_extensions() -> None:
    run_ranks(incomplete, 2)


def live_bytes(model: nn.Module) -> int:
    """Return the bytes of full parameters that are allocated now."""
    total = 0
    for module in model.modules():
        if isinstance(module, HSDPModule):
            for param in module.hsdp_params():
                total += sum(t.untyped_storage().nbytes() for t in param.all_gather_outputs)
    return total


def memory(rank: int, world_size: int) -> None:
    model = LM.make()
    unit = sum(p.numel() * 4 for p in model.blocks[0].parameters())
    root = sum(p.numel() * 4 for p in model.parameters()) - 2 * unit
    shard(model, LM, TrainOptions(reshard_after_forward=True))
    seen: list[int] = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda *_: seen.append(live_bytes(model)))
        block.mlp.down.register_full_backward_hook(lambda *_: seen.append(live_bytes(model)))
    inputs, targets = LM.batch(rank, 0)
    loss = LM.loss(model(inputs), targets)
    assert live_bytes(model) == 0
    loss.backward()
    assert live_bytes(model) == 0
    assert seen == [root + unit] * 4, "the root and one block at a time"


@pytest.mark.dist
def test_full_parameters_live_one_unit_at_a_time() -> None:
    run_ranks(memory, 2)


def by_policy(rank: int, world_size: int, policy: Policy) -> list[dict[str, int]]:
    model = LM.make()
    sharded = fully_shard_by_policy(model, data_mesh(), policy, LM.units)
    counts = []
    for last in (False, True):
        sharded.set_is_last_backward(last)
        sharded.set_requires_gradient_sync(last or policy.zero_level != 1)
        inputs, targets = LM.batch(rank, 0)
        with count_collectives() as calls:
            LM.loss(model(inputs), targets).backward()
        counts.append(calls.kinds())
    return counts


@pytest.mark.dist
def test_zero_levels_by_policy() -> None:
    gather, scatter = {"all_gather": 3}, {"reduce_scatter": 3}
    expected = {
        1: [gather, gather | scatter],
        2: [gather | scatter, scatter],
        3: [{"all_gather": 6} | scatter] * 2,
    }
    for level, counts in expected.items():
        assert run_ranks(by_policy, 2, Policy.zero(level)) == [counts] * 2


def train_by_policy(rank: int, world_size: int, options: TrainOptions) -> Any:
    model = LM.make()
    policy = Policy(reshard_after_forward=True, shard_placement_fn=_largest_dim, min_shard_numel=40)
    fully_shard_by_policy(model, data_mesh(), policy, LM.units)
    return train(model, functools.partial(LM.batch, rank), LM.loss, options)


def _largest_dim(param: nn.Parameter) -> Shard:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


@pytest.mark.dist
def test_placements_and_small_parameters_by_policy() -> None:
    options = TrainOptions(steps=2)
    actual = merge_ranks(run_ranks(train_by_policy, 3, options))
    assert_same(actual, train_unsharded("lm", 3, options), **CLOSE)


def refused(rank: int, world_size: int) -> None:
    cases: list[tuple[Policy, list[str], str]] = [
        (Policy(tp_plan="auto"), [], "Policy.tp_plan: the eager path does not apply plans"),
        (Policy(), ["blocks.9"], "no module is called 'blocks.9'"),
        (Policy(ignored_params=["x.*"]), [], "'x.*' matches no parameter"),
    ]
    for policy, units, text in cases:
        with pytest.raises(PolicyError) as error:
            fully_shard_by_policy(build(LM.factory), data_mesh(), policy, units)
        assert text in str(error.value)


@pytest.mark.dist
def test_policies_that_the_eager_path_refuses() -> None:
    run_ranks(refused, 2)
