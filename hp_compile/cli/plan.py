"""``hp-compile plan``: what a step will run, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer

from hp_compile import serial
from hp_compile.cli import console, formats, options, text
from hp_compile.cli.progress import progress
from hp_compile.cli.request import planned, request

app = typer.Typer()


@app.command()
def plan(
    model: options.Model,
    mesh: options.Mesh = None,
    policy: options.PolicyFile = None,
    tp_plan: options.TpPlan = None,
    world_rank: options.Rank = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    build_on: options.BuildOn = None,
    params_only: Annotated[
        bool,
        typer.Option(
            "--params-only", help="Do not capture: placements and reductions, in seconds."
        ),
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="text|json|html|dump",
            help="text groups equal layers, json is for programs and golden files, html for the browser, dump has a line for "
            "each parameter and collective.",
            show_default="by the suffix of --output, else text",
        ),
    ] = None,
    output: options.Output = None,
    quiet: options.Quiet = False,
) -> None:
    """Print the parameters' layout and the collectives of one training step.

    Example: hp-compile plan hf:config.json --mesh dp_replicate=16,dp_shard=64
    """
    name = formats.choose(form, output)
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
        params_only=params_only or None,
    )
    folder = None if output is None else output.parent.resolve()
    with progress(quiet) as say, planned(asked, say) as made:
        if output is None and name == "text":
            parts = text.plan_parts(serial.save(made), asked.command())
        else:
            content = formats.formats()[name](made, asked, folder)
    if output is not None:
        formats.write(output, content)
    elif name == "text":
        console.show(parts)
    else:
        typer.echo(content, nl=False)
