"""Where output goes: a terminal of its own width, or a file or pipe whose lines are never folded."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console

_UNFOLDED = 1000


def stdout() -> Console:
    """The console for results."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_UNFOLDED)
    return console


def stderr() -> Console:
    """The console for errors and progress."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def show(parts: Iterable[Any]) -> None:
    """Prints parts to standard output.

    Args:
        parts: texts and rich renderables.
    """
    console = stdout()
    if console.is_terminal:
        for part in parts:
            console.print(part)
    else:
        sys.stdout.write(as_text(parts))


def as_text(parts: Iterable[Any], width: int = _UNFOLDED) -> str:
    """Parts as plain text, without colours and trailing blanks.

    Args:
        parts: texts and rich renderables.
        width: columns.
    """
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, highlight=False, markup=False, emoji=False, color_system=None
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
