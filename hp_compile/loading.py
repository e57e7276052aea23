"""Loading: a sharded module takes DTensors, full tensors and local shards, each in its place.

Two hooks do it. The root's looks at every entry before anything is written and refuses a wrong shape. Then each module
that owns parameters converts its own entries just before they are copied, so at most one full tensor exists at a time
beside what the caller holds, and loading into a submodule works too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_compile.state import ParamState
from hyper_parallel.errors import HPCompileError
from hyper_parallel.torch_compat.distributed import local_tensor, split_factor_of
from hyper_parallel.torch_compat.eager import register_load_state_dict_pre_hook


def attach(model: nn.Module, states: Mapping[str, ParamState]) -> None:
    """Registers the hooks of a sharded model.

    Args:
        model: the model.
        states: state of every parameter.
    """
    by_owner: dict[nn.Module, list[tuple[str, ParamState]]] = {}
    for state in states.values():
        for owner, name in state.sites:
            by_owner.setdefault(owner, []).append((name, state))
    everywhere = [
        (prefix + name, state)
        for path, owner in model.named_modules(remove_duplicate=False)
        for prefix in [f"{path}." if path else ""]
        for name, state in by_owner.get(owner, ())
    ]
    _attach_check(model, everywhere)
    for owner, entries in by_owner.items():
        _attach_conversion(owner, entries)
        packed = [(name, state) for name, state in entries if is_packed(state)]
        if packed:
            _attach_refusal(owner, packed)


def _attach_check(model: nn.Module, entries: Sequence[tuple[str, ParamState]]) -> None:
    def check(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for fqn, state in entries:
            value = state_dict.get(prefix + fqn)
            if isinstance(value, torch.Tensor):
                check_shape(prefix + fqn, value, state)

    register_load_state_dict_pre_hook(model, check)


def _attach_conversion(owner: nn.Module, entries: Sequence[tuple[str, ParamState]]) -> None:
    def convert(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, state in entries:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor):
                check_shape(prefix + name, value, state)
                state_dict[prefix + name] = to_shard(value, state)

    def tie(*_: Any) -> None:
        """A load that assigns has made a new parameter: it takes the place under all names."""
        for name, state in entries:
            state.register(owner._parameters[name])  # type: ignore[arg-type]
            state.settle()

    register_load_state_dict_pre_hook(owner, convert)
    owner.register_load_state_dict_post_hook(tie)


def is_packed(state: ParamState) -> bool:
    """Whether tensor parallelism takes a slice of every block of the parameter, so that a rank's rows are not one range."""
    return any(split_factor_of(p) > 1 for p in state.plan.unsharded_placements)


def _attach_refusal(owner: nn.Module, entries: Sequence[tuple[str, ParamState]]) -> None:
    """Makes ``torch.distributed.checkpoint`` refuse packed parameters.

    It notes one offset and one size for each rank's slice of a DTensor, which several ranges do not fit into: a load would
    take the wrong rows without a word. A DTensor asks its local tensor first how it is to be saved and loaded.
    """

    def refuse(owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, _state in entries:
            value: object = state_dict.get(prefix + name)
            if isinstance(value, DTensor) and id(value) != id(owner._parameters.get(name)):
                local = local_tensor(value)
                for method in _CHECKPOINT_METHODS:
                    setattr(local, method, functools.partial(_refused, prefix + name))

    owner.register_state_dict_post_hook(refuse)


_CHECKPOINT_METHODS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def _refused(key: str, *_: Any) -> NoReturn:
    raise HPCompileError(
        f"{key}: tensor parallelism cuts every block of this packed weight, and torch.distributed.checkpoint knows one range "
        "of rows a rank only; use hp_compile.save_safetensors and load_safetensors, or a full state dict"
    )


def check_shape(key: str, value: torch.Tensor, state: ParamState) -> None:
    """Checks that an entry of a state dict can be loaded into a parameter.

    Args:
        key: key in the state dict.
        value: the entry.
        state: state of the parameter.

    Raises:
        ValueError: it has neither the full shape nor, as a plain tensor, the shape of this rank's shard.
    """
    plan = state.plan
    shape = tuple(value.shape)
    one_element = plan.shape == () and shape == (1,)  # nn.Module loads these too
    if shape == plan.shape or one_element:
        return
    if not isinstance(value, DTensor) and not plan.ignored and shape == plan.shard_shape:
        return
    local = (
        ""
        if plan.ignored
        else f" or, for a plain tensor, this rank's shard {list(plan.shard_shape)}"
    )
    raise ValueError(
        f"{key}: the state dict has shape {list(shape)}; expected the full shape {list(plan.shape)}{local}. Nothing was loaded"
    )


@torch.no_grad()
def to_shard(value: torch.Tensor, state: ParamState) -> torch.Tensor:
    """What ``nn.Module`` copies or assigns: the entry in the parameter's placement.

    Collective for a DTensor of another mesh or placement.

    Args:
        value: entry of a state dict, of a checked shape.
        state: state of the parameter.
    """
    plan = state.plan
    if isinstance(value, DTensor):
        same = value.device_mesh == state.mesh and value.placements == plan.placements
        if same and not plan.ignored:
            if value.device.type == state.home.storage.type:
                return value
            return state.to_dtensor(state.place(local_tensor(value)))
        value = value.full_tensor()
    if plan.shape == () and value.dim() == 1:
        value = value[0]
    if plan.ignored:
        return value
    rows = state.take(value) if tuple(value.shape) == plan.shape else value
    return state.to_dtensor(state.place(rows))
