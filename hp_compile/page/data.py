"""What a page shows, as plain rows: read from a plan and its cost, without any HTML."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hp_compile.cost import CostModel, Estimate, Timeline
from hp_compile.dump import graph_text
from hp_compile.plan import Collective, Plan
from hyper_parallel.placement import format_placements
from hyper_parallel.plan import ParamPlan
from passes.base import module_path


@dataclass(frozen=True)
class Row:
    """One parameter of the table.

    Attributes:
        fqn: its name.
        cells: text of every column.
        keys: what the columns sort by.
        mark: ``""``, ``"added"``, ``"removed"`` or ``"changed"`` against the other plan.
        before: cells of the other plan, where they differ.
    """

    fqn: str
    cells: tuple[str, ...]
    keys: tuple[str | int, ...]
    mark: str = ""
    before: tuple[str, ...] = ()


COLUMNS = (
    "parameter",
    "dtype",
    "shape",
    "placement",
    "shard",
    "elements here",
    "reduction",
    "why",
)


@dataclass(frozen=True)
class ModuleText:
    """The nodes of one module in one program.

    Attributes:
        name: FQN of the module; empty for what belongs to none.
        phase: the program.
        lines: its nodes as text, in program order.
    """

    name: str
    phase: str
    lines: tuple[str, ...]


def parameter_rows(plan: Plan, other: Plan | None = None) -> list[Row]:
    """The parameter table, with what another plan says differently.

    Args:
        plan: the plan that is shown.
        other: the plan to compare with.
    """
    rows = {fqn: _row(p) for fqn, p in plan.params.items()}
    if other is None:
        return list(rows.values())
    theirs = {fqn: _row(p) for fqn, p in other.params.items()}
    marked = []
    for fqn, row in rows.items():
        old = theirs.get(fqn)
        if old is None:
            marked.append(Row(fqn, row.cells, row.keys, "added"))
        elif old.cells != row.cells:
            before = tuple(b if a != b else "" for a, b in zip(row.cells, old.cells, strict=True))
            marked.append(Row(fqn, row.cells, row.keys, "changed", before))
        else:
            marked.append(row)
    marked += [Row(f, r.cells, r.keys, "removed") for f, r in theirs.items() if f not in rows]
    return marked


def _row(p: ParamPlan) -> Row:
    elements = 1
    for size in p.shard_shape:
        elements *= size
    dtype = str(p.dtype).removeprefix("torch.")
    reduction = p.reduction + ("" if p.requires_grad else " (frozen)")
    shard = "ignored" if p.ignored else "whole" if p.shard_size == 1 else f"{p.shard_size}"
    shape = _shape(p.shape)
    placement = format_placements(p.placements)
    cells = (p.fqn, dtype, shape, placement, shard, f"{elements:,}", reduction, p.reason)
    total = 1
    for size in p.shape:
        total *= size
    keys = (p.fqn, dtype, total, placement, p.shard_size, elements, reduction, p.reason)
    return Row(p.fqn, cells, keys)


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def collective_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Collectives in issue order: phase, kind, axes, group, dtype, bytes, purpose, parameters."""
    return [_collective(c) for c in plan.collectives]


def _collective(c: Collective) -> tuple[str, ...]:
    return (
        c.phase,
        c.kind,
        "×".join(c.axes),
        str(len(c.ranks)),
        str(c.dtype).removeprefix("torch."),
        f"{c.nbytes:,}",
        c.purpose,
        ", ".join(c.params),
    )


def note_rows(plan: Plan, other: Plan | None = None) -> list[tuple[str, str]]:
    """What a reader of the plan may not expect, with a mark against another plan.

    Args:
        plan: the plan that is shown.
        other: the plan to compare with.

    Returns:
        ``(mark, sentence)`` with mark ``""``, ``"added"`` or ``"removed"``; those of ``plan`` first.
    """
    if other is None:
        return [("", note) for note in plan.notes]
    rows = [("" if note in other.notes else "added", note) for note in plan.notes]
    return rows + [("removed", note) for note in other.notes if note not in plan.notes]


