"""What the outputs of a program must be: the user's values as captured, gradients reduced as planned, nothing full saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from hyper_parallel.plan import ParamPlan
from passes.base import (
    COLLECTIVES,
    BufferUpdate,
    InputGrad,
    InputUpdate,
    NoGrad,
    ParamGrad,
    SavedOutput,
    UserOutput,
    outputs,
)
from passes.verify.gradients import check_gradient
from passes.verify.interpret import Interpreter
from passes.verify.report import dtype_name, error, some
from passes.verify.sources import ShardAt, bottom_of
from passes.verify.values import Value

_WORDS: Mapping[type, str] = {
    UserOutput: "output of forward",
    BufferUpdate: "new value of a buffer",
    InputUpdate: "new value of an input",
    InputGrad: "gradient of an input",
}


def check_outputs(interpreter: Interpreter) -> None:
    """Checks every output of an interpreted program.

    Raises:
        VerificationError: an output is not what capture and the plan say.
    """
    program, origin = interpreter.program, interpreter.origin
    seen: set[str] = set()
    role: Any
    for position, node, role in outputs(interpreter.gm):
        if isinstance(role, ParamGrad):
            if role.fqn in seen:
                raise error(f"{role.fqn}: the program returns its gradient twice", node=node)
            seen.add(role.fqn)
            check_gradient(interpreter, role, node)
        elif isinstance(role, SavedOutput):
            _check_saved(interpreter, node, role.index)
        elif isinstance(role, NoGrad):
            continue
        else:
            _check_computed(interpreter, role, node, position)
    if program.stage in ("backward", "reduction", "captured", "sharded"):
        missing = [
            r.fqn
            for r, d in origin.outputs.items()
            if isinstance(r, ParamGrad) and d is not None and r.fqn not in seen
        ]
        if missing:
            raise error(
                f"{some(missing)}: the program returns no gradient for it",
                expected="one gradient for every parameter that capture found one for",
            )
    _check_carried(interpreter)


def _check_computed(interpreter: Interpreter, role: Any, node: fx.Node | None, at: int) -> None:
    expected = interpreter.origin.outputs.get(role)
    value = interpreter.values[node] if node is not None else None
    found = value.digest if value is not None else None
    if found != expected:
        raise error(
            f"output {at} ({_WORDS.get(type(role), 'output')}, {role}) is not what was captured",
            node=node,
            found="a packed value" if value is not None and value.packed else "another computation",
            expected="the value that the captured model computes, on gathered parameters",
            cause="an output edge was rewired, or a collective delivers another parameter than its users expect",
        )


# ------------------------------------------------------------------ saved values


def _check_saved(interpreter: Interpreter, node: fx.Node | None, index: int) -> None:
    if node is None:
        return
    program = interpreter.program
    value = interpreter.values[node]
    reshard = program.facts.get("reshard", {})
    fqn = value.weight or _gathered(value)
    if fqn is None or not program.facts.get("gathered"):
        return
    plan = program.params[fqn]
    frees = reshard.get(program.units.get(fqn, ""), True) is not False
    if plan.shard_size > 1 and frees and _full_size(node, plan):
        raise error(
            f"{fqn}: saved for backward at full size although its unit reshards after forward",
            node=node,
            found=f"saved value {index}: {_shape_text(node)}",
            expected="only its shard is kept, and it is gathered again in backward",
            cause="a view or cast of the weight lost its recompute tag before partition",
        )


def _gathered(value: Value) -> str | None:
    """The parameter in a packed value that holds more than this rank's part."""
    if value.pack is None or not value.packed:
        return None
    for source in value.pack.sources():
        bottom = bottom_of(source)
        if isinstance(bottom, ShardAt):
            return bottom.fqn
    return None


def _full_size(node: fx.Node, plan: ParamPlan) -> bool:
    """Whether keeping the node keeps memory of the size of the whole parameter alive."""
    value = node.meta["val"]
    size = value.numel() if hasattr(value, "numel") else 0
    return isinstance(size, int) and size >= math.prod(plan.local_shape)


def _shape_text(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{dtype_name(value.dtype)}{list(value.shape)}"


# ------------------------------------------------------------------ collectives and what they say


def _check_carried(interpreter: Interpreter) -> None:
    """Every collective is used, and carries the parameters that its metadata names."""
    gm = interpreter.gm
    live: set[fx.Node] = set()
    stack = [n for n in gm.graph.nodes if n.op == "output"]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    for node in gm.graph.nodes:
        if node.target in COLLECTIVES and node not in live:
            raise error(
                f"{some(node.meta['comm'].params) or node.name}: nobody uses the result of {node.name}",
                node=node,
                cause="a collective was left behind, e.g. a reduction of a frozen parameter",
            )
    for node, carried in interpreter.carried.items():
        named = tuple(
            fqn
            for fqn in node.meta["comm"].params
            if 0 not in interpreter.program.params[fqn].local_shape
        )
        if carried != named:
            raise error(
                f"{node.name}: the gather does not carry the parameters it names",
                node=node,
                found=some(carried),
                expected=some(named),
            )
