"""The forms in which a plan is written, by name; the one place that knows which there are."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from hp_compile import serial
from hp_compile.cli import console, text
from hp_compile.cli.errors import RequestError
from hp_compile.cli.request import PlanRequest
from hp_compile.plan import Plan

_SUFFIXES = {".json": "json", ".html": "html", ".htm": "html"}


def as_json(plan: Plan, asked: PlanRequest, folder: Path | None) -> str:
    """The JSON document of ``hp_compile.serial``."""
    return serial.dumps(serial.save(plan, request=asked.values(folder)))


def as_text(plan: Plan, asked: PlanRequest, folder: Path | None) -> str:
    """The text of a plan, as it is kept in a repository: its first line is the command that makes it."""
    return console.as_text(text.plan_parts(serial.save(plan), command_line(asked, folder)))


def as_html(plan: Plan, asked: PlanRequest, folder: Path | None) -> str:
    """A page for the browser."""
    page = importlib.import_module("hp_compile.page")
    return str(page.render(plan))


def as_dump(plan: Plan, asked: PlanRequest, folder: Path | None) -> str:
    """``Plan.dump``: every parameter and collective on a line of its own."""
    return plan.dump()


Writer = Callable[[Plan, PlanRequest, Path | None], str]


def formats() -> Mapping[str, Writer]:
    """Writers by name; html only where ``hp_compile.page`` is part of the installation."""
    found: dict[str, Writer] = {"text": as_text, "json": as_json, "dump": as_dump}
    if importlib.util.find_spec("hp_compile.page") is not None:
        found["html"] = as_html
    return found


def choose(name: str | None, output: Path | None) -> str:
    """The format that is asked for: by name, by the suffix of the file, else text.

    Args:
        name: what ``--format`` says.
        output: what ``--output`` says.

    Raises:
        RequestError: there is no such format.
    """
    chosen = name or _SUFFIXES.get(output.suffix if output else "", "text")
    if chosen not in formats():
        raise RequestError(f"--format {chosen}: the formats are {', '.join(formats())}")
    return chosen


def command_line(asked: PlanRequest, folder: Path | None) -> str:
    """The command that makes a plan, from the folder that its file lies in.

    Args:
        asked: the request.
        folder: the folder; ``None`` when unknown.
    """
    root = str(asked.values(folder).get("root", "."))
    command = asked.command()
    return command if root == "." else f"cd {shlex.quote(root)} && {command}"


def write(path: Path, content: str) -> None:
    """Writes a file.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--output {path}: {error.strerror or error}") from error


__all__ = ["choose", "command_line", "formats", "write"]
