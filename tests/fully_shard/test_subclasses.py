"""All-gather extensions whose full parameter is a subclass too, that are patched in, or uneven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from hyper_parallel import MixedPrecisionPolicy, fully_shard
from tests.baselines import full
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh
from tests.models import build


class Double(torch.Tensor):
    """Two equal tensors that go through every operator side by side; both are gathered."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Double:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, a.shape, dtype=a.dtype, device=a.device, strides=a.stride()
        )

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, meta: None, size: Any, stride: Any) -> Double:
        return cls(tensors["a"], tensors["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outs = []
        for part in ("a", "b"):
            unwrapped = tree_map_only(cls, lambda t, p=part: getattr(t, p), (args, kwargs))
            outs.append(func(*unwrapped[0], **unwrapped[1]))
        first, second = outs
        out = cls(first, second) if isinstance(first, Tensor) else first
        if isinstance(first, list | tuple):
            out = type(first)(cls(x, y) for x, y in zip(first, second, strict=True))
        return return_and_correct_aliasing(func, args, kwargs, out)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        a, b = outputs
        if out is not None:
            assert isinstance(out, Double)
            if a.dtype == dtype:
                assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
                assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
            else:
                out.a.copy_(a)
                out.b.copy_(b)
            return None
        return Double(a, b).to(dtype), (a, b)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def doubled() -> nn.Sequential:
    model = nn.Sequential(*(build(MLP, seed=i) for i in range(2)))
    for mlp in model:
        for layer in (mlp.up, mlp.down):
            value = layer.weight.detach()
            layer.weight = nn.Parameter(Double(value.clone(), value.clone()))
    return model


def parts(value: Any) -> list[Tensor]:
    value = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    return [value.a, value.b] if isinstance(value, Double) else [value]


def trains(rank: int, world_size: int, reshard: bool) -> None:
    plain, model = doubled(), doubled()
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh(), reshard_after_forward=reshard)
    for param in model.parameters():  # the slice is all that is left of the parameter
        inners = [t for t in vars(param).values() if isinstance(t, Tensor)]
        assert not inners and param.to_local().a.untyped_storage().nbytes() == 8 * 16 * 4 // 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    seen: list[type] = []
    model[0].up.register_forward_pre_hook(lambda m, _: seen.append(type(m.weight.data)))
    for index in range(3):
        losses = []
        for module in (plain, model):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * index + rank))
            losses.append(module(x).square().sum())
            losses[-1].backward()
        for mine, theirs in zip(parts(losses[1]), parts(losses[0]), strict=True):
            torch.testing.assert_close(mine, theirs)
        for param in plain.parameters():
            means = [part / world_size for part in parts(param.grad)]
            for mean in means:
                dist.all_reduce(mean)
            param.grad = Double(*means)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            mine, theirs = parts(param.grad)[0], parts(other.grad)[0]  # ours is a plain tensor
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert set(seen) == {Double}, "forward sees the subclass"


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_a_full_parameter_that_is_a_subclass(reshard: bool) -> None:
    run_ranks(trains, 2, reshard)


def from_meta(rank: int, world_size: int, reshard: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(MLP(), MLP())
        for mlp in model:
            for layer in (mlp.up, mlp.down):
                value = layer.weight.detach()
                layer.weight = nn.Parameter(Double(value, value.clone()))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh(), mp_policy=policy, reshard_after_forward=reshard)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.trunc_normal_(param)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [part.clone() for part in parts(model[0].up.weight)]
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = parts(model[0].up.weight)
    assert all(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_subclasses_from_the_meta_device(reshard: bool) -> None:
    run_ranks(from_meta, 2, reshard)


def patched(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    """Methods that are put on the plain slices after they have values, here to gather bfloat16."""
    with torch.device("meta"):
        model = nn.Sequential(MLP(), MLP())
    for module in (*model, model):
        fully_shard(module, mesh=data_mesh(shape), reshard_after_forward=True)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        with torch.no_grad():
            param.copy_(_distribute(torch.randn(param.shape, generator=generator), param))
    meshes: list[DeviceMesh] = []

    def pre(self: Any, mesh: DeviceMesh, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        meshes.append(mesh)
        return (self.to(torch.bfloat16),), None

    def post(self: Any, outputs: Any, metadata: None, dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(outputs[0])
            return None
        upcast = outputs[0].to(dtype)
        return upcast, (outputs[0], upcast)

    for param in model.parameters():
        local = param._local_tensor
        local.fsdp_pre_all_gather = pre.__get__(local)
        local.fsdp_post_all_gather = post.__get__(local)
    values = {name: full(param).to(torch.bfloat16) for name, param in model.named_parameters()}
    for _ in range(2):
        model.zero_grad()
        seen: list[Tensor] = []
        hook = model[0].up.register_forward_pre_hook(
            lambda m, _, s=seen: s.append(m.weight.detach().clone())
        )
        model(torch.ones(2, 8)).sum().backward()
        hook.remove()
        assert torch.equal(seen[0], values["0.up.weight"].float())
        assert all(full(param.grad).count_nonzero() for param in model.parameters())
    assert meshes and all(mesh.ndim == 1 and mesh.size() == shape[-1] for mesh in meshes)


def _distribute(value: Tensor, like: Any) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)


@pytest.mark.dist
@pytest.mark.parametrize(("world", "shape"), [(2, (2,)), (4, (2, 2))])
def test_methods_patched_in_after_wrapping(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(patched, world, shape)
