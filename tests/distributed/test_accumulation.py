"""Gradient accumulation: what is reduced when, and that nothing is lost, doubled or rounded away.

The model's gradient is its input, so every expected number is plain arithmetic.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import MixedPrecisionPolicy, Policy
from tests.baselines import full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks

SIZE = 6  # uneven over 4 ranks


class Weights(nn.Module):
    """Sum of x * weight for one weight, or for both; the gradient of a weight is x."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(SIZE, dtype=dtype))
        self.second = nn.Parameter(torch.ones(SIZE, dtype=dtype))

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        total = x.new_zeros(())
        if use in ("both", "first"):
            total = total + (x * self.first).sum()
        if use in ("both", "second"):
            total = total + (x * self.second).sum()
        return total


def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((2, SIZE), value / 2, dtype=dtype)


class Loop:
    """Runs micro-batches and looks at gradients; each method call is one micro-batch."""

    def __init__(self, model: Any, share: float) -> None:
        self.model, self.share = model, share

    def micro(
        self, value: float, *, sync: bool = True, all_reduce: bool = True, use: str = "both"
    ) -> dict[str, int]:
        """Backward of this rank's share of `value`; returns the collectives of backward."""
        self.model.set_requires_gradient_sync(sync)
        self.model.set_requires_all_reduce(all_reduce)
        dtype = self.model.first.dtype
        with count_collectives() as calls:
            out = self.model(filled(value * self.share, dtype), use)
            forward = len(calls)
            out.backward()
        kinds: dict[str, int] = {}
        for call in calls[forward:]:
            kinds[call.kind] = kinds.get(call.kind, 0) + 1
        return kinds

    def nothing_yet(self) -> None:
        assert all(p.grad is None for p in self.model.parameters())

    def grads(self) -> tuple[float | None, float | None]:
        """The gradients, each the same number everywhere; then they are cleared."""
        values: list[float | None] = []
        for param in self.model.parameters():
            if param.grad is None:
                values.append(None)
                continue
            whole = full(param.grad)
            assert whole.unique().numel() == 1, whole
            values.append(whole[0].item())
        self.model.zero_grad()
        return values[0], values[1]


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return hp_compile.shard(Weights(dtype), mesh, Policy(backend="aot_eager", **fields))


def hybrid(rank: int, world_size: int) -> None:
    loop = Loop(make((2, 2)), rank + 1)
    # Mean over ranks of (10 + 1)(rank + 1): 11 * 2.5.
    assert loop.micro(10, all_reduce=False) == {"reduce_scatter": 1}
    loop.nothing_yet()
    assert loop.micro(1) == {"reduce_scatter": 1, "all_reduce": 1}
    assert loop.grads() == (27.5, 27.5)
    assert loop.micro(10, sync=False) == {}
    loop.nothing_yet()
    assert loop.micro(1) == {"reduce_scatter": 1, "all_reduce": 1}
    assert loop.grads() == (27.5, 27.5)
    # Both kinds of waiting in one step, in both orders, and more than one of each.
    for waits in (("sync", "all_reduce"), ("all_reduce", "sync"), ("sync", "sync", "all_reduce")):
        for index, wait in enumerate(waits):
            loop.micro(10 ** (index + 1), **{wait: False})
            loop.nothing_yet()
        loop.micro(1)
        total = sum(10 ** (index + 1) for index in range(len(waits))) + 1
        assert loop.grads() == (2.5 * total, 2.5 * total), waits
    # Synchronised every time: `.grad` accumulates.
    loop.micro(10)
    loop.micro(1)
    assert loop.grads() == (27.5, 27.5)
    # A weight that only some micro-batches use.
    for wait in ("sync", "all_reduce"):
        loop.micro(10, use="first", **{wait: False})
        loop.micro(1, use="second")
        assert loop.grads() == (25.0, 2.5), wait
        loop.micro(10, use="first", **{wait: False})
        loop.micro(1)
        assert loop.grads() == (27.5, 2.5), wait
    loop.micro(1, use="first")
    assert loop.grads() == (2.5, None)
    check_factors(loop)


