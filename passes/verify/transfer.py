"""What each collective needs and does: group, size, state before and after, elements."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import partial
from functools import reduce as fold
from typing import TYPE_CHECKING, Any

from torch import fx

from hyper_parallel.plan import ParamPlan
from passes.base import COLLECTIVES, GATHER, SCATTER, Comm, ProgramInfo, axes_of_group
from passes.verify.packing import Pack, Run
from passes.verify.report import error, some
from passes.verify.sources import (
    Reduced,
    Scattered,
    Shard,
    ShardAt,
    Slice,
    Term,
    bottom_of,
)

if TYPE_CHECKING:
    from passes.verify.interpret import Interpreter


@dataclass(frozen=True)
class Group:
    """The group a collective really runs on, read from its arguments.

    Attributes:
        kind: kind of collective.
        axes: mesh dims, in mesh order.
        inner: ranks of the smaller group of an integer reshard; 0 for the whole.
        size: number of ranks.
    """

    kind: str
    axes: tuple[str, ...]
    inner: int
    size: int
    name: str


def parse_group(name: object, program: ProgramInfo) -> tuple[tuple[str, ...], int] | None:
    """Axes and inner size of a group alias; None for a text that is no alias of this mesh."""
    axes = axes_of_group(name, program.layout)
    if axes is None:
        return None
    inner = str(name).partition("/")[2]
    return axes, int(inner) if inner.isdigit() else 0


def group_of(node: fx.Node, comm: Comm, program: ProgramInfo) -> Group:
    """Checks the arguments of a collective against the mesh and against what it says about itself."""
    strings = [a for a in node.args if isinstance(a, str)]
    name = strings[-1] if strings else None
    parsed = parse_group(name, program)
    layout = program.layout
    if parsed is None:
        raise error(
            f"{node.name}: runs on a group that is no union of dims of this mesh",
            node=node,
            found=repr(name),
            expected=f"the alias of dims of ({layout.describe()}), e.g. {layout.group_name(comm.axes)!r}",
            cause="the program was made for another mesh, or a pass wrote a group name of its own",
        )
    axes, inner = parsed
    kind = COLLECTIVES[node.target]
    if (kind, axes, inner) != (comm.kind, layout.axes(comm.axes), comm.inner):
        raise error(
            f"{node.name}: the collective is not the one it says it is, for {', '.join(comm.params)}",
            node=node,
            found=f"{kind} over {_axes(axes, inner)}",
            expected=f"{comm.kind} over {_axes(comm.axes, comm.inner)}",
            cause="wrong group: a pass changed the arguments or the Comm of a collective, not both",
        )
    size = inner or layout.size(axes)
    given = (
        node.args[1] if node.target is GATHER else node.args[2] if node.target is SCATTER else size
    )
    if given != size:
        raise error(
            f"{node.name}: wrong group size for mesh dims {_axes(axes, inner)}",
            node=node,
            found=str(given),
            expected=str(size),
        )
    return Group(kind, axes, inner, size, str(name))


def _axes(axes: tuple[str, ...], inner: int) -> str:
    return "×".join(axes) + (f" in groups of {inner}" if inner else "")


def _real(axes: tuple[str, ...], program: ProgramInfo) -> set[str]:
    """Axes with more than one rank: over the others nothing is communicated."""
    return {a for a in axes if program.layout.size(a) > 1}


def _not_a_shard(
    node: fx.Node, what: str, axes: tuple[str, ...], found: str, expected: str, cause: str
) -> Exception:
    return error(
        f"{what}: {node.name} gathers over mesh dim {'×'.join(axes)} what is not cut there",
        node=node,
        found=found,
        expected=expected,
        cause=cause,
    )


def gather(node: fx.Node, pack: Pack, group: Group, interpreter: Interpreter) -> Pack:
    """S → R: the shards of all ranks of the group, one rank after the other."""
    program = interpreter.program
    for source in pack.sources():
        bottom = bottom_of(source)
        if isinstance(bottom, Shard) and not group.inner:
            plan = program.params[bottom.fqn]
            _check_wire(node, plan, source, interpreter)
            if _real(plan.shard_axes, program) == _real(group.axes, program):
                continue
            raise _not_a_shard(
                node,
                bottom.fqn,
                group.axes,
                f"cut over {'×'.join(plan.shard_axes)}",
                f"a gather over {'×'.join(plan.shard_axes)}",
                "wrong axis: the gather must run over the dims that FSDP cuts, and over no other",
            )
        if isinstance(bottom, Slice) and bottom.group == group.name and bottom.parts == group.inner:
            continue
        known = isinstance(bottom, Shard | ShardAt | Slice)
        raise _not_a_shard(
            node,
            getattr(bottom, "fqn", node.name),
            group.axes,
            f"state {'R' if isinstance(bottom, ShardAt) else 'S of another group' if known else 'V'}",
            "state S: every rank holds its slice",
            "a value is gathered twice, or something that is no shard is gathered",
        )
    items: list[Any] = []
    for rank in range(group.size):
        for item in pack.map(partial(_at, rank)).items:
            items.extend(_expanded(item, rank))
    return Pack((pack.shape[0] * group.size, *pack.shape[1:]), items)


def _check_wire(node: fx.Node, plan: ParamPlan, source: Any, interpreter: Interpreter) -> None:
    used = interpreter.origin.params.get(plan.fqn, plan.dtype)
    dtype = getattr(source, "dtype", plan.dtype)
    if dtype != used:
        raise error(
            f"{plan.fqn}: gathered in {dtype}, used in {used}",
            node=node,
            expected="the shard is cast first, so that the wire carries the dtype of the use",
        )


def _at(rank: int, source: Any) -> Any:
    """The source as rank ``rank`` holds it."""
    if isinstance(source, Shard):
        return ShardAt(source.fqn, rank)
    if hasattr(source, "of"):
        return replace(source, of=_at(rank, source.of))
    return source


def _expanded(item: Any, rank: int) -> list[Any]:
    """Replaces slices by what rank ``rank``'s slice holds."""
    runs = [item] if isinstance(item, Run) else [r for i in range(item.rows) for r in item.row(i)]
    if not any(isinstance(r.source, Slice) for r in runs):
        return [item]
    result: list[Any] = []
    for run in runs:
        if isinstance(run.source, Slice):
            start = rank * (run.source.whole.numel // run.source.parts) + run.offset
            result.extend(run.source.whole.elements(start, start + run.length))
        else:
            result.append(run)
    return result


def slice_of(node: fx.Node, pack: Pack, interpreter: Interpreter) -> Pack:
    """R → S on the inner axis of an integer reshard."""
    program = interpreter.program
    parts, name = node.args[1], node.args[2]
    parsed = parse_group(name, program)
    if parsed is None or parsed[1] != parts:
        held = dict.fromkeys(map(interpreter.owner, pack.sources()))
        raise error(
            f"{some(list(held)) or node.name}: {node.name} slices over a group that is no smaller group of this mesh",
            node=node,
            found=f"{parts} parts on {name!r}",
            expected=f"as many parts as the group has ranks, of ({program.layout.describe()})",
        )
    bottoms = [bottom_of(s) for s in pack.sources()]
    if not isinstance(parts, int) or not all(isinstance(b, ShardAt) for b in bottoms):
        raise error(f"{node.name}: slices what has not been gathered", node=node)
    source = Slice(pack, parts, str(name))
    shape = (pack.shape[0] // parts, *pack.shape[1:])
    size = fold(operator.mul, shape, 1)
    return Pack(shape, [Run(source, 0, size)] if size else ())


def _check_terms(node: fx.Node, pack: Pack, group: Group, interpreter: Interpreter) -> None:
    """A reduction sums terms: over its axes nothing may be reduced, sliced or a weight already."""
    for source in pack.sources():
        state = {axis: "V" for axis in interpreter.axes}
        bottom: Any = source
        while not isinstance(bottom, Term):
            if isinstance(bottom, Reduced):
                state.update(dict.fromkeys(bottom.axes, "R"))
                bottom = bottom.of
            elif isinstance(bottom, Scattered):
                state.update(dict.fromkeys(bottom.axes, "S"))
                inside = bottom.buffer.sources()
                bottom = next(iter(inside), Term(""))
            elif hasattr(bottom, "of"):
                bottom = bottom.of
            else:
                raise error(
                    f"{getattr(bottom, 'fqn', node.name)}: {node.name} reduces a parameter instead of its gradient",
                    node=node,
                    found="state S or R: bytes of a parameter",
                    expected="state V: a term of a gradient",
                )
        for axis in group.axes:
            if state.get(axis, "V") != "V":
                raise error(
                    f"{', '.join(node.meta['comm'].params)}: double reduction on mesh dim {axis!r}",
                    node=node,
                    found=f"state {state[axis]} on {axis}: reduced over it before",
                    expected=f"state V on {axis}: every rank holds a term of the sum",
                    cause="two passes reduce the same gradient, or a reduction runs over the wrong group",
                )


def _op(node: fx.Node) -> str:
    op = str(node.args[1])
    if op not in ("sum", "avg"):
        raise error(f"{node.name}: gradients are summed, not reduced by {op!r}", node=node)
    return op


def scatter(node: fx.Node, pack: Pack, group: Group, interpreter: Interpreter) -> Pack:
    """V → S: rank ``r`` gets the sum of chunk ``r``."""
    _check_terms(node, pack, group, interpreter)
    if not pack.shape or pack.shape[0] % group.size:
        raise error(
            f"{node.name}: {list(pack.shape)} does not divide over {group.size} ranks", node=node
        )
    shape = (pack.shape[0] // group.size, *pack.shape[1:])
    source = Scattered(pack, group.axes, group.size, _op(node), node)
    size = fold(operator.mul, shape, 1)
    return Pack(shape, [Run(source, 0, size)] if size else ())


def reduce(node: fx.Node, pack: Pack, group: Group, interpreter: Interpreter) -> Pack:
    """V → R: every rank gets the sum."""
    _check_terms(node, pack, group, interpreter)
    op = _op(node)
    return pack.map(lambda s: Reduced(group.axes, op, s, node))


__all__ = ["Group", "gather", "group_of", "parse_group", "reduce", "scatter", "slice_of"]
