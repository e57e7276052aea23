"""A sharded model on a world of one rank: programs run for real, and no process has to be started."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import hp_compile
from hp_compile.signature import flatten_tree
from tests.fake_dist import fake_world


class Net(nn.Module):
    """Six features to five; tests override forward and use ``body``."""

    b: Tensor
    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 8)
        self.o = nn.Linear(8, 5)
        self.register_buffer("b", torch.ones(8))
        self.register_buffer("c", torch.zeros((), dtype=torch.int64))

    def body(self, x: Tensor) -> Tensor:
        return self.o(torch.tanh(self.l(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """The mesh of a world of one rank."""
    with fake_world(1):
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))


def shard(model: nn.Module, mesh: DeviceMesh, **policy: Any) -> Any:
    """Shards with the backend that generates no code, unless told otherwise."""
    return hp_compile.shard(model, mesh, hp_compile.Policy(**{"backend": "aot_eager", **policy}))


def pair(make: Callable[[], nn.Module], mesh: DeviceMesh, **policy: Any) -> tuple[Any, nn.Module]:
    """A sharded model and an equal plain one."""
    torch.manual_seed(0)
    plain = make()
    return shard(copy.deepcopy(plain), mesh, **policy), plain


def full(tensor: Tensor) -> Tensor:
    """A plain tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copies(value: Any) -> Any:
    """The same containers with fresh leaves, strides and ``requires_grad`` kept."""

    def fresh(t: Tensor) -> Tensor:
        out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        return out.copy_(t.detach()).requires_grad_(t.requires_grad)

    return pytree.tree_map_only(Tensor, fresh, value)


def assert_same_call(
    sharded: Any, plain: nn.Module, *args: Any, tolerance: float = 1e-6, **kwargs: Any
) -> Any:
    """Calls both, compares outputs (types too), buffers, changed inputs and, after backward, every gradient."""
    given = [copies((args, kwargs)), copies((args, kwargs))]
    ours, theirs = sharded(*given[0][0], **given[0][1]), plain(*given[1][0], **given[1][1])
    assert type(ours) is type(theirs)
    (mine, tree), (other, other_tree) = flatten_tree(ours), flatten_tree(theirs)
    assert tree == other_tree
    for a, b in zip(mine, other, strict=True):
        if not isinstance(b, Tensor):
            assert type(a) is type(b) and a == b
            continue
        torch.testing.assert_close(full(a), b.detach(), rtol=tolerance, atol=tolerance)
        assert a.requires_grad == b.requires_grad
    for leaves in (mine, other):
        terms = [
            (t.float() * torch.arange(t.numel()).reshape(t.shape)).sum()
            for t in leaves
            if isinstance(t, Tensor) and t.requires_grad
        ]
        if terms:
            torch.stack(terms).sum().backward()
    compare_grads(sharded, plain, tolerance)
    for a, b in zip(*(pytree.tree_leaves(g) for g in given), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(sharded.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b), name
    return ours


def compare_grads(sharded: Any, plain: nn.Module, tolerance: float = 1e-6) -> None:
    """Every gradient of a sharded model equals the plain one's; both are then cleared."""
    for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            scale = max(1.0, float(q.grad.abs().max()))
            torch.testing.assert_close(
                full(p.grad), q.grad, rtol=tolerance * 10, atol=tolerance * scale, msg=name
            )
    sharded.zero_grad()
    plain.zero_grad()


def programs(sharded: Any) -> int:
    """How many programs have been captured and kept."""
    return sum(len(found) for found in sharded._hp_runtime.programs.values())