def check_factors(loop: Loop) -> None:
    for wait in ({}, {"sync": False}, {"all_reduce": False}):
        loop.model.set_reduce_op_type("sum")
        loop.micro(10, **wait)
        loop.micro(1)
        assert loop.grads() == (110.0, 110.0), wait
        loop.model.set_gradient_divide_factor(8.0)
        loop.micro(10, **wait)
        loop.micro(1)
        assert loop.grads() == (13.75, 13.75), wait
        loop.model.set_reduce_op_type("avg")
        loop.micro(1)
        assert loop.grads() == (1.25, 1.25), wait
        loop.model._hp_runtime.flags.divide_factor = None


@pytest.mark.dist
def test_hybrid_sharding() -> None:
    run_ranks(hybrid, 4, timeout=300)


EXACT = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def bfloat16(rank: int, world_size: int) -> None:
    for shape in ((2,), (2, 1)):
        loop = Loop(make(shape, torch.bfloat16, mp_policy=EXACT), rank + 0.5)  # shares average to 1
        bits = loop.model.first.dtype
        for wait in ({}, {"sync": False}, {"all_reduce": False}):
            loop.micro(256, **wait)
            for _ in range(7):
                loop.micro(1, **wait)
            loop.micro(1)
            for param in loop.model.parameters():
                assert param.grad.dtype is bits
            first, second = loop.grads()
            assert first == second == 264.0, (shape, wait, first)
    changes(loop)
    # What FSDP2's numbers are without: each sum rounded to bf16.
    plain = Loop(make((2,), torch.bfloat16), rank + 0.5)
    plain.micro(256)
    for _ in range(8):
        plain.micro(1)
    assert plain.grads()[0] == 256.0


def changes(loop: Loop) -> None:
    """The exact sum belongs to the gradient it was made for."""
    params = list(loop.model.parameters())
    loop.micro(512)
    loop.micro(1)
    for param in params:
        param.grad.mul_(0.5)  # as clipping does, of 513 rounded to 512
    loop.micro(1)
    loop.micro(1)
    assert loop.grads() == (258.0, 258.0)
    loop.micro(256)
    for param in params:
        param.grad = param.grad * 0.0
    loop.micro(1)
    assert loop.grads() == (1.0, 1.0)
    loop.micro(256)
    for param in params:
        param.grad.zero_()
    loop.micro(1)
    assert loop.grads() == (1.0, 1.0)
    # Another term of the loss, and a hook that changes the gradient, are not lost.
    out = loop.model(filled(4.0 * loop.share, torch.bfloat16), "both")
    (out + 3.0 * sum(p.float().sum() for p in params).full_tensor()).backward()
    assert loop.grads() == (7.0, 7.0)
    handles = [p.register_hook(lambda grad: grad * 2.0) for p in params]
    loop.micro(4.0)
    assert loop.grads() == (8.0, 8.0)
    for handle in handles:
        handle.remove()
    # `autograd.grad` leaves nothing behind.
    out = loop.model(filled(4.0 * loop.share, torch.bfloat16), "both")
    found = torch.autograd.grad(out, params)
    assert [full(g)[0].item() for g in found] == [4.0, 4.0]
    loop.nothing_yet()
    loop.micro(4.0)
    assert loop.grads() == (4.0, 4.0)
    seen: list[float] = []
    handle = params[0].register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.to_local()[0].item())
    )
    loop.micro(256)
    loop.micro(1)
    loop.micro(1)
    handle.remove()
    assert seen == [256.0, 256.0, 258.0]  # hooks see the rounded sum: 257 rounds to 256
    assert loop.grads() == (258.0, 258.0)


@pytest.mark.dist
def test_bfloat16_gradients_accumulate_exactly() -> None:
    run_ranks(bfloat16, 2, timeout=300)
