"""Texts of verification errors: which parameter, which axis, what was found, by which way it came, what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import fx

from hyper_parallel.errors import VerificationError
from passes.base import module_path, source_line

_STEPS = 6


def error(
    what: str,
    *,
    node: fx.Node | None = None,
    found: str = "",
    expected: str = "",
    cause: str = "",
) -> VerificationError:
    """An error that reads like a good type error.

    Args:
        what: the sentence: parameter FQN or node, mesh dim, what is wrong.
        node: where; the nodes that lead to it are listed.
        found: what the program does.
        expected: what it should do.
        cause: the likely cause.
    """
    lines = [what]
    if found:
        lines.append(f"  found:    {found}")
    if expected:
        lines.append(f"  expected: {expected}")
    if node is not None:
        lines.append("  path:")
        lines += [f"    {line}" for line in path(node)]
    if cause:
        lines.append(f"  likely:   {cause}")
    return VerificationError("\n".join(lines))


def path(node: fx.Node) -> list[str]:
    """The node and what led to it, first input first, nearest last."""
    steps = [node]
    while len(steps) < _STEPS and steps[-1].all_input_nodes:
        steps.append(steps[-1].all_input_nodes[0])
    return [describe(step) for step in reversed(steps)]


def describe(node: fx.Node) -> str:
    """One node on one line: name, operator, module FQN and source line where known."""
    comm = node.meta.get("comm")
    plain = isinstance(node.target, FunctionType)
    target = node.target.__name__ if plain else node.target  # type: ignore[union-attr]
    what = f"input {node.meta.get('role')}" if node.op == "placeholder" else str(target)
    what = what.removesuffix(".default")
    if comm is not None:
        what += f" over {'×'.join(comm.axes)} for {comm.purpose} of {some(comm.params)}"
    where = " ".join(filter(None, (module_path(node), source_line(node))))
    return f"{node.name} = {what}" + (f"   [{where}]" if where else "")


def some(names: Sequence[Any], most: int = 3) -> str:
    """The first few of many names."""
    shown = ", ".join(str(n) for n in names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
