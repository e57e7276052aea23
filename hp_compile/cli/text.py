"""A saved plan as text for people: equal layers are one row, so that a stranger can read what one of them costs."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from hp_compile.patterns import grouped
from hp_compile.plan_diff import count
from hp_compile.policy_file import policy_values
from hp_compile.serial import SavedCollective, SavedParam, SavedPlan
from hyper_parallel.policy import Policy

_BITS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
_WIDTH = 78


def plan_parts(plan: SavedPlan, command: str) -> list[Any]:
    """Everything that the text of a plan consists of.

    Args:
        plan: the plan.
        command: the shell command that makes it; empty when unknown.
    """
    parts: list[Any] = [f"$ {command}"] if command else []
    parts += _header(plan)
    parts += ["", heading(f"Parameters: {count_text(plan)}"), *_parameters(plan)]
    parts += _reasons(plan)
    if plan.collectives is None:
        parts += ["", "Collectives: not known, the plan was made without a program"]
    elif not plan.collectives:
        parts += ["", "Collectives: none"]
    else:
        parts += ["", heading("What one unit costs a step, on this rank"), *_units(plan)]
        parts += ["", heading("A step, on this rank"), *_totals(plan)]
    return parts + _notes(plan)


# ------------------------------------------------------------------ header


def _header(plan: SavedPlan) -> list[str]:
    mesh = plan.mesh
    dims = " × ".join(f"{name}={size}" for name, size in mesh.dims)
    roles = ", ".join(f"{role}: {'×'.join(names)}" for role, names in mesh.roles.items())
    lines = [
        f"plan {plan.fingerprint}",
        f"mesh    {dims}: {mesh.size:,} ranks, seen from rank {mesh.rank}",
        f"roles   {roles}",
    ]
    lines += _folded("policy  ", changed_fields(plan.policy) or ["(defaults)"])
    if plan.inputs:
        lines += _folded("inputs  ", plan.inputs)
    return lines


def _folded(label: str, items: Iterable[str]) -> list[str]:
    return textwrap.wrap(
        ", ".join(items),
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def changed_fields(policy: Mapping[str, Any]) -> list[str]:
    """The fields of a saved policy that are not the defaults, as ``name=value``.

    Args:
        policy: fields as plain values.
    """
    default = policy_values(Policy())
    found = []
    for name, value in policy.items():
        if isinstance(value, Mapping) and isinstance(default.get(name), Mapping):
            items = value.items()
            found += [f"{name}.{k}={v}" for k, v in items if v != default[name].get(k)]
        elif value != default.get(name):
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            found.append(f"{name}=[{text}]" if isinstance(value, list) else f"{name}={text}")
    return found


def count_text(plan: SavedPlan) -> str:
    """Number of parameters and elements, of the model and on this rank.

    Args:
        plan: the plan.
    """
    whole = sum(math.prod(p.shape) for p in plan.params)
    here = sum(math.prod(p.local_shape) for p in plan.params)
    return f"{len(plan.params)}, {whole:,} elements, {here:,} on this rank"


def _notes(plan: SavedPlan) -> list[str]:
    """What a reader may not expect."""
    notes = [f"note: {note}" for note in plan.notes]
    padded = [p for p in plan.params if p.padded_shape != p.local_shape or _uneven(p)]
    if padded:
        names = [g.name for g in grouped(padded, name=lambda p: p.fqn, key=lambda _: None)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(
            f"note: shards of {', '.join(names[:3])}{more} are padded to equal rows; bytes include it"
        )
    lines = [line for note in notes for line in textwrap.wrap(note, _WIDTH, break_on_hyphens=False)]
    return ["", *lines] if lines else []


def _uneven(param: SavedParam) -> bool:
    full = math.prod(param.padded_shape) * param.shard_size
    cut_before = math.prod(param.shape) // max(full, 1)
    return param.shard_size > 1 and cut_before == 0 and full > math.prod(param.shape)


# ------------------------------------------------------------------ tables


def table(*columns: str, right: Iterable[str] = (), fold: Iterable[str] = ()) -> Table:
    """An empty table in the house style.

    Args:
        *columns: headings.
        right: headings of the columns with numbers.
        fold: headings of the columns that are folded on a narrow terminal.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in fold,
            overflow="fold",
        )
    return made


