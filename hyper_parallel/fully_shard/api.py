"""``fully_shard`` and ``hsdp``: make a module, or several, one unit of sharded data parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from hyper_parallel.errors import MeshError, PolicyError
from hyper_parallel.fully_shard.discover import (
    check_modules,
    check_nothing_lost,
    discover,
    move_to_device,
    outermost,
)
from hyper_parallel.fully_shard.dtypes import check_reducible
from hyper_parallel.fully_shard.layouts import UnitLayouts
from hyper_parallel.fully_shard.load import register_state_dict_hooks
from hyper_parallel.fully_shard.module import HSDPModule
from hyper_parallel.fully_shard.optim import adopt_optimizers, note_replacement
from hyper_parallel.fully_shard.param import HSDPParam
from hyper_parallel.fully_shard.registry import set_unit, unit_of
from hyper_parallel.fully_shard.state import UnitState
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import MixedPrecisionPolicy, OffloadPolicy, Policy
from hyper_parallel.roles import MeshRoles

__all__ = ["fully_shard", "hsdp", "register_fsdp_forward_method"]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter | str] | None = None,
    enable_param_shard: bool | None = None,
    roles: Mapping[str, str | Sequence[str]] | MeshRoles | None = None,
    sync_weights: bool = False,
    min_shard_numel: int = 0,
) -> Any:
    """Shards the parameters below ``module`` and makes them one unit.

    A unit's parameters are gathered by one all-gather before forward and before backward, and
    their gradients reduced by one reduce-scatter and, over replicas, one all-reduce. Apply it from
    the inside out: parameters of inner units are left to them.

    Args:
        module: A module, or a list of modules that run together and become one unit.
        mesh: The mesh; all of it (dp, tp, ...) or the data dims only. All ranks in one dim by
            default. What its dims are for is read from their names, see ``docs/roles.md``.
        reshard_after_forward: True frees gathered parameters after forward and gathers them again
            for backward; False keeps them until backward; an int keeps them in slices over groups
            of that size. None is True for every unit but the root.
        shard_placement_fn: From a parameter to the ``Shard(dim)`` to cut; None is ``Shard(0)``.
        mp_policy: Dtypes of parameters, reductions and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps slices and gradients on the CPU.
        ignored_params: Parameters, or globs of their FQNs in ``module``, to leave alone.
        enable_param_shard: False never cuts parameters, only reduces their gradients; True needs a
            shard dim; None cuts if the mesh has a data dim.
        roles: What the mesh dims are for, where their names do not say it.
        sync_weights: Broadcast the slices from the first replica once, when they have values.
        min_shard_numel: Leave parameters with fewer elements whole.

    Returns:
        The same object(s); the class is extended: ``isinstance(module, HSDPModule)``.

    Raises:
        MeshError: The mesh does not fit.
        PolicyError: An argument has the wrong type or does not fit the mesh.
        PlacementError: A parameter cannot be placed as asked, or is tied to another unit's.
        ShardedStateError: A module is sharded already.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=mesh)
        >>> fully_shard(model, mesh=mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    check_modules(modules)
    modules = outermost(modules)
    policy = Policy(
        roles=cast(Any, roles),
        enable_param_shard=enable_param_shard,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=MixedPrecisionPolicy() if mp_policy is None else mp_policy,
        offload_policy=OffloadPolicy() if offload_policy is None else offload_policy,
        ignored_params=ignored_params,
        min_shard_numel=min_shard_numel,
        sync_weights=sync_weights,
    )
    if mesh is None:
        mesh = _default_mesh()
    shard_unit(modules, mesh, policy)
    return module


hsdp = fully_shard


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method run the unit's hooks like ``forward``; nothing for a module without a unit.

    Args:
        module: The module.
        method_name: The method, e.g. ``"generate"``.

    Raises:
        PolicyError: The module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    if not hasattr(module, method_name):
        raise PolicyError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}"
        )
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit.pre_forward(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:  # the unit must not stay gathered
            unit.fail_forward()
            raise
        return unit.post_forward(module, args, output)

    setattr(module, method_name, wrapped)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise MeshError(
            "fully_shard: pass a mesh, or call torch.distributed.init_process_group first to "
            "shard over all ranks"
        )
    accelerator = torch.accelerator.current_accelerator() if _has_accelerator() else None
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def shard_unit(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: Policy,
    adopted: Mapping[int, ParamPlan] | None = None,
) -> None:
    """Makes one unit of modules.

    Args:
        modules: The modules; what inner units manage already is theirs.
        mesh: The mesh.
        policy: The arguments of ``fully_shard`` as a policy.
        adopted: By ``id`` of the parameter, plans of parameters that are shards on ``mesh`` already; they are taken
            over as they are, so an optimizer that holds them stays right.
    """
    layouts = UnitLayouts(mesh, policy)
    device = _device_of(mesh)
    ignored = _ignored_ids(modules, policy)
    managed, left_alone, buffers = discover(modules, ignored)
    if adopted is None:
        check_nothing_lost(managed)  # every check before anything is touched
        plans = [layouts.plan(entry) for entry in managed]
    else:
        plans = [layouts.adopt(adopted[id(entry.param)]) for entry in managed]
    check_reducible([(entry.fqn, entry.param) for entry in managed], policy.mp_policy)
    move_to_device(managed, buffers, device)
    reshard = layouts.reshard_after_forward
    params = []
    for entry, plan in zip(managed, plans, strict=True):
        param = HSDPParam(
            entry.param,
            plan.plan,
            plan.mesh,
            plan.layout,
            policy.mp_policy,
            offload_policy=policy.offload_policy,
            slots=entry.slots,
            post_forward=plan.post_forward(),
            device=device,
            already_sharded=adopted is not None,
        )
        note_replacement(entry.param, param)
        params.append(param)
    unit = UnitState(
        modules,
        params,
        device=device,
        mp_policy=policy.mp_policy,
        offload_policy=policy.offload_policy,
        reshard_after_forward=reshard,
        sync_weights=policy.sync_weights,
        ignored=left_alone,
    )
    for module in modules:
        set_unit(module, unit)
        module.__class__ = extended_class(cast(Any, type(module)))
    register_state_dict_hooks(unit)
    adopt_optimizers()


def _ignored_ids(modules: Sequence[nn.Module], policy: Policy) -> frozenset[int]:
    wanted: Any = policy.ignored_params
    ignored = {id(item) for item in wanted if not isinstance(item, str)}
    for glob in sorted(item for item in wanted if isinstance(item, str)):
        hits = {
            id(param)
            for module in modules
            for name, param in module.named_parameters(remove_duplicate=False)
            if fnmatchcase(name, glob)
        }
        if not hits:
            raise PolicyError(f"ignored_params: {glob!r} matches no parameter below the module")
        ignored |= hits
    return frozenset(ignored)


@functools.cache
def extended_class(cls: Any) -> type[nn.Module]:
    """Returns ``HSDP<Orig>``: the class with HSDPModule before it."""
    return cast("type[nn.Module]", type(f"HSDP{cls.__name__}", (HSDPModule, cls), {}))
