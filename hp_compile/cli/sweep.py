"""``hp-compile sweep``: which meshes of a number of devices cost least."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hp_compile.cli import console, options
from hp_compile.cli.errors import RequestError
from hp_compile.cli.progress import Report, progress
from hp_compile.cli.request import PlanRequest, planned, request
from hp_compile.cli.text import table
from hp_compile.cost import Profile, SweepRow, load_profile
from hp_compile.cost import sweep as price
from hp_compile.cost.search import ranked
from hp_compile.policy_file import load_policy

app = typer.Typer()


@app.command()
def sweep(
    model: options.Model,
    devices: Annotated[
        int, typer.Option("--devices", min=1, help="Number of ranks.", rich_help_panel=options.COST)
    ],
    memory_gb: Annotated[
        float | None,
        typer.Option(
            "--memory-gb",
            help="Limit for the peak of a rank, in 10^9 bytes.",
            rich_help_panel=options.COST,
            show_default="the machine's memory",
        ),
    ] = None,
    tp: Annotated[
        str,
        typer.Option(
            "--tp",
            metavar="N,...",
            help="Sizes of tensor parallel to try; each is one capture.",
            rich_help_panel=options.COST,
        ),
    ] = "1",
    policy: options.PolicyFile = None,
    tp_plan: options.TpPlan = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    build_on: options.BuildOn = None,
    profile: options.Machine = "h100",
    streams: options.Streams = 1,
    most: Annotated[
        int,
        typer.Option("--top", min=1, help="How many meshes to show.", rich_help_panel=options.COST),
    ] = 10,
    quiet: options.Quiet = False,
) -> None:
    """Print the best meshes for a number of devices: those that fit, the fastest first.

    Example: hp-compile sweep hf:config.json --devices 512 --tp 1,2,4,8 --tp-plan auto
    """
    machine = load_profile(profile)
    sizes = _tp_sizes(tp, devices)
    if sizes != [1] and tp_plan is None and (policy is None or load_policy(policy).tp_plan is None):
        raise RequestError(
            f"--tp {tp}: say how the model is cut: --tp-plan auto, or a policy with a tp_plan"
        )
    rows: list[SweepRow] = []
    limit = None if memory_gb is None else memory_gb * 1e9
    with progress(quiet) as say:
        for size in sizes:
            asked = request(
                model,
                _mesh(devices, size),
                policy=policy,
                tp_plan=tp_plan,
                inputs=inputs,
                batch=batch,
                seq=seq,
                build_on=build_on,
            )
            rows += _prices(asked, devices, machine, limit, streams, say)
    rows = ranked(rows)
    shown = f"{machine.name}, at most {(machine.memory_bytes if limit is None else limit) / 1e9:g} GB a rank"
    words = (
        f"{devices} ranks of {shown}; every data rank gets inputs of one size, and inputs/s counts how many of these all of "
        "them get through in a second"
    )
    console.show([words, _sweep_table(rows[:most])])


def _tp_sizes(text: str, devices: int) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise RequestError(f"--tp {text!r}: expected sizes such as 1,2,4,8")
    wrong = next((size for size in sizes if devices % size), None)
    if wrong is not None:
        raise RequestError(f"--tp {text}: {wrong} does not divide {devices} devices")
    return sorted(set(sizes))


def _mesh(devices: int, tp: int) -> str:
    """A small mesh to capture on: data dims are sized by the sweep."""
    data = f"dp_shard={min(2, devices // tp)}"
    return f"{data},tp={tp}"


def _prices(
    asked: PlanRequest,
    devices: int,
    machine: Profile,
    limit: float | None,
    streams: int,
    say: Report,
) -> list[SweepRow]:
    with planned(asked, say) as made:
        say(f"pricing meshes of {devices} ranks")
        return price(made, devices, profile=machine, memory_bytes=limit, streams=streams)


def _sweep_table(rows: list[SweepRow]) -> Any:
    names = list(rows[0].sizes) if rows else []
    amounts = ["peak GB", "sends GB", "step ms", "waits ms", "inputs/s"]
    found = table(*names, "fits", *amounts, right=[*names, *amounts])
    for row in rows:
        found.add_row(
            *(str(row.sizes[name]) for name in names),
            "yes" if row.fits else "no",
            f"{row.peak_bytes / 1e9:,.2f}",
            f"{row.sent_bytes / 1e9:,.2f}",
            f"{row.step_seconds * 1e3:,.1f}",
            f"{row.exposed_seconds * 1e3:,.1f}",
            f"{row.rate:,.1f}",
        )
    return found
