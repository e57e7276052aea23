"""The two calls of this package: ``shard`` and ``plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_compile import build, check, convert, loading
from hp_compile.agree import Board
from hp_compile.module import extend_class, is_sharded
from hp_compile.plan import Plan
from hp_compile.runtime import Runtime
from hp_compile.signature import flatten_call
from hp_compile.state import Home
from hp_compile.units import resolve_units
from hyper_parallel.errors import HPCompileError, MeshError, PolicyError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan, plan_params
from hyper_parallel.policy import Policy
from hyper_parallel.tensor_parallel import resolve_tp_plan
from passes.verify import verify_against


def shard(model: nn.Module, mesh: DeviceMesh, policy: Policy | None = None) -> nn.Module:
    """Shards a model in place: its parameters become DTensors with one combined placement, its forward a program.

    Args:
        model: any module that ``torch.export`` can trace, on CPU, on the mesh's device, or on meta.
        mesh: device mesh; the roles of its dims come from ``policy.roles`` or their names.
        policy: how to shard; ``Policy()`` by default.

    Returns:
        The same object; its class now also is ``ShardedModule``.

    Raises:
        MeshError: the mesh does not fit, or this rank is not in it.
        PolicyError: a policy field does not fit the model or mesh.
        PlacementError: a parameter cannot be placed.
        HPCompileError: the model is sharded already, holds gradients, or an optimizer has state for it.

    Example:
        >>> model = hp_compile.shard(model, mesh, Policy(reshard_after_forward=True))  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters())  # doctest: +SKIP
    """
    policy = _checked(model, mesh, policy)
    if is_sharded(model):
        raise HPCompileError(
            f"{type(model).__name__} is already sharded; shard takes a plain model, once. Build a new model to change mesh or "
            "policy"
        )
    check.check_module(model)
    layout = MeshLayout.from_mesh(mesh, policy.roles)
    board = Board(layout)
    original = type(model)
    try:
        tp = resolve_tp_plan(model, policy.tp_plan, layout)
        plans = plan_params(model, layout, policy, mp=tp.by_axis if tp else None)
        check.warn_if_not_parallel(layout, plans)
        units = resolve_units(model, policy.units)
        home = Home.of(_device(mesh), policy.offload_policy)
        check.check_parameters(model, plans, home.device)
        extend_class(model)
        convert.make_groups(mesh, layout, policy, plans, board, tp)
        states = convert.convert_parameters(model, mesh, layout, plans, home)
    except BaseException as error:
        model.__class__ = original
        board.post_failure("groups", error)
        board.post_failure("program", error)
        raise
    runtime = Runtime(
        model, original, mesh, layout, policy, plans, units, states, home.device, board, tp
    )
    model._hp_runtime = runtime  # type: ignore[assignment]
    loading.attach(model, states)
    runtime.sync_weights()
    return model


def plan(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: Policy | None = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Plan:
    """Plans a step without weights, GPU or communication; the model stays as it is.

    Args:
        model: a plain, meta or sharded module.
        mesh: device mesh; a mesh on the fake process group plans any world size.
        policy: the policy.
        args: example inputs; only structure, shapes and dtypes are read. Without any, the plan knows parameters only.
        kwargs: example keyword inputs.

    Raises:
        MeshError, PolicyError, PlacementError: as for :func:`shard`.
        CaptureError: the forward cannot be captured.

    Example:
        >>> print(hp_compile.plan(model, mesh, policy, args=(tokens,)).dump())  # doctest: +SKIP
    """
    policy = _checked(model, mesh, policy)
    if not isinstance(args, tuple | list):
        raise HPCompileError(
            f"args: expected a tuple of positional inputs, got {type(args).__name__}; write args=(inputs,)"
        )
    layout = MeshLayout.from_mesh(mesh, policy.roles)
    runtime: Runtime | None = getattr(model, "_hp_runtime", None)
    original = type(model) if runtime is None else runtime.original_class
    if runtime is not None and (layout, policy) != (runtime.layout, runtime.policy):
        # Shapes are those of the plain model, so a sharded one can be planned for another mesh too.
        tp = resolve_tp_plan(model, policy.tp_plan, layout)
        plans: Mapping[str, ParamPlan] = plan_params(
            model, layout, policy, mp=tp.by_axis if tp else {}
        )
        runtime = None
    elif runtime is not None:
        tp, plans = runtime.tensor_parallel, runtime.current_plans()
    else:
        check.check_module(model)
        tp = resolve_tp_plan(model, policy.tp_plan, layout)
        plans = plan_params(model, layout, policy, mp=tp.by_axis if tp else None)
    units = resolve_units(model, policy.units)
    if not args and not kwargs:
        return Plan(layout, policy, plans, None, None)
    signature, tensors = flatten_call(tuple(args), dict(kwargs or {}))
    trains = any(p.requires_grad for p in plans.values()) or any(t.requires_grad for t in tensors)
    if runtime is not None:
        # The model's own program, which its first call then finds instead of capturing again.
        with torch.inference_mode(False), torch.set_grad_enabled(trains):
            own = runtime.program(signature, tensors)
        return Plan(layout, policy, own.params, own, signature)
    program = build.build_program(
        model,
        signature,
        tensors,
        original_class=original,
        layout=layout,
        policy=policy,
        plans=plans,
        units=units,
        reshard=build.reshard_map(policy, units),
        device=torch.device(mesh.device_type),
        grad=trains,
        tensor_parallel=tp,
    )
    return Plan(layout, policy, program.params, program, signature)


def verify(graph_module: fx.GraphModule, plan: Plan) -> None:
    """Proves one program against a plan.

    Args:
        graph_module: a forward, backward or inference program.
        plan: the plan it claims to implement.

    Raises:
        HPCompileError: an argument is of another type.
        VerificationError: some gradient is not reduced exactly once over every axis, or a collective is wrong.
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise HPCompileError(
            f"graph_module: expected a torch.fx.GraphModule, got {type(graph_module).__name__}"
        )
    if not isinstance(plan, Plan):
        raise HPCompileError(f"plan: expected an hp_compile.Plan, got {type(plan).__name__}")
    verify_against(graph_module, plan.graphs)


def _checked(model: object, mesh: object, policy: object) -> Policy:
    if not isinstance(model, nn.Module):
        raise HPCompileError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__} {mesh!r}")
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"policy: expected an hp_compile.Policy, got {type(policy).__name__} {policy!r}"
        )
    if policy.loss_parallel and policy.tp_plan is None:
        raise PolicyError(
            "Policy.loss_parallel: nothing cuts the logits without a tp_plan; pass one, or leave loss_parallel False"
        )
    if policy.ep_plan is not None:
        raise PolicyError(
            "Policy.ep_plan: the expert-parallel pass is not part of this version; leave it None (an ep dim then holds equal "
            "copies), and nothing is silently left out"
        )
    return policy


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())
