"""The flags of `train.py`, checked before torch is imported or a process is started."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

MODELS = ("byte", "hf:llama", "hf:qwen3", "hf:gpt2")


class UsageError(Exception):
    """Flags that cannot be run; the text says which, and what would do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run, as the command line describes it. Field names are the names of the flags."""

    model: str
    dim: int
    layers: int
    mesh: tuple[tuple[str, int], ...] | None
    dp_replicate_size: int | None
    ranks: int | None
    tp_plan: str | None
    steps: int
    batch_size: int
    seq_len: int
    grad_accum: int
    zero: int | None
    precision: str
    backend: str
    lr: float
    seed: int
    output: Path
    resume: bool
    overwrite: bool
    checkpoint_every: int
    compare: bool
    device: str
    plan_only: bool

    def as_json(self) -> dict[str, Any]:
        """The options as plain values."""
        return {**asdict(self), "output": str(self.output)}

    def processes(self) -> int:
        """How many ranks to start when torchrun has not started any."""
        if self.ranks is not None:
            return self.ranks
        if self.mesh is not None:
            return math.prod(size for _, size in self.mesh)
        return 1 if self.dp_replicate_size is None else 2 * self.dp_replicate_size

    def mesh_dims(self, world_size: int) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh dims over `world_size` ranks.

        Raises:
            UsageError: The sizes do not multiply to the number of ranks.
        """
        if self.mesh is not None:
            size = math.prod(size for _, size in self.mesh)
            if size != world_size:
                text = " x ".join(f"{name}={n}" for name, n in self.mesh)
                raise UsageError(
                    f"--mesh {text} has {size} ranks, but {world_size} were started; "
                    f"run torchrun with --nproc-per-node {size}, or change the mesh"
                )
            return self.mesh
        replicas = self.dp_replicate_size
        if replicas is None:
            return (("dp_shard", world_size),)
        if world_size % replicas:
            raise UsageError(
                f"--dp-replicate-size {replicas} does not divide the {world_size} ranks; "
                f"use one of {_divisors(world_size)}"
            )
        return (("dp_replicate", replicas), ("dp_shard", world_size // replicas))


def parse(argv: Sequence[str] | None = None, *, quiet: bool = False) -> Options:
    """Reads the command line; wrong flags end the process with exit code 2 and one line that says why.

    Args:
        argv: Arguments without the program's name; None reads `sys.argv`.
        quiet: Print nothing on errors (every rank but the first).
    """
    parser = _parser(quiet)
    values = vars(parser.parse_args(argv))
    options = Options(**values)
    if options.mesh is not None and options.dp_replicate_size is not None:
        parser.error("--mesh and --dp-replicate-size say the same thing; give one of them")
    if options.ranks is not None and options.mesh is not None:
        try:
            options.mesh_dims(options.ranks)
        except UsageError as error:
            parser.error(str(error))
    if options.model == "byte" and options.dim % 32:
        parser.error(
            f"--dim {options.dim}: expected a multiple of 32, the size of an attention head"
        )
    if options.resume and options.overwrite:
        parser.error("--resume goes on with a run and --overwrite starts anew; give one of them")
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"--output {options.output}: exists and is no directory")
    return options


class _Parser(argparse.ArgumentParser):
    quiet = False

    def error(self, message: str) -> NoReturn:
        if not self.quiet:
            sys.stderr.write(f"{self.prog}: error: {message}\n{self.prog} --help lists the flags\n")
        sys.exit(2)


def _parser(quiet: bool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        description="Train a small language model on the sources of Python's standard library, "
        "sharded by hp_compile. Run it under torchrun, or let it start its own ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.quiet = quiet
    add = parser.add_argument_group("model and data").add_argument
    add("--model", choices=MODELS, default="byte", help="byte: Llama-style, defined in models.py")
    add("--dim", type=_at_least(32), default=256, help="width")
    add("--layers", type=_at_least(1), default=4, help="transformer blocks")
    add("--batch-size", type=_at_least(1), default=4, help="sequences per rank and micro-batch")
    add("--seq-len", type=_at_least(2), default=128, help="bytes per sequence")
    add = parser.add_argument_group("parallelism").add_argument
    add("--mesh", type=mesh_dims, default=None, help="mesh dims, e.g. dp_replicate=2,dp_shard=2")
    add("--dp-replicate-size", type=_at_least(1), default=None, help="short form of --mesh")
    add("--ranks", type=_at_least(1), default=None, help="ranks to start without torchrun")
    add(
        "--tp-plan",
        default=None,
        help="how a tp dim of --mesh cuts the model: auto (the model's own plan), or a JSON file with styles by glob",
    )
    add(
        "--zero",
        type=int,
        choices=(1, 2, 3),
        default=None,
        help="ZeRO level; FSDP2's defaults if not given",
    )
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of compute and gathers")
    add("--backend", choices=("inductor", "aot_eager"), default="inductor", help="how programs run")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=_at_least(1), default=100, help="optimizer steps in all")
    add("--grad-accum", type=_at_least(1), default=1, help="micro-batches per step")
    add("--lr", type=_positive, default=2e-3, help="AdamW's learning rate after 10 warm-up steps")
    add("--seed", type=int, default=0, help="of weights and data order")
    add = parser.add_argument_group("output").add_argument
    add("--output", type=Path, default=Path("outputs/train"), help="folder for everything written")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    add("--overwrite", action="store_true", help="start anew in an --output that holds a run")
    add("--checkpoint-every", type=_at_least(0), default=0, help="steps; 0 saves at the end only")
    add(
        "--compare",
        action="store_true",
        help="also train unsharded on one process, print differences",
    )
    add("--plan-only", action="store_true", help="print and prove the plan, train nothing")
    return parser


def _at_least(least: int) -> Any:
    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return value

    return integer


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def tp_plan(name: str | None) -> str | dict[str, str] | None:
    """The value of `--tp-plan` as `Policy(tp_plan=...)` takes it.

    Raises:
        UsageError: The file cannot be read, or is no JSON object of texts.
    """
    if name is None or name == "auto":
        return name
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--tp-plan {name}: neither auto nor a JSON file: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise UsageError(
            f'--tp-plan {name}: expected an object such as {{"*.q_proj": "colwise", "*.o_proj": "rowwise"}}'
        )
    return found


def mesh_dims(text: str) -> tuple[tuple[str, int], ...]:
    """Reads names and sizes of mesh dims, as the type of a flag."""
    dims = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d*)\s*", part)
        if match is None:
            raise argparse.ArgumentTypeError(
                f"expected name=size,... such as dp_replicate=2,dp_shard=2, got {part!r} in {text!r}"
            )
        dims.append((match[1], int(match[2])))
    names = [name for name, _ in dims]
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"a mesh dim is named twice in {text!r}")
    return tuple(dims)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
