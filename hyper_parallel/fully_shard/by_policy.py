"""A whole model by one Policy: what ``hp_compile.shard`` falls back to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.errors import PolicyError
from hyper_parallel.fully_shard.api import fully_shard, shard_unit
from hyper_parallel.fully_shard.module import HSDPModule
from hyper_parallel.fully_shard.registry import unit_of
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import Policy

__all__ = ["adopt_by_policy", "fully_shard_by_policy"]


def fully_shard_by_policy(
    model: nn.Module, mesh: DeviceMesh, policy: Policy, units: Sequence[str]
) -> HSDPModule:
    """Applies ``fully_shard`` to units and root as a policy says.

    ZeRO-2 keeps gathered parameters until the backward that ``set_is_last_backward(True)`` (the
    default) announces as the last one of the step.

    Args:
        model: The model.
        mesh: The mesh.
        policy: The policy; fields about programs (buckets, backend) do not apply.
        units: FQNs of the modules that become units, inner ones first.

    Raises:
        PolicyError: The policy wants a TP or EP plan applied, or no unit has such a name.

    Example:
        >>> fully_shard_by_policy(model, mesh, Policy.zero(3), ["blocks.0", "blocks.1"])
    """
    for name in ("tp_plan", "ep_plan"):
        if getattr(policy, name) is not None:
            raise PolicyError(
                f"Policy.{name}: the eager path does not apply plans; parallelize the model first "
                f"(torch.distributed.tensor.parallel.parallelize_module) and leave {name} None"
            )
    modules = dict(model.named_modules())
    unknown = [name for name in units if name not in modules]
    if unknown:
        raise PolicyError(f"Policy.units: no module is called {unknown[0]!r}")
    ignored = _ignored_params(model, policy)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": policy.reshard_after_forward,
        "shard_placement_fn": policy.shard_placement_fn,
        "mp_policy": policy.mp_policy,
        "offload_policy": policy.offload_policy,
        "ignored_params": ignored,
        "enable_param_shard": policy.enable_param_shard,
        "roles": policy.roles,
        "sync_weights": policy.sync_weights,
        "min_shard_numel": policy.min_shard_numel,
    }
    for module in [*(modules[name] for name in units if name), model]:
        fully_shard(module, **settings)
    return _finish(model, policy)


def adopt_by_policy(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: Policy,
    units: Sequence[str],
    plans: Mapping[str, ParamPlan],
) -> HSDPModule:
    """Gives a model whose parameters are shards already the eager path's units.

    Args:
        model: The model; its parameters have the combined placements of ``plans`` on ``mesh``.
        mesh: The mesh.
        policy: The policy that the parameters were sharded by.
        units: FQNs of the modules that become units, inner ones first.
        plans: Plan of every parameter by FQN.
    """
    modules = dict(model.named_modules())
    adopted = {id(param): plans[name] for name, param in model.named_parameters()}
    eager = replace(
        policy, ignored_params=[p for n, p in model.named_parameters() if plans[n].ignored]
    )
    for module in [*(modules[name] for name in units if name), model]:
        shard_unit([module], mesh, eager, adopted)
    return _finish(model, policy)


def _finish(model: nn.Module, policy: Policy) -> HSDPModule:
    sharded = cast(HSDPModule, model)
    sharded.set_reduce_op_type(policy.reduce_op)
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            unit.keep_until_last_backward = policy.zero_level == 2
    return sharded


def _ignored_params(model: nn.Module, policy: Policy) -> list[nn.Parameter]:
    """Resolves globs against the root's names: a unit would match them against its own."""
    wanted: Any = policy.ignored_params
    ignored = [item for item in wanted if not isinstance(item, str)]
    for glob in sorted(item for item in wanted if isinstance(item, str)):
        named = model.named_parameters(remove_duplicate=False)
        hits = [param for name, param in named if fnmatchcase(name, glob)]
        if not hits:
            raise PolicyError(f"Policy.ignored_params: {glob!r} matches no parameter")
        ignored += hits
    return ignored
