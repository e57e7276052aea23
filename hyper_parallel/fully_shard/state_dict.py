"""State dicts of sharded models: as slices or in full, from all ranks or from rank 0.

The signatures and the options are those of ``torch.distributed.checkpoint.state_dict``. Full
tensors are gathered, sliced and broadcast one at a time, so no rank holds two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hyper_parallel.errors import PlacementError, PolicyError
from hyper_parallel.fully_shard.load import to_sharded_value
from hyper_parallel.fully_shard.param import HSDPParam

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

__all__ = ["get_model_state_dict", "set_model_state_dict"]


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Returns the model's state dict under the plain model's keys.

    Collective if ``options.full_state_dict`` is set.

    Args:
        model: A model with units of ``fully_shard``, or a plain one.
        options: ``full_state_dict`` gathers full tensors; ``cpu_offload`` moves the result to the
            CPU, and together with ``full_state_dict`` only rank 0 gets it, the others an empty
            dict; ``ignore_frozen_params`` leaves out parameters that are not trained.

    Returns:
        DTensors (plain tensors for what is not sharded), or full plain tensors.

    Example:
        >>> full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    """
    options = _options(options)
    frozen = _frozen_keys(model) if options.ignore_frozen_params else set()
    keeps = not (options.full_state_dict and options.cpu_offload) or _is_rank_0()
    result: dict[str, Any] = {}
    done: dict[int, Any] = {}  # a tied parameter is gathered once
    for key, value in model.state_dict().items():
        if key in frozen:
            continue
        if isinstance(value, Tensor):
            if id(value) not in done:
                held = value
                done[id(held)] = _export(value, options, keeps)
            value = done[id(value)]
        if keeps:
            result[key] = value
    return result


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Loads a state dict into the model.

    Parameters on the meta device are given memory. Collective if ``options.broadcast_from_rank0``
    is set or a DTensor of another layout is loaded.

    Args:
        model: A model with units of ``fully_shard``, or a plain one.
        model_state_dict: DTensors, full tensors (equal on all ranks), or local slices; with
            ``broadcast_from_rank0`` only rank 0 needs it.
        options: ``broadcast_from_rank0`` takes full tensors from rank 0; ``strict`` wants all keys
            and no other; ``ignore_frozen_params`` does without those of frozen parameters.

    Returns:
        What ``load_state_dict`` returns: missing and unexpected keys.

    Raises:
        PlacementError: A tensor of another shape.
        PolicyError: ``broadcast_from_rank0`` without ``full_state_dict``.
        RuntimeError: Keys are missing or unexpected, and ``strict`` is set.
    """
    options = _options(options)
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise PolicyError(
            "set_model_state_dict: broadcast_from_rank0 sends full tensors, so it needs "
            "full_state_dict=True"
        )
    params = dict(_named_hsdp_params(model))
    targets = model.state_dict()
    state = dict(model_state_dict)
    if options.broadcast_from_rank0:
        state = _broadcast(targets, params, state)
    else:
        for key, value in state.items():
            if key in targets and isinstance(value, Tensor):
                state[key] = _import(key, value, targets[key], params.get(key))
    missing = set(targets) - set(state)
    strict = options.strict
    if strict and missing and options.ignore_frozen_params:
        strict = not missing <= _frozen_keys(model)
    assign = any(isinstance(v, Tensor) and v.is_meta for v in targets.values())
    flags = {key: p.requires_grad for key, p in model.named_parameters(remove_duplicate=False)}
    result = model.load_state_dict(state, strict=strict, assign=assign)
    for key, param in model.named_parameters(remove_duplicate=False):
        param.requires_grad_(flags[key])
    return result


def _options(options: StateDictOptions | None) -> Any:
    if options is not None:
        return options
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions()


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _frozen_keys(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {key for key, param in named if not param.requires_grad}


def _named_hsdp_params(model: nn.Module) -> Iterator[tuple[str, HSDPParam]]:
    """Yields the HSDPParam of every key, whoever made it."""
    found: dict[int, HSDPParam] = {}
    for module in model.modules():
        hsdp_params = getattr(module, "hsdp_params", None)
        if callable(hsdp_params):
            for param in hsdp_params():
                found[id(param.sharded_param)] = param
                found[id(param.registered_param)] = param
    for key, registered in model.named_parameters(remove_duplicate=False):
        if id(registered) in found:
            yield key, found[id(registered)]


def _export(value: Tensor, options: Any, keeps: bool) -> Tensor:
    if options.full_state_dict and isinstance(value, DTensor):
        value = value.full_tensor()
    value = value.detach()
    if options.cpu_offload and keeps and value.device.type != "cpu":
        return value.cpu()
    return value.clone() if options.full_state_dict and keeps else value


def _import(key: str, value: Tensor, target: Any, param: HSDPParam | None) -> Tensor:
    if param is not None:
        return to_sharded_value(param, key, value)
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        _check_shape(key, value, target)
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    return value


def _check_shape(key: str, value: Tensor, target: Tensor) -> None:
    if value.shape != target.shape:
        raise PlacementError(
            f"{key}: cannot load a tensor of shape {tuple(value.shape)}; expected the full shape "
            f"{tuple(target.shape)}"
        )


def _broadcast(
    targets: Mapping[str, Any], params: Mapping[str, HSDPParam], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Sends rank 0's tensors to all ranks, which keep their slices."""
    header: list[Any] = [None]
    if dist.get_rank() == 0:
        # Checked on rank 0 and told to all, so that no rank waits for one that raised.
        header = [_broadcast_header(targets, state)]
    dist.broadcast_object_list(header, src=0)
    keys, others, error = header[0]
    if error is not None:
        raise PlacementError(error)
    result: dict[str, Any] = dict(others)
    for key, dtype in keys:
        target = targets[key]
        device = target.device if isinstance(target, Tensor) else torch.device("cpu")
        param = params.get(key)
        if param is not None:
            device = param.device
        elif device.type == "meta":
            device = _any_device(params)
        full = torch.empty(tuple(target.shape), dtype=dtype, device=device)
        if dist.get_rank() == 0:
            full.copy_(state[key])
        dist.broadcast(full, src=0)
        result[key] = _import(key, full, target, param)
    return {key: result[key] for key in targets if key in result} | result


def _broadcast_header(
    targets: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[list[tuple[str, torch.dtype]], dict[str, Any], str | None]:
    keys: list[tuple[str, torch.dtype]] = []
    others: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or key not in targets:
            others[key] = value if not isinstance(value, Tensor) else torch.empty(0)
            continue
        try:
            if isinstance(value, DTensor):
                return [], {}, f"{key}: rank 0 must hold full plain tensors, got a DTensor"
            _check_shape(key, value, targets[key])
        except PlacementError as error:
            return [], {}, str(error)
        keys.append((key, value.dtype))
    return keys, others, None


def _any_device(params: Mapping[str, HSDPParam]) -> torch.device:
    return next((param.device for param in params.values()), torch.device("cpu"))
