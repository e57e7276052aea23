"""What forward reads besides tensors may change between calls: the plain model, changed alike, is the reference."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_compile import HPCompileError
from hp_compile.attributes import module_state
from tests.hp_compile.single import assert_same_call, one_rank, pair, shard

X = torch.rand(3, 4) + 0.5


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Reads(nn.Module):
    """Its forward reads numbers, containers, objects, functions and tensors that are no buffers."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.number = 1.0
        self.table = {"k": 1.0}
        self.items = [1.0]
        self.config = Config()
        self.space = types.SimpleNamespace(inner=Config())
        self.constant = torch.ones(())
        self.tensors = [torch.ones(4)]
        self.function: Callable[[Tensor], Tensor] = torch.tanh
        self.register_buffer("counts", torch.ones(4))
        self.alias = self.counts

    def forward(self, x: Tensor) -> Tensor:
        self.counts.add_(1.0)
        scale = self.number * self.table["k"] * self.items[0] * self.config.scale
        scale = scale * self.space.inner.scale * self.constant
        return self.function(self.inner(x)) * scale * self.tensors[0] * self.counts


def double(module: nn.Module, args: Any) -> Any:
    return (2 * args[0],)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda m: setattr(m, "number", 2.0),
    "dict": lambda m: m.table.update(k=3.0),
    "list": lambda m: m.items.__setitem__(0, 4.0),
    "dataclass": lambda m: setattr(m.config, "scale", 5.0),
    "object in an object": lambda m: setattr(m.space.inner, "scale", 6.0),
    "tensor": lambda m: setattr(m, "constant", torch.tensor(7.0)),
    "tensor in place": lambda m: m.constant.fill_(8.0),
    "tensor in a list": lambda m: m.tensors.__setitem__(0, torch.full((4,), 9.0)),
    "function": lambda m: setattr(m, "function", torch.sigmoid),
    "hook of a child": lambda m: m.inner.register_forward_pre_hook(double),
}


def test_changes_between_calls_take_effect() -> None:
    with one_rank() as mesh:
        sharded, plain = pair(Reads, mesh)
        assert_same_call(sharded, plain, X)
        for name, change in CHANGES.items():
            before = plain(X).detach()
            plain.counts.copy_(sharded.counts)
            for model in (sharded, plain):
                change(model)
            out = assert_same_call(sharded, plain, X)
            assert not torch.allclose(out.detach(), before), name


def test_calls_that_change_nothing_capture_nothing() -> None:
    """An updated buffer under a second name and trained parameters in a list are no changes."""
    with one_rank() as mesh:
        model = shard(Reads(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state = module_state(tuple(model.modules()))
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
        assert module_state(tuple(model.modules())) == state
        assert sum(map(len, model._hp_runtime.programs.values())) == 1


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return torch.fft.rfft(y), y


def test_complex_outputs_carry_gradients() -> None:
    with one_rank() as mesh:
        sharded, plain = pair(Spectrum, mesh)
        for model in (sharded, plain):
            spectrum, y = model(X)
            assert spectrum.requires_grad
            (spectrum.abs().square().sum() + y.sum()).backward()
        expected: Any = plain.inner.weight.grad
        assert expected.abs().sum() > 0
        torch.testing.assert_close(sharded.inner.weight.grad.full_tensor(), expected)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, "Reads.forward: missing a required argument: 'x'"),
        ((X,), {"labels": X}, "Reads.forward: got an unexpected keyword argument 'labels'"),
    ],
)
def test_a_call_that_does_not_fit_is_pythons_own_error(
    args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with one_rank() as mesh:
        model = shard(Reads(), mesh)
        with pytest.raises(TypeError, match=text):
            model(*args, **kwargs)
        model(X).sum().backward()


def test_plan_and_verify_say_which_argument_is_wrong() -> None:
    import hp_compile

    with one_rank() as mesh:
        with pytest.raises(HPCompileError, match=r"expected a tuple .* got Tensor; write args="):
            hp_compile.plan(Reads(), mesh, args=X)  # type: ignore[arg-type]
        with pytest.raises(HPCompileError, match=r"graph_module: expected .* got NoneType"):
            hp_compile.verify(None, None)  # type: ignore[arg-type]
