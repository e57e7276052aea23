"""Runs `hp-compile` in this process, in a directory of its own."""

from __future__ import annotations

from dataclasses import dataclass

from typer.testing import CliRunner

from hp_compile.cli.app import app


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def hp(*words: str) -> Ran:
    """Run one command line; an error that has no message of its own is raised."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


TINY = ("tests.models:TinyBlocks", "--inputs", "float32[batch,8]")

_ASCII = str.maketrans({"─": "-", "×": "x", "…": "...", "→": "->"})


def plain(text: str) -> str:
    """The text in ASCII, which is what expecttest can accept."""
    return text.translate(_ASCII)
