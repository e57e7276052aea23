"""A sharded module under autograd: the same gradients, and None in the same places, as the plain module.

One rank is enough here: nothing is reduced, so gradients that share memory with each other or with a tangent would show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import hp_compile
from hp_compile import Policy
from passes.base import SavedOutput, outputs
from tests.baselines import full
from tests.models import build

TIGHT = {"rtol": 1e-6, "atol": 1e-7}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module, **fields: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    return hp_compile.shard(model, mesh, Policy(**{"backend": "aot_eager", **fields}))


def pair(make: Callable[[], nn.Module], **fields: Any) -> tuple[Any, nn.Module]:
    plain = build(make)
    return shard(copy.deepcopy(plain), **fields), plain


def assert_same_grads(sharded: nn.Module, plain: nn.Module) -> None:
    nonzero = 0
    for (fqn, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), fqn
        if q.grad is not None and p.grad is not None:
            torch.testing.assert_close(
                full(p.grad), q.grad, **TIGHT, msg=lambda m, f=fqn: f"{f}: {m}"
            )
            nonzero += int(q.grad.count_nonzero() > 0)
    assert nonzero


class Sums(nn.Module):
    """One gradient node for two parameters, and the tangent itself as a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4, bias=False)
        self.b1 = nn.Parameter(torch.rand(2, 4))
        self.b2 = nn.Parameter(torch.rand(4, 2))
        self.b3 = nn.Parameter(torch.rand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight(x) + self.b1 + self.b2.view(2, 4) + self.b3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ignored", [(), ("b*",)])
def test_gradients_share_no_memory(backend: str, ignored: tuple[str, ...]) -> None:
    model, plain = pair(Sums, backend=backend, ignored_params=ignored)
    x = torch.rand(2, 4)
    tangent = torch.rand(2, 4)
    kept = tangent.clone()
    for module in (model, plain):
        module(x).backward(tangent)
    assert_same_grads(model, plain)
    locals_ = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    for value in locals_:
        before = [other.clone() for other in locals_]
        value.add_(1.0)
        for other, old in zip(locals_, before, strict=True):
            assert other is value or torch.equal(other, old)
        assert value.is_contiguous()
    assert torch.equal(tangent, kept)


def test_lstm_biases() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            h, c = self.cell(x[:, 0])
            return self.cell(x[:, 1], (h, c))[0]

    model, plain = pair(Recurrent)
    x = torch.rand(2, 2, 3)
    for _ in range(2):  # accumulates: an aliased pair would count each other's gradient
        for module in (model, plain):
            module(x).square().sum().backward()
    assert_same_grads(model, plain)


def test_gradients_survive_the_next_step() -> None:
    model, _ = pair(Sums)
    x = torch.rand(2, 4)
    model(x).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    copies = [full(g) for g in grads]
    model.zero_grad()
    for _ in range(2):
        model(2 * x).square().sum().backward()
    for grad, old in zip(grads, copies, strict=True):
        assert torch.equal(full(grad), old)


class Heads(nn.Module):
    """Two heads, an integer and a detached output, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.trunk(x))
        left, right = self.left(h), self.right(h)
        return {
            "left": left,
            "more": [right, left.argmax(-1)],
            "fixed": h.detach(),
            "name": "heads",
        }


def test_loss_on_some_outputs() -> None:
    model, plain = pair(Heads)
    x = torch.rand(5, 4)
    losses: list[Callable[[dict[str, Any]], Tensor]] = [
        lambda out: out["left"].square().sum(),
        lambda out: out["more"][0].square().sum(),
        lambda out: out["left"].square().sum() + out["more"][0].sum(),
    ]
    for loss in losses:
        for module in (model, plain):
            module.zero_grad()
            out = module(x)
            assert out["name"] == "heads"
            assert not out["fixed"].requires_grad and not out["more"][1].requires_grad
            loss(out).backward()
        assert_same_grads(model, plain)
    model.zero_grad()
    plain.zero_grad()
    # Accumulated without synchronisation: every micro-batch uses another head.
    for sync, loss in zip((False, True), losses[:2], strict=True):
        model.set_requires_gradient_sync(sync)
        loss(model(x)).backward()
        loss(plain(x)).backward()
    assert_same_grads(model, plain)


def test_backward_twice_and_interleaved() -> None:
    model, plain = pair(Heads)
    x, y = torch.rand(5, 4), torch.rand(3, 4)
    for module in (model, plain):
        loss = module(x)["left"].square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        first, second = module(x)["left"].square().sum(), module(y)["left"].square().sum()
        first.backward()
        second.backward()
        (module(x)["left"].square().sum() + module(y)["more"][0].square().sum()).backward()
    assert_same_grads(model, plain)
    with pytest.raises(RuntimeError, match="second time"):
        first.backward()


def test_autograd_grad_and_input_gradients() -> None:
    model, plain = pair(Heads)
    found = []
    for module in (model, plain):
        x = torch.ones(5, 4, requires_grad=True)
        out = module(x)["left"].square().sum()
        found.append(torch.autograd.grad(out, [x, *module.trunk.parameters()]))
        assert all(p.grad is None for p in module.parameters())
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(full(ours), theirs, **TIGHT)


def test_hooks() -> None:
    model, _ = pair(Heads)
    calls: list[str] = []

    def note(fqn: str, param: Tensor) -> None:
        if param.grad is not None:
            calls.append(fqn)
            param.grad = None

    for fqn, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            # PyTorch runs the hooks of every input of a function, also where it returned no gradient
            lambda p, fqn=fqn: note(fqn, p)
        )
    model(torch.rand(5, 4))["left"].square().sum().backward()
    assert sorted(calls) == ["left.bias", "left.weight", "trunk.bias", "trunk.weight"]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_training(mode: Callable[[], Any]) -> None:
    model, plain = pair(Heads)
    x = torch.rand(5, 4)
    with mode():
        out = model.eval()(x)["left"]
        torch.testing.assert_close(out, plain(x)["left"], **TIGHT)
        assert not out.requires_grad
    model.train()
    for module in (model, plain):
        module(x)["left"].square().sum().backward()
    assert_same_grads(model, plain)


class Saved(nn.Module):
    """Its output is what backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.inner(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_change_in_place_of_a_saved_output_is_never_silent(backend: str) -> None:
    model, plain = pair(Saved, backend=backend)
    x = torch.rand(3, 4)
    out = plain(x)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
    expected = torch.autograd.grad((2 * plain(x)).sum(), plain.inner.weight)[0]
    out = model(x)
    out.mul_(2.0)
    try:
        out.sum().backward()
    except RuntimeError as error:
        assert "inplace operation" in str(error)
    else:  # a program may compute the value again instead of saving it
        torch.testing.assert_close(model.inner.weight.grad.full_tensor(), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_change_in_place_that_harms_nothing_is_fine(backend: str) -> None:
    model, plain = pair(lambda: nn.Linear(4, 4), backend=backend)
    x = torch.rand(3, 4)
    for module in (model, plain):
        out = module(x)
        out.mul_(2.0)
        out.square().sum().backward()
    assert_same_grads(model, plain)


class Counting(nn.Module):
    """Backward needs a function of a buffer that forward updates."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("steps", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1.0)
        return self.inner(x) * torch.sin(self.steps) * torch.cos(x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backward_reads_buffers_as_forward_did(backend: str) -> None:
    model, plain = pair(Counting, backend=backend)
    for _ in range(2):
        x = torch.rand(3, 4)
        for module in (model, plain):
            module(x).sum().backward()
        assert torch.equal(model.steps, plain.steps)
    assert_same_grads(model, plain)


class Checkpointed(nn.Module):
    """An expensive block with dropout, under `torch.utils.checkpoint` or not."""

    def __init__(self, how: str = "", rate: float = 0.0) -> None:
        super().__init__()
        self.how, self.rate = how, rate
        self.enter = nn.Linear(8, 64)
        self.leave = nn.Linear(64, 8)
        self.head = nn.Linear(8, 4)

    def block(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(torch.sin(self.enter(x))), self.rate, training=self.training)
        return self.leave(torch.tanh(h))

    def forward(self, x: Tensor) -> Tensor:
        if not self.how:
            return self.head(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=self.how == "reentrant"))


def saved_bytes(model: Any, x: Tensor) -> int:
    forward = model.plan(x).graphs["forward"]
    own = {p.fqn for p in model.plan(x).params.values()}
    assert own
    total = 0
    for _, node, _ in outputs(forward, SavedOutput):
        value = node.meta["val"]
        if node.op != "placeholder" and isinstance(value, Tensor):
            total += int(value.numel()) * value.element_size()
    return total


@pytest.mark.parametrize("how", ["reentrant", "no reentrant"])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_checkpoint_recomputes(how: str, rate: float) -> None:
    x = torch.rand(16, 8, requires_grad=True)
    model, plain = pair(lambda: Checkpointed(how, rate), dynamic=False)
    for _ in range(2):
        for module in (model, plain):
            torch.manual_seed(7)
            module(x).square().sum().backward()
    assert_same_grads(model, plain)
    without, _ = pair(lambda: Checkpointed("", rate), dynamic=False)
    masks = 16 * 64 if rate else 0
    assert saved_bytes(model, x) <= saved_bytes(without, x) / 2 + 8 * masks
    if not rate:
        assert saved_bytes(model, x) < 16 * 64 * 4


def test_dropout_differs_from_call_to_call_and_seed_to_seed() -> None:
    for backend in ("aot_eager", "inductor"):
        model, _ = pair(lambda: Checkpointed("no reentrant", 0.5), backend=backend)
        x = torch.rand(16, 8)
        torch.manual_seed(0)
        first, second = model(x), model(x)
        torch.manual_seed(0)
        again = model(x)
        torch.manual_seed(1)
        other = model(x)
        assert torch.equal(first, again)
        assert not torch.equal(first, second) and not torch.equal(first, other)
