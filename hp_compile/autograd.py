"""One call of a training program as one node of autograd, and what is kept between its two halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hp_compile.program import Program, sizes_of
from hyper_parallel.torch_compat.graph import release_saved_tensors
from passes.base import hint

if TYPE_CHECKING:
    from hp_compile.runtime import Runtime

#: Stands for a tensor among saved values; sizes and ``None`` (an LSTM saves some) are kept as they are.
_TENSOR = object()


class Like(NamedTuple):
    """What a missing tangent needs to become zeros."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def same_memory(value: object, other: torch.Tensor) -> bool:
    """Whether two values share storage."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return False
    return value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def alias_of_output(value: Any, flat: Sequence[torch.Tensor]) -> Any:
    """A saved value that is also an output becomes a view of it: autograd then sees when the caller changes it in place."""
    for output in flat:
        if same_memory(value, output):
            return output.detach().as_strided(value.size(), value.stride(), value.storage_offset())
    return value


def _can_have_gradient(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _take_saved(ctx: Any) -> list[Any]:
    """What forward saved, in a list that is its only owner, so backward frees each value after its last use."""
    tensors = iter(ctx.saved_tensors)
    saved = [
        next(tensors)
        if s is _TENSOR
        else next(tensors).as_strided(*s)
        if isinstance(s, _Window)
        else s
        for s in ctx.saved
    ]
    release_saved_tensors(ctx)
    return saved


def match_layout(tangent: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """The tangent in the strides that backward was traced for."""
    if traced.is_contiguous():
        return tangent.contiguous()
    strides = traced.stride()
    order = sorted(range(traced.dim()), key=lambda d: (-hint(strides[d]), d))
    inverse = [order.index(d) for d in range(len(order))]
    return tangent.permute(order).contiguous().permute(inverse)


class _Window(NamedTuple):
    """A saved value in the memory of an output: the output is saved, so autograd finds a change in place."""

    shape: Sequence[int]
    stride: Sequence[int]
    offset: int


def _as_outputs(
    saved: Sequence[Any], outputs: Sequence[torch.Tensor]
) -> tuple[list[Any], list[torch.Tensor]]:
    """What to note about each saved value, and the tensors to hand to ``save_for_backward``."""
    by_memory = {o.untyped_storage()._cdata: o for o in outputs}
    notes: list[Any] = []
    tensors: list[torch.Tensor] = []
    for value in saved:
        if not isinstance(value, torch.Tensor):
            notes.append(value)
            continue
        output = by_memory.get(value.untyped_storage()._cdata)
        if output is None or output.dtype != value.dtype:
            notes.append(_TENSOR)
            tensors.append(value)
        else:
            notes.append(_Window(value.shape, value.stride(), int(value.storage_offset())))
            tensors.append(output)
    return notes, tensors


class Call(torch.autograd.Function):
    """One call of a training program under autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, runtime: Runtime, program: Program, num_inputs: int, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Runs forward; ``values`` are the flat inputs, then every parameter that requires grad."""
        flat, saved = runtime.run_forward(program, values[:num_inputs])
        ctx.set_materialize_grads(False)
        ctx.runtime, ctx.program, ctx.num_inputs = runtime, program, num_inputs
        ctx.sizes = sizes_of(values[:num_inputs])
        ctx.outputs = [Like(v.shape, v.dtype, v.device) for v in flat]
        ctx.saved, tensors = _as_outputs(saved, flat)
        ctx.save_for_backward(*tensors)
        fixed = program.differentiable
        ctx.mark_non_differentiable(
            *(v for i, v in enumerate(flat) if i not in fixed or not _can_have_gradient(v))
        )
        return tuple(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Runs backward; returns the gradients in the order of ``forward``'s arguments."""
        runtime: Runtime = ctx.runtime
        grads, input_grads = runtime.run_backward(
            ctx.program, ctx.sizes, _take_saved(ctx), tangents, ctx.outputs
        )
        by_input = [input_grads.get(i) for i in range(ctx.num_inputs)]
        by_param = [
            state.to_grad(grads[fqn]) if fqn in grads else None
            for fqn, state in runtime.states.items()
            if state.param.requires_grad
        ]
        return (None, None, None, *by_input, *by_param)
