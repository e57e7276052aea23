"""A difference of two plans as text."""

from __future__ import annotations

from typing import Any

from hp_compile.cli.text import bytes_text, heading, short_dtype, table
from hp_compile.plan_diff import PlanDiff, Traffic
from hp_compile.serial import SavedPlan

_MOST = 12


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
        rows = table("field", "before", "after", fold="after")
        for change in diff.settings:
            rows.add_row(change.what, *_sides(change.before, change.after))
        parts += ["", heading("Mesh, policy and inputs"), rows]
    if diff.params:
        count = sum(change.count for change in diff.params)
        parts += ["", heading(f"Parameters: {count} change"), _params(diff, before, after)]
    if diff.traffic:
        parts += ["", heading("Collectives a step, on this rank"), _traffic(diff, before, after)]
    if diff.order:
        parts += ["", heading("Collectives"), diff.order]
    if not (diff.settings or diff.params or diff.traffic or diff.order):
        parts += ["", "The plans differ in what the fingerprint covers and the file does not say."]
    return parts


def _params(diff: PlanDiff, before: SavedPlan, after: SavedPlan) -> Any:
    rows = table("parameters", "of", "what", "before", "after", right=["of"], fold="parameters")
    total = max(len(before.params), len(after.params))
    for group in diff.params:
        names = list(group.names)
        if group.count == total > len(names) > 1:
            names = ["all"]
        elif len(names) > _MOST:
            names = [*names[: _MOST - 1], f"… {len(names) - _MOST + 1} more"]
        sides = [_sides(change.before, change.after) for change in group.changes]
        rows.add_row(
            "\n".join(names),
            str(group.count),
            "\n".join(change.what for change in group.changes),
            "\n".join(old for old, _ in sides),
            "\n".join(new for _, new in sides),
        )
    return rows


def _sides(before: str | None, after: str | None) -> tuple[str, str]:
    return ("-" if before is None else before, "-" if after is None else after)


def _traffic(diff: PlanDiff, before: SavedPlan, after: SavedPlan) -> Any:
    rows = table(
        "",
        "phase",
        "kind",
        "over",
        "dtype",
        "for",
        "before",
        "after",
        right=["before", "after"],
        fold="for",
    )
    for t in diff.traffic:
        mesh = before.mesh if t.before[0] else after.mesh
        over = mesh.over(t.axes)
        if t.before[0] and t.after[0] and after.mesh.over(t.axes) != over:
            over = f"{over} → {after.mesh.over(t.axes)}"
        rows.add_row(
            _mark(t),
            t.phase,
            t.kind,
            over,
            short_dtype(t.dtype),
            t.purpose,
            _amount(t.before),
            _amount(t.after),
            style={"+": "green", "-": "red"}.get(_mark(t)),
        )
    old, new = (_total(plan) for plan in (before, after))
    rows.add_row("", "both", "all", "", "", "", _amount(old), _amount(new), style="bold")
    return rows


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
