"""A difference of two plans as text."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.text import Text

from hp_compile.cli.text import bytes_text, heading, sections, short_dtype, table
from hp_compile.plan_diff import PlanDiff, Traffic
from hp_compile.serial import SavedPlan

_MOST = 6
_WIDTH = 78


def diff_parts(diff: PlanDiff, before: SavedPlan, after: SavedPlan) -> list[Any]:
    """Everything that the text of a difference consists of.

    Args:
        diff: the difference.
        before: the first plan.
        after: the second plan.
    """
    if not diff:
        return [f"no difference: plan {before.fingerprint}"]
    parts: list[Any] = [f"plan {before.fingerprint} → {after.fingerprint}"]
    if diff.settings:
        rows = table("field", "before", "after", fold=["before", "after"])
        for change in diff.settings:
            rows.add_row(change.what, *_sides(change.before, change.after))
        parts += ["", heading("Mesh, policy and inputs"), rows]
    if diff.params:
        count = sum(change.count for change in diff.params)
        parts += ["", heading(f"Parameters: {count} change"), *_params(diff, before, after)]
    if diff.traffic:
        parts += ["", heading("Collectives a step, on this rank"), *_traffic(diff, before, after)]
    if diff.order:
        parts += ["", heading("Collectives"), diff.order]
    if not (diff.settings or diff.params or diff.traffic or diff.order):
        parts += ["", "The plans differ in what the fingerprint covers and the file does not say."]
    return parts


def _params(diff: PlanDiff, before: SavedPlan, after: SavedPlan) -> list[str]:
    lines = []
    total = max(len(before.params), len(after.params))
    for group in diff.params:
        names = list(group.names)
        more = f", … {len(names) - _MOST} more" if len(names) > _MOST else ""
        label = f"{group.count} of {total}: " if total > 1 else ""
        if group.count == total > 1:
            label, names, more = f"all {total}", [], ""
        lines += textwrap.wrap(
            f"{label}{', '.join(names[:_MOST])}{more}",
            _WIDTH,
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        width = max(len(change.what) for change in group.changes)
        for change in group.changes:
            if change.before is None:
                lines.append(f"  + {change.after}")
            elif change.after is None:
                lines.append(f"  - {change.before}")
            else:
                lines.append(f"  {change.what.ljust(width)}  {change.before} → {change.after}")
    return lines


def _sides(before: str | None, after: str | None) -> tuple[str, str]:
    return ("-" if before is None else before, "-" if after is None else after)


def _traffic(diff: PlanDiff, before: SavedPlan, after: SavedPlan) -> list[Text]:
    rows: list[str | tuple[str, ...]] = []
    phases: set[str] = set()
    for t in diff.traffic:
        if t.phase not in phases:
            phases.add(t.phase)
            rows.append(t.phase)
        sides = (_amount(t.before), _amount(t.after))
        name = f"{_mark(t)} {t.kind}"
        rows.append((name, "×".join(t.axes), short_dtype(t.dtype), t.purpose, *sides))
    heads = ("collectives", "over", "dtype", "for", "before", "after")
    colours = {"+": "green", "-": "red"}
    lines = sections(heads, rows, right=[4, 5])
    for line in lines:
        line.stylize(colours.get(line.plain[:1], ""))
    old, new = (_total(plan) for plan in (before, after))
    sends = f"this rank sends {bytes_text(old[1])} → {bytes_text(new[1])}"
    return [*lines, Text(f"in all {old[0]} → {new[0]} collectives; {sends}")]


def _mark(traffic: Traffic) -> str:
    if not traffic.before[0]:
        return "+"
    return "~" if traffic.after[0] else "-"


def _amount(side: tuple[int, int]) -> str:
    count, nbytes = side
    return f"{count}, {bytes_text(nbytes)}" if count else "-"


def _total(plan: SavedPlan) -> tuple[int, int]:
    items = plan.collectives or ()
    return len(items), sum(c.nbytes for c in items)


__all__ = ["diff_parts"]
