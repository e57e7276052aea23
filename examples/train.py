"""Train a language model on real text, sharded by hp_compile.

    python examples/train.py --mesh dp_replicate=2,dp_shard=2 --steps 60 --compare
    torchrun --standalone --nproc-per-node 4 examples/train.py --model hf:llama --zero 2
    python examples/train.py --mesh dp_shard=2,tp=2 --tp-plan auto --compare

Prints the plan and its proof, trains with a progress bar, and writes into `--output`: `options.json`,
`plan.txt`, `metrics.jsonl`, `loss.png` and checkpoints that `--resume` continues from, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from types import FrameType

from launch import launch
from options import Options, UsageError, parse, tp_plan

INTERRUPTED = 130


def main() -> int:
    """Checks the flags, starts ranks if torchrun has not, trains. Returns the exit code."""
    first = os.environ.get("RANK", "0") == "0"
    options = parse(quiet=not first)
    started = "WORLD_SIZE" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if started else options.processes()
    try:
        mesh = options.mesh_dims(world_size)
        check(options, mesh)
    except UsageError as error:
        if first:
            print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    if not started:
        return launch(__file__, sys.argv[1:], world_size)
    return train_rank(options, mesh)


def check(options: Options, mesh: tuple[tuple[str, int], ...]) -> None:
    """Checks what needs the libraries, but no process group and no weights.

    Raises:
        UsageError: The run cannot work; the text says why.
    """
    import torch

    check_mesh(mesh, options.tp_plan)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if options.model.startswith("hf:"):
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"--model {options.model} needs transformers: pip install 'hyper-parallel[hf]'"
            ) from error
    _check_output(options)


def check_mesh(mesh: tuple[tuple[str, int], ...], plan: str | None) -> None:
    """Checks that these scripts can train on a mesh.

    Args:
        mesh: Names and sizes of its dims.
        plan: Value of `--tp-plan`.

    Raises:
        UsageError: A dim has no role that they know, or a plan and a tp dim are not given together.
    """
    from hyper_parallel import infer_roles
    from hyper_parallel.errors import MeshError

    try:
        names, roles = infer_roles([name for name, _ in mesh], [size for _, size in mesh])
    except MeshError as error:
        raise UsageError(f"--mesh: {error}") from error
    other = [name for name in names if not {"replicate", "shard", "tp"} & set(roles.of(name))]
    if other:
        raise UsageError(
            f"--mesh: {other[0]} is a {roles.of(other[0])[0]} dim, and this script trains with "
            "replicate, shard and tp dims only; use dp_replicate, dp_shard and tp"
        )
    if roles.tp and plan is None:
        raise UsageError(
            f"--mesh: {roles.tp[0]} is a tp dim; say how it cuts the model with --tp-plan auto"
        )
    if plan is not None and not roles.tp:
        raise UsageError("--tp-plan: the mesh has no tp dim; use e.g. --mesh dp_shard=2,tp=2")
    tp_plan(plan)


def _check_output(options: Options) -> None:
    from checkpoint import complete

    saved = complete(options.output)
    if saved and not options.resume and not options.overwrite and not options.plan_only:
        raise UsageError(
            f"--output {options.output} holds a run, up to {saved[-1].name}; --resume goes on with it, "
            "--overwrite starts anew"
        )
    if not options.resume:
        return
    if not saved:
        raise UsageError(f"--resume: no complete checkpoint in {options.output}/checkpoints")
    written = json.loads((options.output / "options.json").read_text(encoding="utf-8"))
    for name in ("model", "dim", "layers", "seq_len", "seed"):
        wanted = getattr(options, name)
        if written[name] != wanted:
            raise UsageError(
                f"--resume: {options.output} was written with --{name.replace('_', '-')} "
                f"{written[name]}, this run says {wanted}"
            )


def train_rank(options: Options, mesh: tuple[tuple[str, int], ...]) -> int:
    """Trains on this rank; says in one line why it stopped, if it was stopped from outside."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch|copyreg")
    try:
        from training import Run

        return Run(options, mesh).main()
    except BaseException as error:
        # A rank that ends makes the collectives of the others fail: only the first cause is news.
        if interrupted or isinstance(error, KeyboardInterrupt):
            if os.environ["RANK"] == "0":
                print(f"\ntrain.py: interrupted; {_left_behind(options)}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # no wait for collectives that nobody will join
        if "closed by peer" in str(error).lower() or "connection reset" in str(error).lower():
            print(
                f"train.py: rank {os.environ['RANK']} lost another rank and stops", file=sys.stderr
            )
            sys.stderr.flush()
            os._exit(1)
        raise


def _left_behind(options: Options) -> str:
    from checkpoint import complete

    saved = complete(options.output)
    return f"--resume goes on from {saved[-1]}" if saved else "no checkpoint was written yet"


if __name__ == "__main__":
    sys.exit(main())
