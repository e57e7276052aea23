"""Turning a module's parameters into DTensors with one combined placement, and nothing else about the module."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_compile.state import ParamState, contiguous_stride
from hyper_parallel.errors import HPCompileError, PlacementError
from hyper_parallel.groups import get_group_info, get_inner_group_info
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import Policy


def check_parameters(
    module: nn.Module, plans: Mapping[str, ParamPlan], device: torch.device
) -> None:
    """Everything that can be wrong with the parameters, before any is touched.

    Raises:
        PlacementError: DTensor parameters, a model partly on meta or on another accelerator.
        HPCompileError: a gradient is set, or an optimizer already holds state for a parameter.
    """
    params = dict(module.named_parameters())
    tensors = {**params, **dict(module.named_buffers())}
    sharded = [f for f, p in params.items() if isinstance(p, DTensor)]
    if sharded:
        raise PlacementError(
            f"{_names(sharded)} already a DTensor: shard takes a plain model and applies FSDP, TP and EP together; "
            "give the tensor-parallel plan as Policy(tp_plan=...) instead of calling parallelize_module or fully_shard"
        )
    meta = [f for f, p in params.items() if p.is_meta and not plans[f].ignored]
    real = [f for f, p in params.items() if not p.is_meta and not plans[f].ignored]
    if meta and real:
        raise PlacementError(
            f"the model is partly on the meta device: {_names(meta)} on meta, but {_names(real)} on {params[real[0]].device}; "
            "build all of it on meta and call to_empty after shard, or build all of it with real weights"
        )
    foreign = [f for f, t in tensors.items() if t.device.type not in ("meta", "cpu", device.type)]
    if foreign:
        raise PlacementError(
            f"{_names(foreign)} on {tensors[foreign[0]].device}, but the mesh is on {device.type!r}; move the model to CPU "
            f"or to {device.type!r} before shard"
        )
    graded = [f for f, p in params.items() if p.grad is not None]
    if graded:
        raise HPCompileError(
            f"{_names(graded)} has a gradient; call zero_grad(set_to_none=True) before shard, or finish the step first"
        )
    _check_optimizers(params)


def _names(fqns: list[str]) -> str:
    shown = ", ".join(fqns[:4])
    return f"{shown}, … ({len(fqns)} in all)" if len(fqns) > 4 else shown


def _check_optimizers(params: Mapping[str, nn.Parameter]) -> None:
    """A DTensor cannot take over the identity of a plain Parameter, so an optimizer from before would train nothing."""
    if _stale_optimizers(params):
        gc.collect()  # an optimizer that nobody holds any more may wait for the collector
    for optimizer, held in _stale_optimizers(params):
        raise HPCompileError(
            f"{type(optimizer).__name__} holds {_names(held)} from before shard and would go on updating the full tensors "
            "that the model no longer uses; build the optimizer after shard (its old state can be loaded with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict)"
        )


def _stale_optimizers(
    params: Mapping[str, nn.Parameter],
) -> list[tuple[torch.optim.Optimizer, list[str]]]:
    by_id = {id(p): fqn for fqn, p in params.items()}
    found = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer):
            groups = getattr(candidate, "param_groups", ())
            held = [by_id[id(p)] for g in groups for p in g["params"] if id(p) in by_id]
            if held:
                found.append((candidate, held))
    return found


def make_groups(
    mesh: DeviceMesh, layout: MeshLayout, policy: Policy, plans: Mapping[str, ParamPlan]
) -> None:
    """Creates the process groups that the plans use, in one order on all ranks."""
    inner = policy.reshard_after_forward
    if inner is not None and not isinstance(inner, bool):
        for group in sorted({p.shard_axes for p in plans.values() if p.shard_size > 1}):
            if layout.size(group) % inner == 0:
                get_inner_group_info(mesh, layout, group, inner)
    axes = {p.shard_axes for p in plans.values()} | {p.replica_axes for p in plans.values()}
    for group in sorted(axes):
        get_group_info(mesh, layout, group)


def convert_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    layout: MeshLayout,
    policy: Policy,
    plans: Mapping[str, ParamPlan],
    device: torch.device,
) -> dict[str, ParamState]:
    """Replaces each parameter by its shard, one at a time, under all its names.

    Args:
        module: the module.
        mesh: the user's mesh.
        layout: the mesh as a value.
        policy: the policy.
        plans: plan of every parameter.
        device: device of this rank.
    """
    states: dict[str, ParamState] = {}
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, value in owner._parameters.items():
            sites.setdefault(id(value), []).append((owner, attribute))
    for fqn, param in list(module.named_parameters()):
        plan = plans[fqn]
        path, _, name = fqn.rpartition(".")
        state = ParamState(plan, module.get_submodule(path), name, mesh)
        states[fqn] = state
        if plan.ignored:
            continue
        with torch.no_grad():
            local = _local_shard(param, plan, device, state)
            if policy.sync_weights and not local.is_meta:
                sync_replicas(local, mesh, layout, plan)
            replacement = nn.Parameter(state.to_dtensor(local), requires_grad=param.requires_grad)
        for key, value in vars(param).items():
            if not hasattr(replacement, key):
                setattr(replacement, key, value)
        for owner, attribute in sites[id(param)]:
            owner._parameters[attribute] = replacement
    for buffer_owner in module.modules():
        for name, buffer in buffer_owner._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffer_owner._buffers[name] = buffer.to(device)
    return states


def _local_shard(
    param: torch.Tensor, plan: ParamPlan, device: torch.device, state: ParamState
) -> torch.Tensor:
    """This rank's slice in fresh memory, so that the full tensor can be freed."""
    target = param.device if param.is_meta else device
    full = param.detach()
    if plan.shard_dim is None:
        return full.to(target, copy=True).contiguous()
    start = sum(plan.lengths[: plan.shard_index])
    rows = plan.lengths[plan.shard_index]
    piece = full.narrow(plan.shard_dim, min(start, full.size(plan.shard_dim)), rows)
    return state.place(piece.to(target))


def sync_replicas(
    local: torch.Tensor, mesh: DeviceMesh, layout: MeshLayout, plan: ParamPlan
) -> None:
    """Broadcasts a slice from the first rank of its unsharded group."""
    group = get_group_info(mesh, layout, plan.replica_axes)
    if group.group is not None:
        dist.broadcast(local, src=plan.unsharded_ranks[0], group=group.group)


__all__ = [
    "check_parameters",
    "contiguous_stride",
    "convert_parameters",
    "make_groups",
    "sync_replicas",
]
