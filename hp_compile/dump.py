"""The text of a plan: stable, made for review and for diffs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING

from hyper_parallel.placement import format_placements
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import Policy

if TYPE_CHECKING:
    from hp_compile.plan import Plan


def dump(plan: Plan) -> str:
    """Renders a plan: header, parameters by unit, collectives in issue order, totals.

    Args:
        plan: the plan.
    """
    lines = [*_header(plan), "", *_parameters(plan)]
    if plan.has_program:
        lines += [*_notes(plan), "", *_collectives(plan), "", *_totals(plan)]
    return "\n".join(lines) + "\n"


def _header(plan: Plan) -> list[str]:
    layout = plan.layout
    return [
        f"plan {plan.fingerprint}",
        f"mesh {layout.describe()}   roles {layout.roles}   seen from rank {layout.rank}",
        f"policy {_policy(plan.policy)}",
    ]


def _policy(policy: Policy) -> str:
    """The fields that change the program and are not the defaults."""
    default = Policy().program_key()
    changed = [a for a, b in zip(policy.program_key(), default, strict=True) if a != b]
    return ", ".join(f"{name}={_field(value)}" for name, value in changed) or "(defaults)"


def _field(value: object) -> str:
    """A field of a policy; of a precision policy, the dtypes that are set."""
    if isinstance(value, tuple) and all(isinstance(v, tuple) and len(v) == 2 for v in value):
        pairs = [f"{name}={_field(v)}" for name, v in value if v is not None]
        return "(" + ", ".join(pairs) + ")"
    return _dtype(value)


def _parameters(plan: Plan) -> list[str]:
    rows = [("parameter", "dtype", "shape", "placement", "shard", "reduction")]
    rows += [
        (
            p.fqn,
            _dtype(p.dtype),
            _shape(p.shape),
            format_placements(p.placements),
            _shard_text(p),
            p.reduction + ("" if p.requires_grad else " (frozen)"),
        )
        for p in plan.params.values()
    ]
    total = sum(_numel(p.shape) for p in plan.params.values())
    local = sum(_numel(p.shard_shape) for p in plan.params.values())
    return [
        f"parameters: {len(plan.params)}, {total:,} elements, {local:,} on this rank",
        *_table(rows),
        *_reasons(plan),
    ]


def _reasons(plan: Plan) -> list[str]:
    """Each distinct reason once, with the parameters it holds for."""
    by_reason: dict[str, list[str]] = {}
    for p in plan.params.values():
        by_reason.setdefault(p.reason, []).append(p.fqn)
    return ["why:"] + [
        f"  {len(fqns)} of {len(plan.params)} ({_some(fqns)}): {reason}"
        for reason, fqns in by_reason.items()
    ]


def _notes(plan: Plan) -> list[str]:
    notes = plan.notes
    return ["tensor parallel:", *(f"  {note}" for note in notes)] if notes else []


def _collectives(plan: Plan) -> list[str]:
    rows = [("#", "phase", "kind", "axes", "ranks", "dtype", "sends", "for", "carries")]
    for index, c in enumerate(plan.collectives):
        rows.append(
            (
                str(index),
                c.phase,
                c.kind,
                "×".join(c.axes),
                _ranks(c.ranks),
                _dtype(c.dtype),
                f"{c.nbytes:,} B",
                c.purpose,
                _some(c.params) if c.params else f"({c.module or 'root module'})",
            )
        )
    return [f"collectives: {len(plan.collectives)} a step, in issue order", *_table(rows)]


def _totals(plan: Plan) -> list[str]:
    """Bytes by phase, kind and axes, and the part of them that is padding."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for c in plan.collectives:
        key = (c.phase, c.kind, "×".join(c.axes))
        count, nbytes = totals.get(key, (0, 0))
        totals[key] = (count + 1, nbytes + c.nbytes)
    rows = [("phase", "kind", "axes", "count", "this rank sends")]
    rows += [(*key, str(n), f"{b:,} B") for key, (n, b) in totals.items()]
    padded = {
        p.fqn: p.padded_rows * p.shard_size - sum(p.lengths)
        for p in plan.params.values()
        if p.lengths and p.shard_size > 1
    }
    uneven = {f: rows_ for f, rows_ in padded.items() if rows_}
    note = (
        f"padding: {_some([f'{f} +{r} rows' for f, r in uneven.items()])} (uneven over the shard group; included above)"
        if uneven
        else "padding: none"
    )
    return [*_table(rows), note]


def _shard_text(p: ParamPlan) -> str:
    if p.ignored:
        return "ignored"
    if p.shard_size == 1:
        return "whole"
    return f"{_shape(p.padded_shard_shape)} of {p.shard_size}"


def graph_text(gm: object) -> str:
    """A program as text: one node a line, shapes and dtypes, mesh dims instead of process groups; roles once it has them."""
    lines = []
    for node in gm.graph.nodes:  # type: ignore[attr-defined]
        value = node.meta.get("val")
        shape = f": {_dtype(value.dtype)}{_shape(value.shape)}" if hasattr(value, "dtype") else ""
        comm = node.meta.get("comm")
        where = f"  # {comm.purpose} over {'×'.join(comm.axes)}" if comm else ""
        if node.op == "placeholder":
            lines.append(f"{node.name}{shape} = input {node.meta.get('role', node.target)}")
        elif node.op == "get_attr":
            lines.append(f"{node.name}{shape} = attribute {node.target}")
        elif node.op == "output" and "roles" not in node.meta:
            lines.append(f"return {node.args[0]}")
        elif node.op == "output":
            for item, role in zip(node.args[0], node.meta["roles"], strict=True):
                lines.append(f"return {item} as {role}")
        else:
            own = isinstance(node.target, FunctionType)  # printed with its address otherwise
            target = node.target.__name__ if own else str(node.target).removesuffix(".default")
            args = [a for a in node.args if not (isinstance(a, str) and a.startswith("hp:"))]
            lines.append(f"{node.name}{shape} = {target}({', '.join(map(str, args))}){where}")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _some(names: Iterable[str], most: int = 2) -> str:
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 4:
        return "[" + ", ".join(map(str, ranks)) + "]"
    step = ranks[1] - ranks[0]
    regular = all(b - a == step for a, b in pairwise(ranks))
    end = f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}" if regular else f"{ranks[0]} … {ranks[-1]}"
    return f"[{end}] ({len(ranks)})"


def _dtype(dtype: object) -> str:
    names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    text = str(dtype).removeprefix("torch.")
    return names.get(text, text)


def _shape(shape: Iterable[object]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _numel(shape: Iterable[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


__all__ = ["dump", "graph_text"]
