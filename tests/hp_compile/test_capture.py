"""Inputs and outputs of captured programs against the plain model's own call."""

from __future__ import annotations

import collections
import dataclasses
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hp_compile.single import Net, assert_same_call, compare_grads, one_rank, pair, programs

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Named(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Data:
    a: Tensor
    n: int = 3
    o: Any = None


def keyword(self: Any, x: Tensor, y: Tensor | None = None, *, z: float = 1.0) -> Any:
    return self.body(x) * z + (0 if y is None else self.body(y))


def containers(self: Any, d: dict[str, Any], pair: list[Any]) -> Any:
    return {"o": self.body(d["x"]), "n": {"k": (pair[0] + 1, None, [pair[1][0] * 2])}, "s": "t"}


def data(self: Any, d: Data) -> Any:
    return Data(self.body(d.a) * d.n, n=7, o=(None, 2.5))


def named(self: Any, d: Named) -> Any:
    return Named(self.body(d.a), (d.b + 1,))


def same_input(self: Any, x: Tensor) -> Any:
    return x, self.body(x)


def parameter(self: Any, x: Tensor) -> Any:
    return self.l.weight, self.body(x)


def views(self: Any, x: Tensor) -> Any:
    y = self.body(x)
    return y, y.t(), y[1:], x.t(), y


def buffers(self: Any, x: Tensor) -> Any:
    self.c.add_(1)
    return self.body(x), self.b, self.c


def integers(self: Any, x: Tensor) -> Any:
    y = self.body(x)
    return y, y.argmax(-1), y.detach(), y > 0


def nothing(self: Any, x: Tensor) -> Any:
    return None


def transposed(self: Any, x: Tensor) -> Any:
    return self.body(x).t()


def updated_input(self: Any, x: Tensor, total: Tensor) -> Any:
    total.add_(x.sum())
    return self.body(x) + total.sum()


def sizes(self: Any, x: Tensor) -> Any:
    return self.body(x), x.shape[0], x.shape[0] * 2 + 1


def no_tensors(self: Any) -> Any:
    return self.body(self.l.weight)


def mapping(self: Any, x: Tensor) -> Any:
    return collections.OrderedDict(a=self.body(x), b={"s": {1, 2}, "x": x})


def replaced_buffer(self: Any, x: Tensor) -> Any:
    self.b = self.b * 0.5 + self.l(x).mean(0).detach()
    return self.o(self.l(x) * self.b)


def replaced_after_use(self: Any, x: Tensor) -> Any:
    y = self.l(x) * self.b
    self.b = self.b + 1
    return self.o(y)


def no_grad_inside(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = torch.sigmoid(self.l(x))
    return self.o(self.l(x) * scale)


CALLS: dict[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] = {
    keyword: ((X,), {"y": X * 2, "z": 3.0}),
    containers: (({"x": X, "u": None}, [X, (X, 2)]), {}),
    data: ((Data(X),), {}),
    named: ((Named(X, X),), {}),
    same_input: ((X,), {}),
    parameter: ((X,), {}),
    views: ((X,), {}),
    buffers: ((X,), {}),
    integers: ((X,), {}),
    nothing: ((X,), {}),
    transposed: ((torch.linspace(-1, 1, 24).reshape(6, 4).t(),), {}),
    updated_input: ((X, torch.zeros(3, 2).t()), {}),
    sizes: ((X,), {}),
    no_tensors: ((), {}),
    mapping: ((X,), {}),
    replaced_buffer: ((X,), {}),
    replaced_after_use: ((X,), {}),
    no_grad_inside: ((X,), {}),
}


def with_forward(forward: Callable[..., Any], base: type[nn.Module] = Net) -> type[nn.Module]:
    """A class of its own, as a user writes it."""
    return type(forward.__name__.title(), (base,), {"forward": forward})


@pytest.mark.parametrize("forward", CALLS, ids=lambda f: f.__name__)
def test_calls_give_what_the_plain_model_gives(forward: Callable[..., Any]) -> None:
    args, kwargs = CALLS[forward]
    with one_rank() as mesh, warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of torch, about what capture does
        sharded, plain = pair(with_forward(forward), mesh)
        for _ in range(2):
            assert_same_call(sharded, plain, *args, **kwargs)
        assert programs(sharded) == 1


def test_inputs_that_require_grad_and_strides_that_change() -> None:
    with one_rank() as mesh:
        sharded, plain = pair(with_forward(same_input), mesh)
        assert_same_call(sharded, plain, X.clone().requires_grad_())
        turned = X.t().contiguous().t()
        assert not turned.is_contiguous()
        assert_same_call(sharded, plain, turned.requires_grad_())
        wide = X[:1].expand(4, 6)
        assert torch.allclose(sharded(wide)[1], plain(wide)[1])
        assert (
            programs(sharded) == 2
        )  # with and without gradient of the input; strides do not count
        # A tangent that is expanded, and one that is transposed.
        for model in (sharded, plain):
            model(X)[1].sum().backward()
            model(X)[1].backward(torch.ones(5, 4).t())
        compare_grads(sharded, plain)


def test_keyword_order_and_constants_in_the_signature() -> None:
    with one_rank() as mesh:
        sharded, plain = pair(with_forward(keyword), mesh)
        sharded(X, y=X, z=2.0)
        assert programs(sharded) == 1
        assert torch.allclose(sharded(X, z=2.0, y=X), plain(X, z=2.0, y=X))
        assert programs(sharded) == 1
        half = sharded(X.double().float(), y=X, z=2)
        assert programs(sharded) == 2  # 2 is not 2.0: they promote differently
        assert torch.allclose(half, plain(X, y=X, z=2))
        assert torch.allclose(sharded(X, y=X, z=True), plain(X, y=X, z=True))
        assert programs(sharded) == 3


def test_hugging_face_output_class_is_kept() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def forward(self: Any, x: Tensor) -> Any:
        y = self.body(x)
        return outputs.CausalLMOutputWithPast(loss=y.square().mean(), logits=y)

    with one_rank() as mesh:
        sharded, plain = pair(with_forward(forward), mesh)
        out = assert_same_call(sharded, plain, X)
        assert list(out.keys()) == ["loss", "logits"] and out[0] is out.loss


class Modes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.drop(self.norm(self.l(x)))) * self.temperature


def test_every_mode_has_its_program() -> None:
    with one_rank() as mesh:
        sharded, plain = pair(Modes, mesh)
        for model in (sharded, plain):
            model.eval()
        with torch.inference_mode():  # evaluation first: nothing of it may reach training
            assert torch.equal(sharded(X), plain(X))
        assert_same_call(sharded, plain, X)  # eval with gradients
        for model in (sharded, plain):
            model.train()
            model.drop.eval()
        assert_same_call(sharded, plain, X)
        with torch.no_grad():
            out = sharded(X)
            assert torch.equal(out, plain(X)) and not out.requires_grad
        for model in (sharded, plain):
            model.norm.eval()
        assert_same_call(sharded, plain, X)
        assert programs(sharded) == 5
        for model in (sharded, plain):
            model.temperature = 0.5  # read by forward, so it selects a program too
        assert_same_call(sharded, plain, X)


def test_capture_leaves_the_module_and_the_random_state_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.seen: list[int] = []
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            return self.drop(self.body(x))

    with one_rank() as mesh:
        sharded, plain = pair(Counting, mesh)
        python = random.getstate()
        with caplog.at_level(logging.WARNING, "hp_compile"):
            torch.manual_seed(3)
            ours = sharded(X)
            torch.manual_seed(3)
            theirs = plain(X)
        assert torch.equal(ours, theirs)  # so capture drew nothing from torch's generator
        assert random.getstate() == python
        assert sharded.calls == 0 and sharded.seen == []
        assert "self.calls, self.seen" in caplog.text


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_in_the_model(reentrant: bool) -> None:
    class Checkpointed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.4)

        def part(self, x: Tensor) -> Tensor:
            return self.drop(torch.tanh(self.l(x)))

        def forward(self, x: Tensor) -> Tensor:
            return self.o(checkpoint(self.part, x, use_reentrant=reentrant))

    with one_rank() as mesh:
        sharded, plain = pair(Checkpointed, mesh)
        losses = []
        for model in (sharded, plain):
            torch.manual_seed(5)
            loss = model(X.clone().requires_grad_()).square().sum()
            loss.backward()
            losses.append(loss)
        assert torch.equal(losses[0], losses[1])
        compare_grads(sharded, plain)
        sizes = [t.shape for t in saved_by(sharded)]
        assert torch.Size([4, 8]) in sizes  # the dropout mask, saved so that the recompute agrees
        program = next(p for found in sharded._hp_runtime.programs.values() for p in found)
        names = [str(n.target) for n in program.backward(_sync(sharded)).graph.nodes]
        assert any("tanh.default" in name for name in names)  # computed again in backward


def saved_by(sharded: Any) -> list[Tensor]:
    """What one call saves for backward."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        sharded(X.clone().requires_grad_())
    return seen


def _sync(sharded: Any) -> Any:
    from hp_compile.reduction import choose

    return choose(sharded._hp_runtime).run


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_lstm_and_shared_buffers_of_recurrent_layers(backend: str) -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.r = nn.LSTM(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.r(x[:, None].expand(-1, 3, -1))[0])

    with one_rank() as mesh:
        sharded, plain = pair(Recurrent, mesh, backend=backend)
        assert_same_call(sharded, plain, X, tolerance=1e-5)
