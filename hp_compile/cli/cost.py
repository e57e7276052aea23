"""``hp-compile cost``: what a step costs on one mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hp_compile.cli import console, options
from hp_compile.cli.progress import progress
from hp_compile.cli.request import PlanRequest, planned, request
from hp_compile.cli.text import table
from hp_compile.cost import CostModel, Profile, load_profile, write_trace

app = typer.Typer()


@app.command()
def cost(
    model: options.Model,
    mesh: options.Mesh = None,
    policy: options.PolicyFile = None,
    tp_plan: options.TpPlan = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    build_on: options.BuildOn = None,
    profile: options.Machine = "h100",
    streams: options.Streams = 1,
    expressions: Annotated[
        bool,
        typer.Option(
            "--expressions",
            help="Also print costs in the sizes of the mesh and the batch.",
            rich_help_panel=options.COST,
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write the simulated timeline for Perfetto.",
            rich_help_panel=options.COST,
            show_default=False,
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Price a step: bytes, memory, FLOPs, and the estimated time on a machine.

    Bytes are exact; docs/cost.md says how well memory agrees with measured steps, and that time is a simulation.
    """
    machine = load_profile(profile)
    asked = request(
        model,
        mesh,
        policy=policy,
        tp_plan=tp_plan,
        inputs=inputs,
        batch=batch,
        seq=seq,
        build_on=build_on,
    )
    with progress(quiet) as say, planned(asked, say) as made:
        say("pricing the step")
        priced = CostModel(made)
        parts = _cost_parts(priced, machine, streams, expressions)
        if trace is not None:
            write_trace(priced.timeline(machine, streams=streams), trace)
    console.show([f"$ {_command('cost', asked)} --profile {profile}", *parts])


def _command(name: str, asked: PlanRequest) -> str:
    return asked.command().replace("hp-compile plan", f"hp-compile {name}", 1)


def _cost_parts(priced: CostModel, machine: Profile, streams: int, expressions: bool) -> list[Any]:
    here = priced.at()
    step = priced.timeline(machine, streams=streams)
    rows = table("a step, on one rank", "amount", right=["amount"])
    for kind, nbytes in here.sent.items():
        rows.add_row(f"sent by {kind}", f"{nbytes:,} B")
    memory = here.memory
    for what, nbytes in (
        ("parameters", memory.params),
        ("optimizer state (AdamW)", memory.optimizer),
        ("gradients", memory.gradients),
        ("saved for backward", memory.saved),
        ("gathered weights, at most", memory.weights),
        ("peak", memory.peak),
    ):
        rows.add_row(what, f"{nbytes:,} B")
    for phase, flops in here.flops.items():
        rows.add_row(f"FLOPs in {phase}", f"{flops:,}")
    rows.add_row(f"estimated time on {machine.name}", f"{step.seconds * 1e3:,.1f} ms")
    rows.add_row("of it, waiting for collectives", f"{step.exposed * 1e3:,.1f} ms")
    parts: list[Any] = [
        f"mesh {priced.plan.layout.describe()}, inputs {_sizes(here.sizes, priced)}",
        rows,
    ]
    if expressions:
        fixed = priced.fixed
        held = f", at {', '.join(f'{a}={n}' for a, n in fixed.items())}" if fixed else ""
        parts += ["", f"in the sizes of the mesh and the inputs, for dims larger than 1{held}:"]
        parts += [f"sent by {kind}: {e}" for kind, e in priced.sent.items()]
        parts += [f"{what}: {e}" for what, e in priced.memory.items()]
        parts += [f"FLOPs in {phase}: {e}" for phase, e in priced.flops.items()]
    return parts


def _sizes(sizes: Mapping[str, int], priced: CostModel) -> str:
    """Sizes of the dynamic input dims."""
    dims = priced.plan.layout.dim_names
    found = [f"{name}={size}" for name, size in sizes.items() if name not in dims]
    return ", ".join(found) or "of fixed sizes"
