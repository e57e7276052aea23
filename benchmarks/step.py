"""Seconds and memory of one training step, ours beside PyTorch's own, on the same two CPU ranks in one run.

    make bench                                        # or: python benchmarks/step.py
    python benchmarks/step.py --variants fsdp2 ours --rounds 20 --json step.json

All variants live in the same two processes and take turns, a few steps each, so a busy machine slows all of them alike.
Ratios are taken within a round and only then summarised. Memory is what one step allocates at its peak beyond what was
there before it (PyTorch's CPU allocator, as the profiler sees it; buffers inside gloo are not part of it).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hp_compile

BASELINE = "fsdp2"


@dataclass(frozen=True)
class Workload:
    """The model and its input."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocab: int = 1024
    batch: int = 4
    sequence: int = 128


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.heads = w.heads
        self.norm1, self.norm2 = nn.LayerNorm(w.width), nn.LayerNorm(w.width)
        self.qkv = nn.Linear(w.width, 3 * w.width)
        self.out = nn.Linear(w.width, w.width)
        self.up, self.down = nn.Linear(w.width, 4 * w.width), nn.Linear(4 * w.width, w.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small decoder."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(w.vocab, w.width)
        self.positions = nn.Embedding(w.sequence, w.width)
        self.blocks = nn.ModuleList(Block(w) for _ in range(w.layers))
        self.norm = nn.LayerNorm(w.width)
        self.head = nn.Linear(w.width, w.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ------------------------------------------------------------------ the contestants


def _compute(w: Workload) -> nn.Module:
    return torch.compile(GPT(w))  # type: ignore[return-value]


def _ddp(w: Workload) -> nn.Module:
    return torch.compile(DistributedDataParallel(GPT(w)))  # type: ignore[return-value]


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def _fsdp2(w: Workload, *, compiled: bool = False) -> nn.Module:
    model, mesh = GPT(w), _mesh()
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _ours(w: Workload, **policy: Any) -> nn.Module:
    return hp_compile.shard(GPT(w), _mesh(), hp_compile.Policy(**policy))


@dataclass(frozen=True)
class Variant:
    """One way to train the model."""

    title: str
    build: Callable[[Workload], nn.Module]


VARIANTS = {
    "compute": Variant("compute only, torch.compile, no communication", _compute),
    "ddp": Variant("DistributedDataParallel, torch.compile", _ddp),
    "fsdp2": Variant("fully_shard, eager", _fsdp2),
    "fsdp2_compiled": Variant(
        "fully_shard, torch.compile on every block", lambda w: _fsdp2(w, compiled=True)
    ),
    "ours_eager": Variant("hp_compile, aot_eager", lambda w: _ours(w, backend="aot_eager")),
    "ours": Variant("hp_compile, inductor, one bucket a unit", _ours),
    "ours_4mb": Variant("hp_compile, inductor, 4 MB buckets", lambda w: _ours(w, bucket_mb=4)),
    "ours_one": Variant(
        "hp_compile, inductor, one bucket a phase", lambda w: _ours(w, bucket_mb=1e6)
    ),
    "ours_each": Variant("hp_compile, inductor, no buckets", lambda w: _ours(w, bucket_mb=0)),
    "ours_static": Variant("hp_compile, inductor, static batch", lambda w: _ours(w, dynamic=False)),
}


# ------------------------------------------------------------------ measuring


class Trainer:
    """A model, its optimizer and its data on this rank."""

    def __init__(self, name: str, w: Workload, rank: int) -> None:
        torch.manual_seed(0)
        self.model = VARIANTS[name].build(w)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        generator = torch.Generator().manual_seed(rank)
        shape = (w.batch, w.sequence)
        self.inputs = torch.randint(w.vocab, shape, generator=generator)
        self.targets = torch.randint(w.vocab, shape, generator=generator)

    def step(self) -> float:
        """One training step; returns its loss."""
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes that ``run`` has allocated at its peak, above what was allocated before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    total = peak = 0
    for _, nbytes in memory:
        total += nbytes
        peak = max(peak, total)
    return peak


def worker(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """Runs every variant in turns on one rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    w = options.workload
    trainers: dict[str, Trainer] = {}
    losses: dict[str, list[float]] = {}
    start_up: dict[str, float] = {}
    for name in options.variants:
        dist.barrier()
        start = time.perf_counter()
        trainers[name] = Trainer(name, w, rank)
        losses[name] = [trainers[name].step() for _ in range(3)]
        start_up[name] = time.perf_counter() - start
        if rank == 0:
            print(f"{name}: ready in {start_up[name]:.1f} s, losses {losses[name]}", flush=True)
    rounds: list[dict[str, float]] = []
    for index in range(options.rounds):
        seconds = {}
        shift = index % len(options.variants)
        for name in [*options.variants[shift:], *options.variants[:shift]]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                trainers[name].step()
            dist.barrier()
            seconds[name] = (time.perf_counter() - start) / options.steps
        rounds.append(seconds)
    memory = {name: peak_bytes(trainer.step) for name, trainer in trainers.items()}
    results.put(
        (rank, {"rounds": rounds, "memory": memory, "losses": losses, "start_up": start_up})
    )
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[int, Any]:
    """Starts the ranks and collects what each of them measured."""
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.SimpleQueue()
    processes = [
        context.Process(target=worker, args=(rank, store.port, options, results))
        for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed; its traceback is above")
    return dict(results.get() for _ in processes)


# ------------------------------------------------------------------ reporting


def summarise(measured: dict[int, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a variant: median and quartiles of seconds and of the ratio to the baseline in the same round."""
    rounds = measured[0]["rounds"]
    rows = []
    for name in options.variants:
        seconds = [r[name] for r in rounds]
        ratios = [r[name] / r[BASELINE] for r in rounds] if BASELINE in options.variants else []
        rows.append(
            {
                "variant": name,
                "title": VARIANTS[name].title,
                "seconds": statistics.median(seconds),
                "seconds_min": min(seconds),
                "seconds_quartiles": _quartiles(seconds),
                "ratio": statistics.median(ratios) if ratios else None,
                "ratio_quartiles": _quartiles(ratios) if ratios else None,
                "peak_bytes": max(m["memory"][name] for m in measured.values()),
                "start_up_seconds": measured[0]["start_up"][name],
                "first_losses": measured[0]["losses"][name],
            }
        )
    return rows


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    w = options.workload
    table = Table(
        title=f"{w.layers}-layer GPT, d={w.width}, batch {w.batch}x{w.sequence}, {options.ranks} ranks x 1 thread, gloo; "
        f"{options.rounds} rounds of {options.steps} steps"
    )
    table.add_column("variant")
    for name in ("s/step", "quartiles", f"x {BASELINE}", "quartiles", "peak MB", "ready s"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = row["ratio"]
        table.add_row(
            row["title"],
            f"{row['seconds']:.4f}",
            "{:.4f}-{:.4f}".format(*row["seconds_quartiles"]),
            f"{ratio:.2f}" if ratio else "",
            "{:.2f}-{:.2f}".format(*row["ratio_quartiles"]) if ratio else "",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['start_up_seconds']:.1f}",
        )
    Console(width=140).print(table)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = platform.processor() or platform.machine()
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ()
    ):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    for name, value in asdict(Workload()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.workload = Workload(**{name: getattr(options, name) for name in asdict(Workload())})
    measured = measure(options)
    rows = summarise(measured, options)
    report(rows, options)
    if options.json:
        written = {"machine": machine(), "workload": asdict(options.workload), "rows": rows}
        written["rounds"] = measured[0]["rounds"]
        options.json.write_text(json.dumps(written, indent=1))
    ours = next((r for r in rows if r["variant"] == "ours"), None)
    if ours and ours["ratio"]:
        verdict = "not slower" if ours["ratio"] <= 1.0 else "SLOWER"
        print(f"hp_compile (inductor) is {verdict} than fully_shard (eager): {ours['ratio']:.2f}x")


if __name__ == "__main__":
    main()
