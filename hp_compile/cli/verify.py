"""``hp-compile verify``: prove the programs of a plan, and say what has been proved."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import typer

from hp_compile.cli import console, options
from hp_compile.cli.errors import Finding
from hp_compile.cli.progress import progress
from hp_compile.cli.request import planned, request
from hp_compile.cli.text import table
from hp_compile.plan import Plan
from hyper_parallel.errors import VerificationError
from hyper_parallel.explain import explain_axes
from hyper_parallel.plan import ParamPlan
from passes import base

app = typer.Typer()


@app.command()
def verify(
    model: options.Model,
    mesh: options.Mesh = None,
    policy: options.PolicyFile = None,
    tp_plan: options.TpPlan = None,
    world_rank: options.Rank = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    build_on: options.BuildOn = None,
    quiet: options.Quiet = False,
) -> None:
    """Prove that every gradient is reduced exactly once over every mesh dim. Exit code 1 if not.

    The proof reads the finished programs and not the passes that made them; docs/verification.md says what it covers.
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
        graphs = made.graphs
        say("proving " + " and ".join(graphs))
        start = time.perf_counter()
        try:
            made.verify()
        except VerificationError as error:
            failure: VerificationError | None = error
        else:
            failure = None
            parts = _parts(made, time.perf_counter() - start)
    if failure is not None:
        console.show([f"not proved: {failure}"])
        raise Finding
    console.show(parts)


def _parts(plan: Plan, seconds: float) -> list[Any]:
    nodes = sum(len(gm.graph.nodes) for gm in plan.graphs.values())
    rows = table("proved", "of", right=["of"], fold=["proved"])
    for what, count in [*_gradients(plan), *_collectives(plan), *_outputs(plan)]:
        rows.add_row(what, f"{count:,}")
    return [
        f"proved: plan {plan.fingerprint} on {plan.layout.describe()}",
        f"{' and '.join(plan.graphs)}, {nodes:,} nodes, in {seconds:.1f} s",
        "",
        rows,
    ]


def _gradients(plan: Plan) -> list[tuple[str, int]]:
    trained = {
        role.fqn
        for gm in plan.graphs.values()
        for _, node, role in base.outputs(gm, base.ParamGrad)
        if node is not None
    }
    counted = Counter(_gradient_text(plan, p) for p in plan.params.values() if p.fqn in trained)
    left = len(plan.params) - len(trained)
    rows = list(counted.items())
    return [*rows, ("parameter has no gradient in the model and none here", left)] if left else rows


def _gradient_text(plan: Plan, param: ParamPlan) -> str:
    if param.ignored:
        return "gradient of an ignored parameter stays local"
    layout = plan.layout
    axes = layout.axes({*param.shard_axes, *param.replica_axes})
    axes = tuple(axis for axis in axes if layout.size((axis,)) > 1)
    if not axes:
        return "gradient stays local: no other rank sees different data for it"
    over = " and ".join(explain_axes(layout, (axis,)) for axis in axes)
    scale = f", divided by {param.batch_ranks}" if plan.policy.reduce_op == "avg" else ""
    return f"gradient is summed once over {over}{scale}, kept as {_dtype(param.dtype)}"


_CLAIMS = {
    "all_gather": "{phase} all-gather over {axes} joins the right shards, element by element",
    "reduce_scatter": "{phase} reduce-scatter over {axes} sends each rank its own rows",
    "all_reduce": "{phase} all-reduce over {axes} sums values that differ on these ranks",
    "all_to_all": "{phase} all-to-all over {axes} has this group and is waited for",
}


def _collectives(plan: Plan) -> list[tuple[str, int]]:
    counted = Counter((c.kind, c.phase, c.axes) for c in plan.collectives)
    return [
        (_CLAIMS[kind].format(phase=phase, axes=explain_axes(plan.layout, axes)), count)
        for (kind, phase, axes), count in counted.items()
    ]


def _outputs(plan: Plan) -> list[tuple[str, int]]:
    user = saved = 0
    for gm in plan.graphs.values():
        user += sum(1 for _ in base.outputs(gm, base.UserOutput))
        saved += sum(1 for _ in base.outputs(gm, base.SavedOutput))
    rows = [("output is computed as in the captured model", user)]
    if saved:
        rows.append(("value saved for backward is computed as captured", saved))
    return rows


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
