"""Exact sums behind narrow gradients: bf16 ``.grad``, reduced and accumulated in fp32.

A parameter stored in bf16 has a bf16 ``.grad``. Adding micro-batches to it in bf16 loses what is smaller than its last
bit (256 + 1 is 256), although each was reduced in fp32. So the sum in the dtype of the reduction is kept beside
``.grad``, which is always that sum, rounded once. It is an attribute of the gradient: it goes when the gradient goes,
and anybody who replaces or changes the gradient (clipping, unscaling, ``zero_``) makes it invalid.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from hyper_parallel.torch_compat.distributed import local_tensor, versions

if TYPE_CHECKING:
    from torch import nn

    from hp_compile.state import ParamState

_ATTRIBUTE = "_hyper_parallel_exact"


@dataclass(frozen=True)
class _Exact:
    """The sum that a gradient rounds, and the versions of gradient and local tensor at which it did."""

    value: torch.Tensor
    versions: tuple[int, int]


class ExactGrad:
    """Accumulates the gradient of one parameter in the dtype of its reduction.

    Autograd calls it twice around ``.grad += gradient``: before, to add the exact value to the exact sum, and after, to
    write the rounded sum. A gradient that did not come unchanged from :meth:`hand_out` (a hook scaled it, another term
    of the loss was added) counts as it is.

    Args:
        state: state of the parameter.
    """

    def __init__(self, state: ParamState) -> None:
        self._state = weakref.ref(state)
        self._dtype = state.plan.dtype
        self._param: weakref.ref[nn.Parameter] | None = None
        self._node: Any = None  # holds the hook; a parameter holds its accumulation node weakly
        self._given: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        self._total: torch.Tensor | None = None

    def _attach(self, param: nn.Parameter) -> None:
        """Registers the hooks on the parameter that the module holds now."""
        if self._param is not None and self._param() is param:
            return
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        self._node = get_gradient_edge(param).node
        self._node.register_prehook(lambda grads: _call(before, grads))
        param.register_post_accumulate_grad_hook(lambda changed: _call(after, changed))
        self._param = weakref.ref(param)

    def hand_out(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient as autograd gets it: a rounded DTensor; the exact value is remembered.

        Args:
            grad: this rank's reduced gradient without padding, in the dtype of the reduction.
        """
        state = self._state()
        assert state is not None
        self._attach(state.param)
        rounded = state.to_dtensor(grad.to(state.plan.dtype))
        self._given, self._dtype = (weakref.ref(rounded), grad), grad.dtype
        return rounded

    def _before(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        (grad,) = grads
        given, self._given, self._total = self._given, None, None
        param = self._param() if self._param is not None else None
        if grad is None or param is None:
            return
        exact = given is not None and given[0]() is grad
        value = given[1] if exact and given is not None else local_tensor(grad).to(self._dtype)
        self._total = value if param.grad is None else self._sum_of(param.grad) + value

    def _sum_of(self, grad: torch.Tensor) -> torch.Tensor:
        held: _Exact | None = getattr(grad, _ATTRIBUTE, None)
        if held is not None and held.versions == versions(grad):
            return held.value
        return local_tensor(grad).to(self._dtype)

    def _after(self, param: torch.Tensor) -> None:
        total, self._total = self._total, None
        if total is None or param.grad is None:
            return
        with torch.no_grad():
            local_tensor(param.grad).copy_(total)
        setattr(param.grad, _ATTRIBUTE, _Exact(total, versions(param.grad)))


def _call(method: weakref.WeakMethod[Any], argument: Any) -> None:
    bound = method()
    if bound is not None:
        bound(argument)