def modules(plan: Plan) -> list[ModuleText]:
    """The programs as text, grouped by the module that a node comes from, in order of appearance."""
    found: list[ModuleText] = []
    for phase, gm in plan.graphs.items():
        lines: dict[str, list[str]] = {}
        for name, line in zip(_owners(gm), graph_text(gm).splitlines(), strict=True):
            lines.setdefault(name, []).append(line)
        found += [ModuleText(name, phase, tuple(text)) for name, text in lines.items()]
    return found


def _owners(gm: Any) -> Iterator[str]:
    """The module of every line of ``graph_text``."""
    for node in gm.graph.nodes:
        if node.op == "output":
            yield from ("(outputs)" for _ in node.args[0])
        elif node.op == "placeholder":
            yield "(inputs)"
        elif node.meta.get("comm") is not None:
            yield f"(communication) {node.meta['comm'].unit}".strip()
        else:
            yield module_path(node).removeprefix("module.") or "(no module)"


def difference(plan: Plan, other: Plan) -> list[tuple[str, str]]:
    """The dumps of two plans as a line diff.

    Args:
        plan: the plan that is shown.
        other: the plan to compare with.

    Returns:
        ``(kind, line)`` with kind ``"+"``, ``"-"``, ``"@"`` or ``" "``.
    """
    lines = difflib.unified_diff(
        other.dump().splitlines(), plan.dump().splitlines(), "before", "after", lineterm="", n=2
    )
    return [(line[0] if line[0] in "+-@" else " ", line) for line in list(lines)[2:]]


def figures(plan: Plan, estimate: Estimate, timeline: Timeline) -> list[tuple[str, str, str]]:
    """The headline numbers: name, value, and what it is."""
    memory, profile = estimate.memory, timeline.profile
    total = sum(estimate.flops.values())
    fits = "fits" if memory.peak <= profile.memory_bytes else "does NOT fit"
    elements = sum(_elements(p.shape) for p in plan.params.values())
    inputs = {k: v for k, v in estimate.sizes.items() if k not in plan.layout.dim_names}
    rows = [
        ("parameters", quantity(elements), f"{len(plan.params)} tensors"),
        ("step", seconds(timeline.seconds), f"estimate for {profile.name}"),
        (
            "exposed communication",
            seconds(timeline.exposed),
            f"{timeline.exposed / timeline.seconds:.0%} of the step"
            if timeline.seconds
            else "no time at all",
        ),
        (
            "a rank sends",
            size(sum(estimate.sent.values())),
            f"{len(plan.collectives)} collectives a step",
        ),
        ("FLOPs of a rank", quantity(total), "matrix products and attention"),
        (
            "peak memory",
            size(memory.peak),
            f"{fits} in {size(profile.memory_bytes)}; the step itself {size(memory.step)}",
        ),
        ("saved for backward", size(memory.saved), _inputs(inputs)),
    ]
    return rows


def _inputs(inputs: dict[str, int]) -> str:
    return ", ".join(f"{k}={v} a rank" for k, v in inputs.items()) or "sizes are fixed"


def formulas(model: CostModel) -> list[tuple[str, str]]:
    """The symbolic costs, as text."""
    rows = [(f"bytes sent, {kind}", str(e)) for kind, e in model.sent.items()]
    rows += [(f"bytes of memory, {name}", str(e)) for name, e in model.memory.items()]
    return rows + [(f"FLOPs, {phase}", str(e)) for phase, e in model.flops.items()]


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for item in shape:
        total *= item
    return total


def quantity(number: float) -> str:
    """A number with three digits and a unit of thousands."""
    for unit in ("", " K", " M", " G", " T", " P"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} E"


def size(nbytes: float) -> str:
    """Bytes with three digits."""
    return quantity(nbytes) + ("B" if nbytes >= 1000 else " B")


def seconds(value: float) -> str:
    """A time with three digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


__all__ = [
    "COLUMNS",
    "ModuleText",
    "Row",
    "collective_rows",
    "difference",
    "figures",
    "formulas",
    "modules",
    "note_rows",
    "parameter_rows",
    "quantity",
    "seconds",
    "size",
]