def sections(
    heads: Sequence[str], rows: Iterable[str | Sequence[str]], right: Iterable[int] = ()
) -> list[Text]:
    """Aligned rows under headings that are as wide as they like: what a table cannot do.

    Args:
        heads: headings of the columns.
        rows: cells, or the heading of a section.
        right: numbers of the columns with numbers.
    """
    rows = list(rows)
    cells = [heads, *(row for row in rows if not isinstance(row, str))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    rule = "─" * max(len(line(row)) for row in cells)
    found = [Text(line(heads), style="bold"), Text(rule, style="dim")]
    return found + [heading(r) if isinstance(r, str) else Text(line(r)) for r in rows]


_INDEXED = re.compile(r"(?P<block>.*?(?:\{[\d.,]+\}|\b\d+))\.(?P<rest>.*)")


def _parameters(plan: SavedPlan) -> list[Text]:
    """A row for equal parameters of equal blocks, the blocks as headings."""
    reasons = _numbered_reasons(plan)
    groups = grouped(
        plan.params,
        name=lambda p: p.fqn,
        key=lambda p: (p.dtype, p.shape, p.placements, _reduction(p), p.reason, p.ignored),
    )
    rows: dict[str, list[Sequence[str]]] = {}
    for group in groups:
        p = group.items[0]
        match = _INDEXED.fullmatch(group.name)
        block, name = (match["block"], "  " + match["rest"]) if match else ("", group.name)
        place = "ignored" if p.ignored else ", ".join(p.placements)
        reduction = f"{_reduction(p)} ({reasons[p.reason]})"
        cells = (name, short_dtype(p.dtype), shape_text(p.shape), place, reduction)
        rows.setdefault(block, []).append(cells)
    found: list[str | Sequence[str]] = []
    for block, members in rows.items():
        found += ([block] if block else []) + members
    return sections(("parameter", "dtype", "shape", "placement", "reduction"), found)


def _reduction(param: SavedParam) -> str:
    return param.reduction + ("" if param.requires_grad else " (frozen)")


def _numbered_reasons(plan: SavedPlan) -> dict[str, int]:
    distinct = dict.fromkeys(p.reason for p in plan.params)
    return {reason: number for number, reason in enumerate(distinct, 1)}


def _reasons(plan: SavedPlan) -> list[str]:
    lines = []
    for reason, number in _numbered_reasons(plan).items():
        count = sum(p.reason == reason for p in plan.params)
        label = f"({number}) "
        lines += textwrap.wrap(
            f"{reason} {count} parameters." if len(plan.params) > 1 else reason,
            _WIDTH,
            initial_indent=label,
            subsequent_indent=" " * len(label),
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _units(plan: SavedPlan) -> list[Text]:
    """The collectives of a unit, once for all units that issue the same."""
    by_unit: dict[str, list[SavedCollective]] = {}
    units = {p.unit for p in plan.params}
    for c in plan.collectives or ():
        by_unit.setdefault(_unit_around(c, units), []).append(c)
    names = sorted(by_unit, key=_registration(plan))
    groups = grouped(names, name=unit_text, key=lambda unit: tuple(count(by_unit[unit]).items()))
    rows: list[str | Sequence[str]] = []
    for group in groups:
        many = f": {len(group.items)} units, each" if len(group.items) > 1 else ""
        rows.append((group.name or "(no unit)") + many)
        for (phase, kind, axes, purpose, dtype), (number, nbytes) in count(
            by_unit[group.items[0]]
        ).items():
            over, sends = plan.mesh.over(axes), bytes_text(nbytes)
            rows.append(
                ("  " + phase, f"{number} {kind}", over, short_dtype(dtype), sends, purpose)
            )
    return sections(("unit", "collectives", "over", "dtype", "sends", "for"), rows, right=[4])


def _unit_around(collective: SavedCollective, units: set[str]) -> str:
    """The unit of a collective; for one of the model's own computation the unit that its module is in."""
    if collective.params:
        return collective.unit
    parts = collective.unit.split(".")
    around = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in around if name in units), "(root)" if "(root)" in units else "")


def _registration(plan: SavedPlan) -> Any:
    """Sort key of units: the place of their first parameter."""
    place: dict[str, int] = {}
    for index, p in enumerate(plan.params):
        place.setdefault(p.unit, index)
    return lambda unit: place.get(unit.partition("+")[0], len(plan.params))


def unit_text(unit: str) -> str:
    """The name of a unit; of many that share a bucket, the first and the last.

    Args:
        unit: name, several joined by ``+``.
    """
    parts = unit.split("+")
    return unit if len(parts) < 3 else f"{parts[0]}+…+{parts[-1]}"


def _totals(plan: SavedPlan) -> list[Any]:
    rows: list[str | Sequence[str]] = []
    phases: set[str] = set()
    for (phase, kind, axes, purpose, dtype), (number, nbytes) in count(
        plan.collectives or ()
    ).items():
        if phase not in phases:
            phases.add(phase)
            rows.append(phase)
        over = plan.mesh.over(axes)
        rows.append((f"  {number} {kind}", over, short_dtype(dtype), purpose, f"{nbytes:,}"))
    heads = ("collectives", "over", "dtype", "for", "bytes sent")
    total = sum(c.nbytes for c in plan.collectives or ())
    return [
        *sections(heads, rows, right=[4]),
        f"in all {len(plan.collectives or ())} collectives; this rank sends {total:,} bytes, {bytes_text(total)}",
    ]


# ------------------------------------------------------------------ words


def bytes_text(nbytes: int) -> str:
    """Bytes in units of 1000.

    Args:
        nbytes: number of bytes.

    Example:
        >>> bytes_text(436_207_616), bytes_text(12)
        ('436.2 MB', '12 B')
    """
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def short_dtype(dtype: str) -> str:
    """``f32`` for ``float32``."""
    return _BITS.get(dtype, dtype)


def shape_text(shape: Iterable[int]) -> str:
    """``[4096, 1024]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def heading(text: str) -> Text:
    """A heading in bold where there are colours."""
    return Text(text, style="bold")


__all__ = [
    "bytes_text",
    "changed_fields",
    "count_text",
    "heading",
    "plan_parts",
    "sections",
    "shape_text",
    "short_dtype",
    "table",
    "unit_text",
]
