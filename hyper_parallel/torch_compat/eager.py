"""Semi-private names of torch that the eager runtime needs: autograd engine, DTensor, foreach.

Checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as torch_optimizer

__all__ = [
    "all_gather_flat",
    "chunk_cat",
    "concatenate_meshes",
    "dtensor_from_local",
    "dtensor_local",
    "ensure_optimizer_step_pre_hook",
    "foreach_copy",
    "foreach_mul",
    "foreach_norm",
    "gradient_hooks",
    "hide_from_dynamo",
    "in_backward",
    "in_transform",
    "is_torch_fsdp_module",
    "outside_transforms",
    "post_accumulate_grad_hooks",
    "preserve_version_counter",
    "queue_backward_callback",
    "reduce_scatter_flat",
    "register_load_state_dict_pre_hook",
    "root_mesh",
    "set_dtensor_local",
    "set_module_parameter",
    "tensor_hooks",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_backward() -> bool:
    """Tells whether autograd runs a backward pass on this thread (a recomputation counts)."""
    return torch._C._current_graph_task_id() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Runs ``callback`` once, when the backward pass that runs now has ended."""
    Variable._execution_engine.queue_callback(callback)


def in_transform() -> bool:
    """Tells whether a ``torch.func`` transform such as ``grad`` or ``jvp`` runs."""
    return bool(torch._C._are_functorch_transforms_active())


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Suspends ``torch.func`` transforms such as ``jvp``: what is gathered is no part of them."""
    if in_transform():
        return torch._C._DisableFuncTorch()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def preserve_version_counter(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Lets writes to ``tensors`` go unnoticed by autograd: the values come back, not change."""
    normal = tuple(tensor for tensor in tensors if not tensor.is_inference())
    if not normal:
        return contextlib.nullcontext()
    return torch.autograd._unsafe_preserve_version_counter(normal)


def dtensor_from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> DTensor:
    """Wraps a local tensor without a check, a copy or an autograd node.

    Args:
        local: This rank's part.
        mesh: The mesh.
        placements: One placement a mesh dim.
        shape: The global shape; the global stride is the contiguous one.
    """
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[call-arg]


def dtensor_local(tensor: Tensor) -> Tensor:
    """Returns the very local tensor of a DTensor; of a plain tensor the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_dtensor_local(tensor: DTensor, local: Tensor) -> None:
    """Replaces the local tensor; shape and placements must stay as they are."""
    tensor._local_tensor = local


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Joins slices of one root mesh into one mesh with all their dims, in this order."""
    return DeviceMesh._concatenate(list(meshes))


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that ``mesh`` was sliced from; itself if it was not."""
    return mesh._get_root_mesh()


def set_module_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Registers a parameter under a name that the module has, without the checks of setattr."""
    if getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__:
        module._parameters[name] = param
    else:
        setattr(module, name, param)


def register_load_state_dict_pre_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Runs ``hook(state_dict, prefix, ...)`` before the module's own parameters are loaded."""
    module._register_load_state_dict_pre_hook(hook)


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Returns the hooks of ``register_post_accumulate_grad_hook``, in order."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def tensor_hooks(param: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Returns the hooks of ``register_hook``, in order."""
    return list((param._backward_hooks or {}).values())


def gradient_hooks(tensor: Tensor) -> bool:
    """Tells whether ``register_hook`` or ``register_post_accumulate_grad_hook`` was called on a leaf."""
    return bool(tensor._backward_hooks) or bool(post_accumulate_grad_hooks(tensor))


def ensure_optimizer_step_pre_hook(hook: Callable[..., None]) -> None:
    """Runs ``hook(optimizer, args, kwargs)`` before each step of any optimizer, registered once."""
    if hook not in torch_optimizer._global_optimizer_pre_hooks.values():
        torch_optimizer.register_optimizer_step_pre_hook(hook)


def is_torch_fsdp_module(module: nn.Module) -> bool:
    """Tells whether PyTorch's own ``fully_shard`` was applied to a module."""
    return isinstance(module, FSDPModule)


def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies every source into its target, casting where dtypes differ."""
    if targets:
        torch._foreach_copy_(targets, sources)


def foreach_mul(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies every tensor in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: list[Tensor], p: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Returns the p-norm of every tensor, computed in ``dtype``."""
    return list(torch._foreach_norm(tensors, p, dtype=dtype))


def chunk_cat(tensors: list[Tensor], chunks: int, out: Tensor) -> None:
    """Cuts every tensor on dim 0 and puts the i-th chunks, padded and flat, into row i of out."""
    torch._chunk_cat([t for t in tensors if t.numel()], 0, chunks, out=out)


def all_gather_flat(
    output: Tensor, input_: Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Gathers equal flat tensors of all ranks into one flat tensor."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, input_, group=group, async_op=async_op)


def reduce_scatter_flat(
    output: Tensor, input_: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Reduces a flat tensor and leaves every rank with its equal part."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, input_, op=op, group=group, async_op=async_op)


def hide_from_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes ``torch.compile`` of a wrapped module break the graph around a hook.

    Dynamo is not imported before something else does: it takes seconds.
    """

    @functools.wraps(function)
    def hidden(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disabled = torch._dynamo.disable(function, recursive=True, reason="hook of fully_shard")
        return disabled(*args, **kwargs)

    return hidden
