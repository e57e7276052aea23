"""``hp-compile diff``: what another mesh, policy or version of the model changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from hp_compile import serial
from hp_compile.cli import console, options
from hp_compile.cli.diff_text import diff_parts
from hp_compile.cli.errors import Finding, RequestError
from hp_compile.cli.progress import Report, progress
from hp_compile.cli.request import PlanRequest, is_saved_plan, planned, request
from hp_compile.plan_diff import compare
from hp_compile.serial import SavedPlan

app = typer.Typer()


@app.command()
def diff(
    plans: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B]",
            help="Two saved plans (JSON), a saved plan and a MODEL, a saved plan and another mesh or policy for it, or a "
            "MODEL with two meshes or two policies.",
            show_default=False,
        ),
    ],
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", metavar="NAME=SIZE,...", help="Once or twice.", show_default=False),
    ] = None,
    policy: Annotated[
        list[Path] | None,
        typer.Option("--policy", metavar="FILE.toml", help="Once or twice.", show_default=False),
    ] = None,
    tp_plan: options.TpPlan = None,
    world_rank: options.Rank = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    build_on: options.BuildOn = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 if the plans differ.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare two plans: parameters, collectives with their bytes, mesh and policy.

    Example: hp-compile diff hf:config.json --mesh dp_shard=64 --mesh dp_replicate=8,dp_shard=8
    """
    meshes, policies = _pair("--mesh", mesh), _pair("--policy", policy)
    if len(plans) > 2:
        raise RequestError(f"diff compares two plans, got {len(plans)}: {' '.join(plans)}")
    twice = meshes[0] != meshes[1] or policies[0] != policies[1]
    changed = (mesh, policy, tp_plan, world_rank, inputs, batch, seq)
    against_itself = len(plans) == 1 and is_saved_plan(plans[0]) and not twice and any(changed)
    if len(plans) == 1 and not twice and not against_itself:
        raise RequestError(
            f"diff needs something to compare {plans[0]} with: a second plan, a second --mesh or a second --policy"
        )
    sides = plans * 2 if len(plans) == 1 else plans
    as_saved = (against_itself, False) if len(plans) == 1 else map(is_saved_plan, plans)
    saved = []
    with progress(quiet) as say:
        for side, load, one_mesh, one_policy in zip(sides, as_saved, meshes, policies, strict=True):
            if load:
                saved.append(serial.load(side))
                continue
            asked = request(
                side,
                one_mesh,
                policy=one_policy,
                tp_plan=tp_plan,
                rank=world_rank,
                inputs=inputs,
                batch=batch,
                seq=seq,
                build_on=build_on,
            )
            saved.append(make(asked, say))
    found = compare(saved[0], saved[1])
    console.show(diff_parts(found, saved[0], saved[1]))
    if found and exit_code:
        raise Finding


def make(asked: PlanRequest, say: Report) -> SavedPlan:
    """Makes a plan as a value.

    Args:
        asked: the request.
        say: told what is being done.
    """
    with planned(asked, say) as plan:
        return serial.save(plan, request=asked.values(None))


_Value = TypeVar("_Value")


def _pair(flag: str, values: list[_Value] | None) -> tuple[_Value | None, _Value | None]:
    """What a flag says for either side."""
    if not values:
        return None, None
    if len(values) > 2:
        raise RequestError(f"{flag} is given {len(values)} times; diff compares two plans")
    return values[0], values[-1]
