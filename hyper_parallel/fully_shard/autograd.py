"""The autograd node on a unit's inputs that tells when its gradients are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hyper_parallel.fully_shard.state import UnitState

__all__ = ["PostBackward"]


class PostBackward(torch.autograd.Function):
    """The identity in forward; its backward runs the unit's post-backward."""

    @staticmethod
    def forward(unit: UnitState, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Returns the inputs."""
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Remembers the unit."""
        ctx.unit = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Returns the gradients."""
        ctx.unit.post_backward()
        return (None, *grads)
