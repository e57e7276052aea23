"""Loading: a sharded module takes DTensors, full tensors and local shards, each in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_compile.state import ParamState


def attach(model: nn.Module) -> None:
    """Registers the hook that turns entries of a state dict into what each parameter needs."""
    model.register_load_state_dict_pre_hook(_prepare)


def _prepare(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    runtime: Any = model._hp_runtime
    first = dict(model.named_parameters(remove_duplicate=False))
    by_param = {id(state.param): state for state in runtime.states.values()}
    replaced: dict[str, torch.Tensor] = {}
    for fqn, param in first.items():
        value = state_dict.get(prefix + fqn)
        state = by_param[id(param)]
        if isinstance(value, torch.Tensor) and not state.plan.ignored:
            replaced[prefix + fqn] = _entry(fqn, value, state)
    state_dict.update(replaced)


def _entry(fqn: str, value: torch.Tensor, state: ParamState) -> torch.Tensor:
    plan = state.plan
    shape = tuple(value.shape)
    if isinstance(value, DTensor):
        if shape != plan.shape:
            raise _mismatch(fqn, shape, state)
        if value.device_mesh == state.mesh and tuple(value.placements) != plan.placements:
            return value.redistribute(placements=plan.placements)
        if value.device_mesh != state.mesh:
            return _slice_of(value.full_tensor(), state)
        return value
    if shape == plan.shape:
        return _slice_of(value, state)
    if shape == plan.shard_shape:
        return state.to_dtensor(value.to(state.local().device))
    raise _mismatch(fqn, shape, state)


def _slice_of(full: torch.Tensor, state: ParamState) -> torch.Tensor:
    plan = state.plan
    if plan.shard_dim is None:
        local = full
    else:
        start = sum(plan.lengths[: plan.shard_index])
        rows = plan.lengths[plan.shard_index]
        local = full.narrow(plan.shard_dim, min(start, full.size(plan.shard_dim)), rows)
    return state.to_dtensor(local.to(state.local().device).contiguous())


def _mismatch(fqn: str, shape: tuple[int, ...], state: ParamState) -> ValueError:
    return ValueError(
        f"{fqn}: the state dict has shape {list(shape)}; expected the full shape {list(state.plan.shape)} or this rank's "
        f"shard {list(state.plan.shard_shape)}"
    )
