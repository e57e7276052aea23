"""How long a plan takes at the size of a real training run, without weights, GPUs or ranks.

    python benchmarks/plan_scale.py                    # Llama-3-70B shapes, HSDP 16 x 64, 10 to 80 layers
    python benchmarks/plan_scale.py --layers 80 --static --profile 40
    python benchmarks/plan_scale.py --configs --write docs/cli.md    # hp-compile plan of whole configs, and the table there

Every number of layers is one fresh process, so its peak memory is its own. A plan is captured from a model on the meta
device over a fake process group, passed through every pass that training runs, rendered as text and proved.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import platform
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import pipeline


def llama_70b(layers: int) -> nn.Module:
    """A Hugging Face Llama with the shapes of Llama-3-70B and ``layers`` blocks, on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


class Stages:
    """Seconds of each named stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def measure(layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Plans one model in this process."""
    stages = Stages()
    table = pipeline.PassTable()
    dist.init_process_group("fake", rank=options.rank, world_size=options.replicate * options.shard)
    mesh = init_device_mesh(
        "cpu", (options.replicate, options.shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    tokens = torch.zeros(options.batch, options.sequence, dtype=torch.long, device="meta")
    policy = hp_compile.Policy(
        reshard_after_forward=True,
        mp_policy=hp_compile.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
        dynamic=False if options.static else None,
    )
    with stages.stage("build"):
        model = llama_70b(layers)
    with pipeline.observe(table):
        with stages.stage("capture"):
            plan = hp_compile.plan(
                model, mesh, policy, args=(tokens,), kwargs={"labels": tokens, "use_cache": False}
            )
        with stages.stage("passes"):
            graphs = plan.graphs
    with stages.stage("dump"):
        text = plan.dump()
    with stages.stage("verify"):
        plan.verify()
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": {name: len(gm.graph.nodes) for name, gm in graphs.items()},
        "collectives": len(plan.collectives),
        "dump_lines": text.count("\n"),
        "seconds": stages.seconds,
        "total_seconds": sum(stages.seconds.values()),
        "passes": str(table),
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def measure_profiled(layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """As :func:`measure`, printing the functions that took longest."""
    profiler = cProfile.Profile()
    profiler.enable()
    result = measure(layers, options)
    profiler.disable()
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler, stream=sys.stderr).sort_stats(order).print_stats(options.profile)
    return result


def measure_in_process(layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs :func:`measure` in a fresh process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", str(layers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Prints one row a size, and how time and memory grow."""
    from rich.console import Console
    from rich.table import Table

    world = options.replicate * options.shard
    title = (
        f"hp_compile.plan, Llama-3-70B shapes, HSDP {options.replicate}x{options.shard} ({world} fake ranks), "
        f"{'static' if options.static else 'symbolic'} batch"
    )
    table = Table(title=title)
    names = list(results[0]["seconds"])
    for name in (
        "layers",
        "nodes",
        "collectives",
        *(f"{n} s" for n in names),
        "total s",
        "s/layer",
        "GB",
    ):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            str(result["layers"]),
            f"{sum(result['nodes'].values()):,}",
            f"{result['collectives']:,}",
            *(f"{result['seconds'][name]:.1f}" for name in names),
            f"{result['total_seconds']:.1f}",
            f"{result['total_seconds'] / result['layers']:.2f}",
            f"{result['peak_rss_gb']:.2f}",
        )
    console = Console(width=150)
    console.print(table)
    console.print(results[-1]["passes"])


# ------------------------------------------------------------------ the command on whole configs

CONFIGS = ("llama-3-8b", "llama-3-70b", "deepseek-v3")
MESHES = ("dp_replicate=8,dp_shard=64", "dp_replicate=64,dp_shard=256")


def measure_command(config: str, mesh: str) -> dict[str, float]:
    """Runs ``hp-compile plan`` of one of ``examples/configs`` in a process of its own, with one thread."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "hp_compile", "plan", f"hf:examples/configs/{config}.json"]
    command += ["--mesh", mesh, "--quiet", "--format", "text"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return {
        "wall": time.perf_counter() - start,
        "cpu": usage.ru_utime + usage.ru_stime,
        "gb": usage.ru_maxrss / 1e6,
    }


def commands_table(configs: Sequence[str]) -> list[str]:
    """One row for a config and a number of ranks, as Markdown."""
    lines = ["| config | ranks | CPU s | seconds | peak RSS |", "|---|---|---|---|---|"]
    for config in configs:
        for mesh in MESHES:
            ranks = math.prod(int(dim.partition("=")[2]) for dim in mesh.split(","))
            found = measure_command(config, mesh)
            lines.append(
                f"| `{config}.json` | {ranks:,} | {found['cpu']:.0f} | {found['wall']:.0f} | {found['gb']:.2f} GB |"
            )
            print(lines[-1], flush=True)
    return lines


def write_table(page: Path, lines: Sequence[str]) -> None:
    """Puts lines between the markers of a Markdown page."""
    start, end = "<!-- plan -->", "<!-- end of plan -->"
    before, _, rest = page.read_text().partition(start)
    _, _, after = rest.partition(end)
    page.write_text(before + "\n".join([start, "", *lines, "", end]) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80])
    parser.add_argument("--replicate", type=int, default=16)
    parser.add_argument("--shard", type=int, default=64)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--static", action="store_true", help="trace the batch dim as a number")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="print the N slowest functions"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--configs", nargs="*", choices=CONFIGS, help="run hp-compile plan of these, or of all"
    )
    parser.add_argument("--write", type=Path, help="put the table of --configs into this page")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.configs is not None:
        lines = commands_table(options.configs or CONFIGS)
        if options.write:
            write_table(options.write, lines)
        return
    if options.one is not None:
        run = measure_profiled if options.profile else measure
        print(json.dumps(run(options.one, options)))
        return
    results = [measure_in_process(layers, options) for layers in options.layers]
    report(results, options)
    if options.json:
        machine = {"cpus": len(__import__("os").sched_getaffinity(0)), "torch": torch.__version__}
        machine["python"] = platform.python_version()
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
