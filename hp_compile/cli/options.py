"""Options that several commands share, as types for typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hp_compile.cost import BUILT_IN

_MODEL = "Model"
_MESH = "Mesh and policy"
COST = "Cost"

MODEL_HELP = (
    "package.module:factory (a class, or a function without arguments, that gives an nn.Module), "
    "hf:config.json, hf:directory or hf:name (a Hugging Face causal language model), or a saved plan, whose own arguments "
    "then are the defaults."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="Mesh dims in order, such as dp_replicate=16,dp_shard=64. Known names: dp_replicate, dp_shard, tp, ep, cp.",
        rich_help_panel=_MESH,
        show_default=False,
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE.toml",
        help="Fields of hp_compile.Policy as TOML.",
        rich_help_panel=_MESH,
        show_default=False,
    ),
]
TpPlan = Annotated[
    str | None,
    typer.Option(
        "--tp-plan",
        metavar="auto",
        help="Tensor parallelism by the model's own plan.",
        rich_help_panel=_MESH,
        show_default=False,
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        "--world-rank",
        metavar="R",
        help="The rank whose view is planned.",
        rich_help_panel=_MESH,
        show_default="0",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs",
        metavar="SPEC",
        help="Example inputs: package.module:function that returns them (a tensor, a tuple of arguments or a dict of "
        "keywords; it may take batch and seq), or a tensor as DTYPE\\[SIZES] or NAME=DTYPE\\[SIZES] such as "
        "float32\\[batch,128], once for each input.",
        rich_help_panel=_MODEL,
        show_default="int64 tokens of sizes batch, seq, where the model takes them",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        help="Sequences on a rank.",
        rich_help_panel=_MODEL,
        show_default="2",
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(
        "--seq",
        min=1,
        help="Tokens in a sequence.",
        rich_help_panel=_MODEL,
        show_default="2048, or the model's limit",
    ),
]
BuildOn = Annotated[
    str | None,
    typer.Option(
        "--build-on",
        metavar="meta|cpu",
        help="Where the model is built: meta needs no memory, cpu suits a constructor that reads values.",
        rich_help_panel=_MODEL,
        show_default="meta",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write there instead.", show_default=False),
]
Machine = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.toml",
        help=f"The machine: {', '.join(BUILT_IN)}, or a file of the same form.",
        rich_help_panel=COST,
    ),
]
Streams = Annotated[
    int,
    typer.Option("--streams", min=1, max=2, help="Communication streams.", rich_help_panel=COST),
]
