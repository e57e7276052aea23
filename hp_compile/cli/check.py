"""``hp-compile check``: the plan that is kept in the repository is the plan that would run. For continuous integration."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from hp_compile import serial
from hp_compile.cli import console, formats, options, plan
from hp_compile.cli.diff_text import diff_parts
from hp_compile.cli.errors import Finding, RequestError
from hp_compile.cli.progress import progress
from hp_compile.cli.request import PlanRequest, planned, request, saved_request
from hp_compile.plan_diff import compare

app = typer.Typer()

_COMMAND = re.compile(r"\$ (?:cd (?P<root>.+?) && )?hp-compile plan (?P<words>.*)")


@app.command()
def check(
    golden: Annotated[
        Path,
        typer.Argument(
            metavar="GOLDEN",
            help="A plan that was saved with hp-compile plan --output, as .json or as text.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="As for plan. Without it, the file says what it was made from.",
            show_default=False,
        ),
    ] = None,
    mesh: options.Mesh = None,
    policy: options.PolicyFile = None,
    tp_plan: options.TpPlan = None,
    world_rank: options.Rank = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    build_on: options.BuildOn = None,
    update: Annotated[
        bool, typer.Option("--update", help="Accept the plan of now: write GOLDEN anew.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Make the plan again and compare it with the file. Exit code 1 and the difference if it has changed.

    Example: hp-compile plan train.model:build --mesh dp_shard=64 -o plan.json, and in CI hp-compile check plan.json
    """
    given: dict[str, Any] = {
        "policy": policy,
        "tp_plan": tp_plan,
        "rank": world_rank,
        "inputs": inputs,
        "batch": batch,
        "seq": seq,
        "build_on": build_on,
    }
    if not golden.exists() and not update:
        raise RequestError(
            f"{golden}: there is no such file; write it with hp-compile plan MODEL --mesh ... --output {golden}"
        )
    form = formats.choose(None, golden)
    if form not in ("json", "text"):
        raise RequestError(f"{golden}: check compares .json files and text, not {form}")
    base = None if model else _request_in(golden)
    asked = request(model, mesh, base=base, **given)
    folder = golden.parent.resolve()
    with progress(quiet) as say, planned(asked, say) as made:
        content = formats.formats()[form](made, asked, folder)
    parts, changed = _compare(golden, content, form)
    if update:
        formats.write(golden, content)
        console.show([*parts, "", f"written: {golden}"] if changed else [f"unchanged: {golden}"])
        return
    if not changed:
        console.show([f"as in {golden}"])
        return
    accept = shlex.join(["hp-compile", "check", str(golden), "--update"])
    console.show(
        [
            f"the plan is not the one in {golden}",
            *parts,
            "",
            f"If this is intended, accept it with: {accept}",
        ]
    )
    raise Finding


def _request_in(golden: Path) -> PlanRequest:
    """What a file was made from.

    Raises:
        HPCompileError: it does not exist, or does not say so.
    """
    if not golden.exists():
        raise RequestError(
            f"{golden}: there is no such file that could say what to plan; give MODEL and --mesh"
        )
    if formats.choose(None, golden) == "json":
        return saved_request(golden)
    first = read(golden).partition("\n")[0]
    match = _COMMAND.fullmatch(first)
    if match is None:
        raise RequestError(
            f"{golden}: the first line is not the command that made it ($ hp-compile plan ...); write it with "
            "hp-compile plan --output, or give MODEL and --mesh"
        )
    command = typer.main.get_command(plan.app)
    try:
        values = dict(command.make_context("plan", shlex.split(match["words"])).params)
    except (TyperException, ValueError) as error:
        text = getattr(error, "message", str(error))
        raise RequestError(f"{golden}: its first line is no valid command: {text}") from error
    kept = {name: values[name] for name in ("tp_plan", "inputs", "batch", "seq", "build_on")}
    return request(
        values["model"],
        values["mesh"],
        policy=values["policy"],
        rank=values["world_rank"],
        params_only=values["params_only"] or None,
        root=golden.parent.joinpath(*shlex.split(match["root"] or "")),
        **kept,
    )


def read(path: Path) -> str:
    """Reads a text file.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}") from error


def _compare(golden: Path, content: str, form: str) -> tuple[list[Any], bool]:
    """The difference between a file and the plan of now, and whether there is any."""
    if not golden.exists():
        return [], True
    if form == "json":
        before, after = serial.load(golden), serial.loads(content)
        found = compare(before, after)
        return diff_parts(found, before, after), bool(found)
    old, new = read(golden).splitlines(), content.splitlines()
    if old[1:] == new[1:]:  # the first line is the command
        return [], False
    lines = difflib.unified_diff(old, new, str(golden), "now", lineterm="", n=6)
    return list(lines), True
