"""Turning a module's parameters into DTensors with one combined placement, and nothing else about the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_compile.agree import Board
from hp_compile.plan import program_facts
from hp_compile.state import Home, ParamState
from hyper_parallel.groups import get_group_info, get_inner_group_info
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan, copy_axes
from hyper_parallel.policy import Policy
from hyper_parallel.tensor_parallel import TensorParallelPlan


@dataclass(frozen=True)
class _Wanted:
    """A process group: along mesh dims, or (``inner`` > 0) of that many consecutive ranks inside it."""

    axes: tuple[str, ...]
    inner: int = 0

    def __str__(self) -> str:
        return "×".join(self.axes) + (f" in groups of {self.inner}" if self.inner else "")


def make_groups(
    mesh: DeviceMesh,
    layout: MeshLayout,
    policy: Policy,
    plans: Mapping[str, ParamPlan],
    board: Board,
    tensor_parallel: TensorParallelPlan | None = None,
) -> None:
    """Creates the process groups that the plans use, in one order on all ranks.

    Making a group that the mesh does not have waits for the ranks in it, so before that the ranks compare which ones
    they want.

    Args:
        mesh: the user's mesh.
        layout: the mesh as a value.
        policy: the policy.
        plans: plan of every parameter.
        board: where the ranks of this model compare notes.
        tensor_parallel: the tensor-parallel plan, if there is one.

    Raises:
        VerificationError: ranks want different groups.
    """
    wanted = _wanted_groups(layout, policy, plans)
    if tensor_parallel is not None:
        wanted.append(_Wanted((tensor_parallel.axis,)))
    lines = [*program_facts(layout, policy, None, params={}), *(f"group over {g}" for g in wanted)]
    board.post("groups", lines)
    if any(w.inner > 1 or sum(layout.size(a) > 1 for a in w.axes) > 1 for w in wanted):
        board.compare("groups", lines)
    for group in wanted:
        if group.inner:
            get_inner_group_info(mesh, layout, group.axes, group.inner)
        else:
            get_group_info(mesh, layout, group.axes)


def _wanted_groups(
    layout: MeshLayout, policy: Policy, plans: Mapping[str, ParamPlan]
) -> list[_Wanted]:
    cut = sorted({p.shard_axes for p in plans.values() if p.shard_size > 1})
    inner = policy.reshard_after_forward
    found = []
    if inner is not None and not isinstance(inner, bool):
        found += [_Wanted(axes, inner) for axes in cut if layout.size(axes) % inner == 0]
    axes = {p.shard_axes for p in plans.values()} | {p.replica_axes for p in plans.values()}
    return found + [_Wanted(group) for group in sorted(axes)]


def convert_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    layout: MeshLayout,
    plans: Mapping[str, ParamPlan],
    home: Home,
) -> dict[str, ParamState]:
    """Replaces each parameter by its shard, one at a time, under all its names.

    Only the slice is moved to the mesh's device, and a full parameter is let go before the next one is cut.

    Args:
        module: the module.
        mesh: the user's mesh.
        layout: the mesh as a value.
        plans: plan of every parameter.
        home: where shards live.
    """
    sites = _sites(module)
    held = _held_in_containers(module, {id(p) for p in module.parameters()})
    names = {id(p): fqn for fqn, p in module.named_parameters()}
    states = {
        fqn: ParamState(plans[fqn], tuple(sites[key]), mesh, layout, home)
        for key, fqn in names.items()
    }
    for key, fqn in names.items():
        state = states[fqn]
        if state.plan.ignored:
            continue
        replacement = _sharded(state.param, state)
        for container, index in held.get(key, ()):
            container[index] = replacement
        state.register(replacement)
    move_buffers(module, home.device)
    return states


def _sharded(param: nn.Parameter, state: ParamState) -> nn.Parameter:
    """The shard as a parameter, with what the user noted on the full one."""
    with torch.no_grad():
        local = state.place(state.take(param.detach()))
        replacement = nn.Parameter(state.to_dtensor(local), requires_grad=param.requires_grad)
    for key, value in vars(param).items():
        if not hasattr(replacement, key):
            setattr(replacement, key, value)
    return replacement


def _sites(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter is registered, by its id; the first place gives its first name."""
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                sites.setdefault(id(param), []).append((owner, name))
    return sites


def _held_in_containers(module: nn.Module, params: set[int]) -> dict[int, list[tuple[Any, Any]]]:
    """Registered parameters that a list or dict attribute holds too, by id: they must follow the module.

    Example: ``self.weights = [self.a, self.b]`` beside the registered ``a`` and ``b``.
    """
    found: dict[int, list[tuple[Any, Any]]] = {}

    def visit(value: object, depth: int) -> None:
        for index, item in _items(value):
            if id(item) in params:
                found.setdefault(id(item), []).append((value, index))
            elif depth < 4:
                visit(item, depth + 1)

    registries = nn.Module().__dict__.keys()
    for owner in module.modules():
        for name, value in owner.__dict__.items():
            if name not in registries:
                visit(value, 0)
    return found


def _items(value: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves buffers to the mesh's device; one that several modules share stays shared.

    Args:
        module: the module.
        device: device of this rank.
    """
    moved: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta or buffer.device == device:
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            owner._buffers[name] = moved[id(buffer)]


def sync_replicas(mesh: DeviceMesh, layout: MeshLayout, states: Mapping[str, ParamState]) -> None:
    """Broadcasts every shard from the first of the ranks that should hold the same: its replicas, and tp or ep copies.

    Args:
        mesh: the user's mesh.
        layout: the mesh as a value.
        states: state of every parameter, in one order on all ranks.
    """
    for state in states.values():
        local = state.local()
        if state.plan.ignored or not local.numel():
            continue
        wire = local.to(state.home.device)
        # One dim after the other, so that the groups of the mesh are enough.
        for axis in copy_axes(state.plan, layout):
            group = get_group_info(mesh, layout, axis).group
            dist.broadcast(wire, group=group, group_src=0)
        if wire is not local:
            local.copy_(wire)
