"""``hp-compile explain``: the life of one parameter through a step, with the reason for each part of it."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from hp_compile.cli import console, options
from hp_compile.cli.errors import RequestError
from hp_compile.cli.life import Life, life
from hp_compile.cli.progress import progress
from hp_compile.cli.request import planned, request
from hp_compile.cli.text import heading
from hp_compile.plan import Plan

app = typer.Typer()

_LABEL = 11
_WIDTH = 80


@app.command()
def explain(
    model: options.Model,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="FQN...", help="Names of parameters, or globs of them.", show_default=False
        ),
    ],
    mesh: options.Mesh = None,
    policy: options.PolicyFile = None,
    tp_plan: options.TpPlan = None,
    world_rank: options.Rank = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    build_on: options.BuildOn = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Parameters to explain.")] = 5,
    quiet: options.Quiet = False,
) -> None:
    """Follow parameters through a step: where they lie, when they are gathered, what reads them, how they are reduced.

    Example: hp-compile explain plan.json "model.layers.0.*.weight"
    """
    asked = request(
        model,
        mesh,
        policy=policy,
        tp_plan=tp_plan,
        rank=world_rank,
        inputs=inputs,
        batch=batch,
        seq=seq,
        build_on=build_on,
    )
    with progress(quiet) as say, planned(asked, say) as made:
        found = matching(list(made.params), names)
        parts = [part for fqn in found[:most] for part in _parts(made, life(made, fqn))]
    if len(found) > most:
        parts.append(f"… and {len(found) - most} more match; --most {len(found)} shows all")
    console.show(parts)


def matching(fqns: Sequence[str], globs: Sequence[str]) -> list[str]:
    """Parameters that the globs name, in registration order.

    Raises:
        RequestError: one names none; the text lists close names.
    """
    chosen: set[str] = set()
    for glob in globs:
        hits = [fqn for fqn in fqns if fqn == glob or fnmatchcase(fqn, glob)]
        if not hits:
            raise RequestError(f"no parameter is called {glob!r}; {_close(fqns, glob)}")
        chosen.update(hits)
    return [fqn for fqn in fqns if fqn in chosen]


def _close(fqns: Sequence[str], glob: str) -> str:
    inside = [fqn for fqn in fqns if glob.strip("*.") and glob.strip("*.") in fqn]
    close = list(dict.fromkeys([*difflib.get_close_matches(glob, fqns, n=4, cutoff=0.5), *inside]))
    if close:
        return f"close are {', '.join(close[:4])}"
    return f"the parameters are {', '.join(fqns[:4])}{', …' if len(fqns) > 4 else ''}"


def _parts(plan: Plan, told: Life) -> list[Any]:
    parts: list[Any] = [heading(told.fqn)]
    for label, lines in told.sections:
        for index, line in enumerate(lines):
            parts += _fold(label if index == 0 else "", line)
    return [*parts, ""]


def _fold(label: str, line: str) -> list[str]:
    return textwrap.wrap(
        line,
        _WIDTH,
        initial_indent="  " + label.ljust(_LABEL),
        subsequent_indent=" " * (_LABEL + 4),
        break_on_hyphens=False,
        break_long_words=False,
    )
