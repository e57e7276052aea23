"""What ``load_state_dict`` of a unit's modules accepts, and what ``state_dict`` sees."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import PlacementError
from hyper_parallel.fully_shard.param import HSDPParam
from hyper_parallel.fully_shard.state import UnitState
from hyper_parallel.torch_compat.eager import register_load_state_dict_pre_hook

__all__ = ["register_state_dict_hooks", "to_sharded_value"]


def register_state_dict_hooks(unit: UnitState) -> None:
    """Makes the unit's modules save slices, and load DTensors, full tensors or local slices."""
    by_module: dict[Any, list[tuple[str, HSDPParam]]] = {}
    for param in unit.params:
        for slot in param.slots:
            by_module.setdefault(slot.module, []).append((slot.name, param))

    for module, entries in by_module.items():
        module.register_state_dict_pre_hook(lambda *_: unit.to_sharded())

        def convert(
            state_dict: MutableMapping[str, Any],
            prefix: str,
            *_: Any,
            _entries: list[tuple[str, HSDPParam]] = entries,
        ) -> None:
            unit.to_sharded()
            for name, param in _entries:
                if not param.is_registered():
                    param.reset_sharded_param()
                value = state_dict.get(prefix + name)
                if isinstance(value, Tensor):
                    state_dict[prefix + name] = to_sharded_value(param, prefix + name, value)

        register_load_state_dict_pre_hook(module, convert)


@torch.no_grad()
def to_sharded_value(param: HSDPParam, key: str, value: Tensor) -> Tensor:
    """Brings a saved tensor into the parameter's placement.

    Args:
        param: The parameter to load into.
        key: The key in the state dict, for messages.
        value: A DTensor of the full shape, a plain full tensor (equal on all ranks; each keeps its
            part), or this rank's plain local slice.

    Raises:
        PlacementError: Another shape.
    """
    plan = param.plan
    shape = tuple(value.shape)
    if isinstance(value, DTensor):
        if shape != plan.shape:
            raise _wrong_shape(param, key, shape)
        if value.device_mesh == param.mesh and value.placements == plan.placements:
            return value
        if value.device_mesh == param.mesh:
            return value.redistribute(placements=plan.placements)
        return param.shard_like(value.full_tensor())
    if shape == plan.shape:
        return param.shard_like(value)
    if shape == plan.shard_shape:
        return param.to_sharded_dtensor(value.contiguous())
    raise _wrong_shape(param, key, shape)


def _wrong_shape(param: HSDPParam, key: str, shape: tuple[int, ...]) -> PlacementError:
    return PlacementError(
        f"{key}: cannot load a tensor of shape {shape}; expected the full shape "
        f"{param.plan.shape} or this rank's slice {param.plan.shard_shape}"
    )
