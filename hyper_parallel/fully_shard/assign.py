"""Hands a reduced slice to its parameter as ``.grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.fully_shard.param import HSDPParam
from hyper_parallel.fully_shard.streams import Streams
from hyper_parallel.torch_compat.eager import (
    dtensor_local,
    post_accumulate_grad_hooks,
    tensor_hooks,
)

__all__ = ["assign_gradient"]


def assign_gradient(param: HSDPParam, wire: Tensor, streams: Streams, stream: Any) -> None:
    """Casts, moves and accumulates; never writes to a gradient that was handed out before.

    Hooks of the parameter are given the reduced slice, as a DTensor.

    Args:
        param: The parameter.
        wire: This rank's flat part of the reduced gradient, padding included.
        streams: The streams of the model.
        stream: The stream that holds ``wire``.
    """
    geometry = param.geometry
    if param.orig_dtype.is_complex:
        parts = wire.view(-1, 2).to(param.orig_dtype.to_real())
        wire = torch.complex(parts[:, 0], parts[:, 1])
    grad = wire.view(param.plan.local_shape) if geometry is None else geometry.local_of_wire(wire)
    grad = grad.to(param.orig_dtype)
    sharded = param.sharded_param
    for hook in tensor_hooks(sharded):
        changed = hook(param.to_sharded_dtensor(grad))
        grad = grad if changed is None else dtensor_local(changed)
    hooks = post_accumulate_grad_hooks(sharded)
    accumulates = sharded.grad is not None
    if param.offload_to_cpu and grad.device.type != "cpu":
        # The copy overlaps unless something on the CPU reads the gradient inside backward.
        overlaps = param.pin_memory and not accumulates and not hooks
        grad = grad.to(torch.device("cpu"), non_blocking=overlaps)
        if overlaps:
            param.grad_offload_event = streams.event(stream)
    if sharded.grad is not None:
        grad = dtensor_local(sharded.grad) + grad
    sharded.grad = param.to_sharded_dtensor(grad)
    for hook in hooks:
        hook(sharded)
