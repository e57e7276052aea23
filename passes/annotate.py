"""Annotate: replace AOTAutograd's descriptors by roles, and attach the plan to the program.

Contract: needs a graph fresh from capture. Provides a program (see ``passes.base``). No node is added or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hyper_parallel.errors import CaptureError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from passes.base import (
    COLLECTIVES,
    BufferInput,
    BufferUpdate,
    Comm,
    InputGrad,
    InputRole,
    InputUpdate,
    NoGrad,
    OutputRole,
    ParamGrad,
    ParamInput,
    ProgramInfo,
    TangentInput,
    UserInput,
    UserOutput,
    axes_of_group,
    finish,
    is_collective,
    module_path,
    output_node,
    set_info,
)
from passes.origin import record


def annotate(
    gm: fx.GraphModule,
    *,
    layout: MeshLayout,
    params: Mapping[str, ParamPlan],
    units: Mapping[str, str],
    unit_order: tuple[str, ...],
    updates: Mapping[int, str] | None = None,
    prefix: str = "module.",
) -> fx.GraphModule:
    """Attaches roles, parameter plans and units.

    Args:
        gm: graph from capture; changed in place and returned.
        layout: the mesh.
        params: plan of every parameter, in registration order.
        units: unit of every parameter.
        unit_order: unit names in registration order.
        updates: plain outputs that are the new value of a buffer, by index.
        prefix: what capture put before the FQNs of the user's module.

    Raises:
        CaptureError: forward changes a parameter in place.
    """
    dtypes: dict[str, torch.dtype] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            role = _input_role(node.meta.get("desc"), prefix)
            node.meta["role"] = role
            if isinstance(role, ParamInput):
                dtypes[role.fqn] = node.meta["val"].dtype
    _describe_collectives(gm, layout)
    out = output_node(gm)
    roles: list[OutputRole] = []
    flat = list(out.args[0])  # type: ignore[arg-type]
    for _, desc in zip(flat, out.meta["desc"], strict=True):
        made = _output_role(desc, prefix) if desc is not None else NoGrad()
        if isinstance(made, UserOutput) and made.index in (updates or {}):
            made = BufferUpdate((updates or {})[made.index])
        roles.append(made)
    out.meta["roles"] = tuple(roles)
    program = ProgramInfo(
        layout=layout,
        params=dict(params),
        units=dict(units),
        unit_order=unit_order,
        compute_dtypes=dtypes,
    )
    return record(finish(set_info(gm, program), "annotate"))


def _describe_collectives(gm: fx.GraphModule, layout: MeshLayout) -> None:
    """Gives the collectives of the model's own computation (tp, ep, cp) their Comm, read from the alias of their group."""
    for node in gm.graph.nodes:
        if not is_collective(node):
            continue
        axes = axes_of_group(node.args[-1], layout)
        if axes is None:
            raise CaptureError(
                f"forward runs the collective {node.target} itself; capture is single-device: leave communication to the "
                "policy"
            )
        roles = {role for axis in axes for role in layout.roles.of(axis)}
        purpose = next((p for p in ("ep", "tp", "cp") if p in roles), "tp")
        kind = COLLECTIVES[node.target]
        node.meta["comm"] = Comm(kind, axes, purpose, unit=module_path(node))


def _input_role(desc: Any, prefix: str) -> InputRole:
    """Role of an input from its descriptor; the class name is the field's own vocabulary."""
    match type(desc).__name__:
        case "ParamAOTInput":
            return ParamInput(desc.target.removeprefix(prefix))
        case "BufferAOTInput":
            return BufferInput(desc.target.removeprefix(prefix))
        case "PlainAOTInput":
            return UserInput(desc.idx)
        case "TangentAOTInput":
            return TangentInput(_output_role(desc.output, prefix))  # type: ignore[arg-type]
    raise CaptureError(f"capture produced an input that no pass understands: {desc}")


def _output_role(desc: Any, prefix: str) -> OutputRole:
    match type(desc).__name__:
        case "PlainAOTOutput":
            return UserOutput(desc.idx)
        case "InputMutationAOTOutput":
            target = _input_role(desc.mutated_input, prefix)
            if isinstance(target, BufferInput):
                return BufferUpdate(target.fqn)
            if isinstance(target, UserInput):
                return InputUpdate(target.index)
            raise CaptureError(
                f"forward changes parameter {getattr(target, 'fqn', target)!r} in place; a sharded parameter is only "
                "gathered for the call and the change would be lost. Update it outside forward, or make it a buffer"
            )
        case "GradAOTOutput":
            target = _input_role(desc.grad_of, prefix)
            if isinstance(target, ParamInput):
                return ParamGrad(target.fqn)
            return InputGrad(target.index) if isinstance(target, UserInput) else NoGrad()
    raise CaptureError(f"capture produced an output that no pass understands: {desc}")
