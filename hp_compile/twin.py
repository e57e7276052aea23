"""The fake twin: a deep copy of the user's module that costs no memory and that capture may do anything with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_compile.effects import MODULE_ATTRIBUTES, attribute_tensors, joined
from hp_compile.explain import attribute_line
from hyper_parallel.errors import CaptureError
from hyper_parallel.torch_compat import graph as compat


def fake_twin(
    module: nn.Module,
    original_class: type,
    mode: Any,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    ignored: frozenset[int],
) -> nn.Module:
    """A deep copy whose parameters and buffers are fake; the module and its weights are not touched.

    Args:
        module: the user's module, sharded or not, on any device.
        original_class: class whose ``forward`` is captured.
        mode: fake tensor mode.
        device: device of the mesh.
        precision: parameters get ``param_dtype`` here, as they have when they are used.
        ignored: ids of parameters that keep their dtype.

    Raises:
        CaptureError: an attribute cannot be copied, a parameter hides in a Python container, or a submodule has a gradient
            hook.
    """
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for param in module.parameters():
            dtype = param.dtype
            if precision.param_dtype is not None and dtype.is_floating_point:
                dtype = dtype if id(param) in ignored else precision.param_dtype
            memo[id(param)] = compat.fake_parameter(mode, param, device, dtype)
        for buffer in module.buffers():
            memo[id(buffer)] = compat.fake_like(mode, buffer, device, buffer.dtype)
    _refuse_hidden_parameters(module)
    _refuse_gradient_hooks(module)
    twin = _copy_root(module, original_class, memo)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(twin, name).clear()  # the root's own hooks run around the program, not in it
    return twin


def _copy_root(module: nn.Module, original_class: type, memo: dict[int, Any]) -> nn.Module:
    """Deep copy of the root as its original class, without the runtime that ``shard`` attached.

    References to the root from below (a parent pointer, a hook's bound method) lead to the copy.
    """
    twin: nn.Module = object.__new__(original_class)
    memo[id(module)] = twin
    kept = dict(memo)
    for name, value in module.__dict__.items():
        if name == "_hp_runtime" or "load_state_dict" in name:
            continue
        try:
            twin.__dict__[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise CaptureError(_copy_error(module, kept, error)) from error
    fresh = nn.Module()
    for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        twin.__dict__[name] = fresh.__dict__[name]
    return twin


def _copy_error(module: nn.Module, memo: dict[int, Any], error: Exception) -> str:
    """Names the attribute that cannot be copied."""
    where = f"an attribute of {type(module).__name__}"
    for fqn, sub in module.named_modules():
        for name, value in sub.__dict__.items():
            if name in MODULE_ATTRIBUTES:
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except (
                Exception
            ):  # any error: the first attribute that cannot be copied is the one to name
                line = attribute_line(sub, name)
                where = f"attribute {joined(fqn, name)!r} ({type(value).__name__}{f', {line}' if line else ''})"
                return _cannot_copy(where, error)
    return _cannot_copy(where, error)


def _cannot_copy(where: str, error: Exception) -> str:
    return (
        f"cannot copy {where} for capture: {type(error).__name__}: {error}\nKeep such an object outside the module, or give "
        "its class a __deepcopy__ (for example one that returns the object itself)"
    )


def _refuse_hidden_parameters(module: nn.Module) -> None:
    """A trainable tensor in a list, dict or object would be baked in as a constant and never trained."""
    known = {id(p) for p in module.parameters()} | {id(b) for b in module.buffers()}
    for fqn, sub, where, tensor in attribute_tensors(module):
        trained = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        if trained and id(tensor) not in known:
            line = attribute_line(sub, where)
            raise CaptureError(
                f"{joined(fqn, where)}{f' ({line})' if line else ''} is a parameter held in a Python container, so capture "
                "would turn it into a constant that is never trained\nRegister it: use nn.ParameterList, nn.ParameterDict "
                "or nn.ModuleList, or assign it as an attribute of a module"
            )


def _refuse_gradient_hooks(module: nn.Module) -> None:
    for fqn, sub in module.named_modules():
        if fqn and (sub._backward_hooks or sub._backward_pre_hooks):
            raise CaptureError(
                f"cannot capture module {fqn!r}: it has a backward hook (register_full_backward_hook), and a program has no "
                "gradient hooks\nRemove the hook, or hook the root module or the parameters"
            )


__all__ = ["fake_twin"]
