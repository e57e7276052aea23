"""What a gradient output must be: the captured gradient, each of its elements, reduced once over every axis.

Everything between the local gradient and the output is a *chain* of casts, scales and reductions, the same for every
element. It is walked once, with the state on every axis, the dtype and the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hyper_parallel.plan import ParamPlan
from passes.base import GradInput, ParamGrad
from passes.reduce_grads import scale_for
from passes.verify.compare import Mismatch, match
from passes.verify.expected import gradient_shard
from passes.verify.interpret import Interpreter
from passes.verify.packing import Pack
from passes.verify.report import dtype_name, error, some
from passes.verify.sources import (
    WRAPPERS,
    Cast,
    Reduced,
    Scale,
    Scattered,
)
from passes.verify.values import Value


def check_gradient(interpreter: Interpreter, role: ParamGrad, node: fx.Node | None) -> None:
    """Checks one gradient output: that it is the captured gradient, reduced as planned.

    Raises:
        VerificationError: it is not.
    """
    plan = interpreter.program.params.get(role.fqn)
    expected = interpreter.origin.outputs.get(role)
    if plan is None:
        raise error(f"{role.fqn}: the program returns a gradient of an unknown parameter")
    if (node is None) != (expected is None):
        raise error(
            f"{role.fqn}: " + ("its gradient is missing" if node is None else "it has no gradient"),
            node=node,
            found="None" if node is None else "a gradient",
            expected="None: capture found that the loss does not depend on it, or it is frozen"
            if expected is None
            else "the captured gradient, reduced",
        )
    if node is None or expected is None:
        return
    value = interpreter.values[node]
    variant = interpreter.program.facts.get("reduced")
    if plan.ignored or variant is None:
        if value.digest != expected:
            raise error(
                f"{role.fqn}: its gradient is not the captured one",
                node=node,
                found=_what(interpreter, value),
                expected="the local gradient, untouched"
                + (": the parameter is ignored" if plan.ignored else " (nothing is reduced yet)"),
                cause="an output edge was rewired, or an ignored parameter is reduced",
            )
        return
    source = interpreter.by_digest(expected)
    if source is None:
        raise error(
            f"{role.fqn}: the program never computes its captured gradient",
            node=node,
            found=_what(interpreter, value),
            expected="the same computation as in the captured graph, then its reductions",
            cause="a term was reduced before all terms were added up, an edge was rewired, or a collective delivers "
            "another parameter than its users expect",
        )
    _check_model_parallel(interpreter, plan, node, source)
    if 0 in plan.local_shape:
        return  # nothing to reduce: the program ran the model's own computation, which was compared above
    chain = _chain_of(interpreter, plan, node, source)
    _check_chain(interpreter, plan, node, source, chain, variant)


def _check_model_parallel(
    interpreter: Interpreter, plan: ParamPlan, node: fx.Node, source: fx.Node
) -> None:
    """Over a tp or ep dim that does not cut the parameter, its local gradient is whole, or a term that the plan sums.

    Equal values may be terms as well (of the sum of a constant's parts, say), so a sum of R is not wrong for that:
    ``passes.verify.parallel`` has proved which gradients are terms.
    """
    layout = interpreter.program.layout
    if isinstance(source.meta.get("role"), GradInput):
        return
    domain = {*layout.batch_dims, *plan.shard_axes, *plan.replica_axes}
    placed = dict(zip(layout.dim_names, plan.unsharded_placements, strict=True))
    found = dict(zip(interpreter.axes, interpreter.values[source].state, strict=True))
    for axis, state in found.items():
        if axis in domain or not placed[axis].is_replicate():
            continue
        if state != "R" and axis not in plan.sum_axes:
            raise error(
                f"{plan.fqn}: its gradient is a term that nobody sums on mesh dim {axis!r}",
                node=source,
                found=f"state {state} on {axis}",
                expected=f"state R: the plan does not sum it over {axis}",
                cause="ParamPlan.sum_axes does not fit the program: the gradient would be counted in part",
            )


def _chain_of(
    interpreter: Interpreter, plan: ParamPlan, node: fx.Node, source: fx.Node
) -> list[Any]:
    """Everything between the local gradient and the output, innermost first: casts, scales and reductions."""
    gradient: Pack = interpreter.pack_of(source)
    out = interpreter.pack_of(node)
    if not isinstance(out, Pack):
        raise error(f"{plan.fqn}: its gradient is a list", node=node)
    scattered, outer = _scattered(out)
    try:
        if scattered is None:
            return list(match(out, gradient))
    except Mismatch as wrong:
        raise _mismatch(interpreter, plan, node, wrong, None) from wrong
    start = out.items[0].offset  # type: ignore[union-attr]
    chunk = scattered.buffer.numel // scattered.world
    inner: list[Any] | None = None
    for rank in range(scattered.world if plan.shard_size == scattered.world else 0):
        low = rank * chunk + start
        part = Pack((out.numel,), scattered.buffer.elements(low, low + out.numel))
        wanted = gradient_shard(plan, gradient, rank)
        try:
            found = list(match(part, wanted)) if wanted.sources() else None
            if not wanted.sources():
                match(part, wanted)
        except Mismatch as wrong:
            raise _mismatch(interpreter, plan, node, wrong, rank) from wrong
        if found is not None and inner is not None and _keys(found) != _keys(inner):
            raise error(f"{plan.fqn}: rank {rank} gets another treatment than rank 0", node=node)
        inner = inner if found is None else found
    return [*(inner or ()), scattered, *outer]


def _scattered(out: Pack) -> tuple[Scattered | None, list[Any]]:
    """The one reduce-scatter that an output comes from, if it does, and what was done after it."""
    if len(out.items) != 1:
        return None, []
    source: Any = getattr(out.items[0], "source", None)
    outer: list[Any] = []
    while isinstance(source, WRAPPERS):
        outer.append(source)
        source = source.of
    if not isinstance(source, Scattered):
        return None, []
    return source, list(reversed(outer))


def _keys(chain: list[Any]) -> list[Any]:
    return [
        (type(s), getattr(s, "dtype", None), getattr(s, "divisor", None), getattr(s, "axes", None))
        for s in chain
    ]


def _mismatch(
    interpreter: Interpreter, plan: ParamPlan, node: fx.Node, wrong: Mismatch, rank: int | None
) -> Exception:
    where = "" if rank is None else f" of the shard of rank {rank}"
    found = wrong.found.source if wrong.found is not None else None
    expected = wrong.expected.source if wrong.expected is not None else None

    def text(source: Any, run: Any) -> str:
        if run is None:
            return "another number of elements"
        return (
            "padding" if source is None else f"element {run.offset} of {interpreter.owner(source)}"
        )

    return error(
        f"{plan.fqn}: element {wrong.position}{where} of its reduced gradient is another element",
        node=node,
        found=text(found, wrong.found),
        expected=text(expected, wrong.expected),
        cause="gradients are swapped or split at the wrong place in a bucket, padding was kept, or a reduce-scatter is "
        "missing",
    )


def _what(interpreter: Interpreter, value: Value) -> str:
    if value.digest is None:
        held = value.pack.sources() if value.pack is not None else {}
        return some(list(dict.fromkeys(interpreter.owner(s) for s in held))) or "a packed value"
    for role, known in interpreter.origin.outputs.items():
        if known == value.digest:
            return f"{role}"
    return "another computed value"


@dataclass
class _Walk:
    """State of a gradient as it goes through its chain."""

    dtype: Any
    state: dict[str, str]
    divisor: float = 1.0
    casts: list[Any] = field(default_factory=list)


def _check_chain(
    interpreter: Interpreter,
    plan: ParamPlan,
    node: fx.Node,
    source: fx.Node,
    chain: list[Any],
    variant: str,
) -> None:
    program = interpreter.program
    facts = program.facts
    role = source.meta.get("role")
    partial = isinstance(role, GradInput) and role.partial
    live = set(interpreter.axes)
    shard = {a for a in plan.shard_axes if a in live and plan.shard_size > 1}
    replica = {a for a in (*plan.replica_axes, *plan.sum_axes) if a in live}
    walk = _Walk(source.meta["val"].dtype, dict.fromkeys(shard | replica, "V"))
    summed = {a for a in plan.sum_axes if a in live}
    if isinstance(role, GradInput):
        walk.state.update(dict.fromkeys(summed, "R"))
    if partial:
        walk.state.update(dict.fromkeys(shard, "S"))
    wire = facts.get("reduce_dtype") or walk.dtype
    start = walk.dtype
    for step in chain:
        _step(interpreter, plan, node, walk, step, wire, live)
    reduced = {"sync": (True, True), "replicate": (True, True), "scatter": (True, False)}
    cut, agreed = reduced.get(variant, (False, False))
    wanted = {a: "S" if cut else "V" for a in shard} | {a: "R" if agreed else "V" for a in replica}
    wanted.update(dict.fromkeys(summed, "R"))
    _check_state(plan, node, walk.state, wanted)
    _check_divisor(interpreter, plan, node, walk, wire, variant, partial)
    # A wider reduction dtype is kept: the runtime adds micro-batches up in it before it rounds.
    wider = wire != plan.dtype and torch.promote_types(wire, plan.dtype) == wire
    final = plan.dtype if agreed and not wider else wire
    expected_casts = [d for i, d in enumerate((wire, final)) if d != (start, wire)[i]]
    if walk.casts != expected_casts:
        raise error(
            f"{plan.fqn}: its gradient goes through the wrong dtypes",
            node=node,
            found=" → ".join(dtype_name(d) for d in (start, *walk.casts)),
            expected=" → ".join(dtype_name(d) for d in (start, *expected_casts)),
            cause="reductions run in reduce_dtype; the result has the parameter's dtype, or reduce_dtype where that is wider",
        )
    shape = tuple(interpreter.pack_of(node).shape)
    want = plan.padded_shard_shape if cut and plan.shard_size > 1 else plan.local_shape
    if partial and plan.shard_size > 1:
        want = plan.padded_shard_shape
    if shape != tuple(want) or tuple(node.meta["val"].shape) != tuple(want):
        raise error(
            f"{plan.fqn}: its gradient has the wrong shape",
            node=node,
            found=str(list(shape)),
            expected=f"{list(want)}, {'the padded shard' if cut else 'the local parameter'}",
        )


def _step(
    interpreter: Interpreter,
    plan: ParamPlan,
    node: fx.Node,
    walk: _Walk,
    step: Any,
    wire: Any,
    live: set[str],
) -> None:
    if isinstance(step, Cast):
        if step.dtype != walk.dtype:
            walk.casts.append(step.dtype)
        walk.dtype = step.dtype
        return
    if walk.dtype != wire:
        raise error(
            f"{plan.fqn}: its gradient is {'scaled' if isinstance(step, Scale) else 'reduced'} in the wrong dtype",
            node=getattr(step, "node", None) or node,
            found=dtype_name(walk.dtype),
            expected=f"{dtype_name(wire)} (reduce_dtype, or the gradient's own)",
            cause="the cast to reduce_dtype is missing or comes too late",
        )
    if isinstance(step, Scale):
        walk.divisor *= step.divisor
        return
    assert isinstance(step, Reduced | Scattered)
    new = "R" if isinstance(step, Reduced) else "S"
    if step.op == "avg":
        walk.divisor *= interpreter.program.layout.size(step.axes)
    for axis in step.axes:
        if axis not in live:
            continue
        if walk.state.get(axis) != "V":
            raise error(
                f"{plan.fqn}: "
                + ("double reduction" if axis in walk.state else "reduction of an equal value")
                + f" on mesh dim {axis!r}",
                node=step.node,
                found=f"state {walk.state.get(axis, 'R')} on {axis}",
                expected=f"state V on {axis}: a term for every rank",
                cause="two passes reduce the same gradient, or a reduction runs over the wrong group",
            )
        walk.state[axis] = new


def _check_state(
    plan: ParamPlan, node: fx.Node, state: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    for axis, want in wanted.items():
        if state[axis] == want:
            continue
        missing = state[axis] == "V"
        how = "reduce-scatter" if want == "S" else "all-reduce"
        raise error(
            f"{plan.fqn}: its gradient has the wrong state on mesh dim {axis!r}",
            node=node,
            found=f"state {state[axis]}"
            + (": every rank still holds its own term" if missing else ""),
            expected=f"state {want}"
            + (f": after one {how} (plan: {plan.reduction})" if want != "V" else ""),
            cause=f"the {how} over {axis} is missing"
            if missing
            else "a reduction of the wrong kind, or too early",
        )


def _check_divisor(
    interpreter: Interpreter,
    plan: ParamPlan,
    node: fx.Node,
    walk: _Walk,
    wire: Any,
    variant: str,
    partial: bool,
) -> None:
    facts = interpreter.program.facts
    factor = facts.get("divide_factor")
    mean = facts.get("reduce_op", "avg") == "avg"
    whole = float(factor) if factor is not None else float(plan.batch_ranks) if mean else 1.0
    split = scale_for(plan, facts.get("reduce_op", "avg"), factor, wire)
    expected = {"none": 1.0, "scatter": split.pre, "replicate": split.post}.get(variant, whole)
    if not math.isclose(split.pre * split.post, whole, rel_tol=1e-12):
        expected = whole if variant == "sync" else whole / (split.pre or 1.0)
    if not math.isclose(walk.divisor, expected, rel_tol=1e-12):
        why = (
            f"the divide factor {factor}"
            if factor is not None
            else f"the {plan.batch_ranks} ranks of the batch dims"
        )
        raise error(
            f"{plan.fqn}: its gradient is divided by {walk.divisor:g} instead of {expected:g}",
            node=node,
            found=f"divided by {walk.divisor:g}",
            expected=f"{expected:g}: " + (why if mean or factor is not None else "a plain sum"),
            cause="a scale is missing, doubled or computed from another number of ranks",
        )
