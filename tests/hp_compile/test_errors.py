"""What a program cannot do is an error that says where and what to do, and leaves the model as it was."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hp_compile import CaptureError
from tests.hp_compile.single import Net, full, one_rank, shard

X = torch.linspace(-1, 1, 24).reshape(4, 6)
FOREIGN = nn.Parameter(torch.ones(8))


class Holder:
    """A plain object."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        if y.sum() > 0:
            return y
        return -y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


apply_double = Double.apply  # stored before capture, as most code does


def branch(self: Any, x: Tensor) -> Any:
    return self.body(self.extra[0](x))


def item(self: Any, x: Tensor) -> Any:
    return self.body(x[: int(x.abs().sum().item())])


def stash(self: Any, x: Tensor) -> Any:
    self.hidden = self.l(x)
    return self.o(self.hidden)


def stash_in_list(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    self.extra.append(h)
    return self.o(h)


def stash_in_object(self: Any, x: Tensor) -> Any:
    self.extra.value = self.l(x)
    return self.body(x)


def change_parameter(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.l.weight.mul_(0.9)
    return self.body(x)


def replace_parameter(self: Any, x: Tensor) -> Any:
    self.l.weight = nn.Parameter(self.l.weight * 2)
    return self.body(x)


def through_data(self: Any, x: Tensor) -> Any:
    self.l.weight.data.mul_(0.9)
    return self.body(x)


def other_buffer(self: Any, x: Tensor) -> Any:
    self.b = self.b[:4]
    return self.body(x) * self.b.sum()


def change_attribute(self: Any, x: Tensor) -> Any:
    self.extra.add_(1)
    return self.body(x) * self.extra


def use_list(self: Any, x: Tensor) -> Any:
    return self.o(self.l(x) * self.extra[0])


def use_object(self: Any, x: Tensor) -> Any:
    return self.o(self.l(x) * self.extra.value)


def use_module(self: Any, x: Tensor) -> Any:
    return self.body(self.extra[0](x))


def use_global(self: Any, x: Tensor) -> Any:
    return self.o(self.l(x) * FOREIGN)


def plain(self: Any, x: Tensor, *rest: Any) -> Any:
    return self.body(x)


def return_object(self: Any, x: Tensor) -> Any:
    return Holder({"deep": [self.body(x)]})


def return_generator(self: Any, x: Tensor) -> Any:
    yield self.body(x)


def return_value(self: Any, x: Tensor) -> Any:
    return self.body(x), x.sum().item()


def python_random(self: Any, x: Tensor) -> Any:
    return self.body(x) * random.random()


def numpy_random(self: Any, x: Tensor) -> Any:
    return self.body(x) * float(np.random.rand())


def hook(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    y.register_hook(lambda grad: grad * 2)
    return self.o(y)


def own_function(self: Any, x: Tensor) -> Any:
    return self.o(apply_double(self.l(x)))


def conditional(self: Any, x: Tensor) -> Any:
    return self.o(torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.l(x),)))


def user_mistake(self: Any, x: Tensor) -> Any:
    return self.l(self.o(x))


def changes_input(self: Any, x: Tensor, y: Tensor) -> Any:
    y.mul_(2)
    return self.body(x) + y.sum()


FAILURES: tuple[tuple[Callable[..., Any], Any, str], ...] = (
    (
        branch,
        lambda: nn.ModuleList([Branches()]),
        r"module 'extra\.0' .*test_errors\.py:\d+.*torch\.where",
    ),
    (item, None, r"root module .*test_errors\.py:\d+.*value of a tensor"),
    (stash, None, r"test_errors\.py:\d+.*stores a tensor in self\.hidden.*Return it from forward"),
    (stash_in_list, list, r"stores a tensor in self\.extra\[0\]"),
    (stash_in_object, Holder, r"stores a tensor in self\.extra\.value"),
    (change_parameter, None, r"changes parameter 'l\.weight' in place.*outside forward"),
    (replace_parameter, None, r"test_errors\.py:\d+.*replaces parameter 'l\.weight'"),
    (through_data, None, r"`\.data`.*detach\(\)"),
    (other_buffer, None, r"replaces buffer 'b' by one of another shape.*\['8'\].*\['4'\]"),
    (
        change_attribute,
        lambda: torch.zeros(()),
        r"'extra' in place.*register_buffer",
    ),
    (
        use_list,
        lambda: [nn.Parameter(torch.ones(8))],
        r"extra\[0\].*Python container.*nn\.ParameterList",
    ),
    (use_list, lambda: {0: nn.Parameter(torch.ones(8))}, r"extra\[0\].*Python container"),
    (use_object, lambda: Holder(nn.Parameter(torch.ones(8))), r"extra\.value.*Python container"),
    (use_module, lambda: [nn.Linear(6, 6)], r"extra\[0\]\.weight.*nn\.ModuleList"),
    (use_global, None, r"test_errors\.py:\d+.*no parameter of the module.*never trained"),
    (plain, threading.Lock, r"attribute 'extra' \(lock.*__deepcopy__"),
    (
        return_object,
        None,
        r"returns a Holder that holds tensors \(Holder\.value\['deep'\]\[0\]\).*use_cache",
    ),
    (return_generator, None, r"returns a generator that is used up once"),
    (return_value, None, r"number that depends on the values|value of a tensor"),
    (python_random, None, r"Python's random module.*torch\.rand"),
    (numpy_random, None, r"numpy\.random.*torch\.rand"),
    (hook, None, r"test_errors\.py:\d+.*register_hook.*no gradient hooks"),
    (own_function, None, r"test_errors\.py:\d+.*autograd\.Function Double.*custom_op"),
    (conditional, None, r"test_errors\.py:\d+.*[Hh]igher.order operator"),
    (user_mistake, None, r"module 'o' .*must have same reduction dim"),
)


def model(forward: Callable[..., Any], make: Callable[[], Any] | None) -> nn.Module:
    """A user's model with one odd thing in it."""
    torch.manual_seed(0)
    built: Any = type(forward.__name__.title(), (Net,), {"forward": forward})()
    if make is not None:
        built.extra = make()
    return built


@pytest.mark.parametrize(
    ("forward", "make", "text"),
    FAILURES,
    ids=[f"{i}-{f[0].__name__}" for i, f in enumerate(FAILURES)],
)
def test_failure_says_where_and_leaves_the_model_usable(
    forward: Callable[..., Any], make: Callable[[], Any] | None, text: str
) -> None:
    with one_rank() as mesh:
        sharded: Any = shard(model(forward, make), mesh)
        before = {name: full(t).clone() for name, t in sharded.state_dict().items()}
        python = random.getstate()
        numpy_state = np.random.get_state()[1].tolist()
        with pytest.raises(CaptureError, match="(?s)" + text):
            sharded(X)
        assert random.getstate() == python and np.random.get_state()[1].tolist() == numpy_state
        after = sharded.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(full(after[name]), before[name]) for name in before)
        assert sharded._forward_hooks == {} and all(p.grad is None for p in sharded.parameters())
        # The user repairs forward, and goes on with the same object.
        sharded._hp_runtime.original_class = Net
        if make is not None and not isinstance(sharded.extra, nn.Module):
            sharded.extra = None
        sharded(X).sum().backward()
        assert sharded.o.bias.grad is not None


class Odd:
    pass


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (Odd(), "argument of type Odd, which is neither a tensor"),
        (nn.Linear(2, 2), "argument of type Linear"),
        (torch.Generator(), "argument of type Generator"),
    ],
    ids=["object", "module", "generator"],
)
def test_arguments_that_no_program_takes(argument: Any, text: str) -> None:
    with one_rank() as mesh:
        sharded: Any = shard(model(plain, None), mesh)
        with pytest.raises(CaptureError, match=text):
            sharded(X, argument)
        with pytest.raises(CaptureError, match=r"got a DTensor.*to_local"):
            sharded(sharded.l.weight)


def test_input_that_requires_grad_is_not_changed() -> None:
    with one_rank() as mesh:
        sharded: Any = shard(model(changes_input, None), mesh)
        with pytest.raises(CaptureError, match="changes its input tensor 1 in place"):
            sharded(X, (torch.ones(3, requires_grad=True) * 1.0))


def test_backward_hook_of_a_submodule() -> None:
    with one_rank() as mesh:
        net: Any = Net()
        net.l.register_full_backward_hook(lambda *_: None)
        sharded: Any = shard(net, mesh)
        with pytest.raises(CaptureError, match="module 'l': it has a backward hook"):
            sharded(X)
