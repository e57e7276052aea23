"""The eager path beside PyTorch's own fully_shard: step time, peak memory, collectives.

    PYTHONPATH=. python benchmarks/eager_vs_fsdp2.py --write docs/eager.md

All variants train the same model on the same data in the same processes, in turns, so that noise of
the machine meets them alike. Memory is the largest sum of live allocations during a step.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from hyper_parallel import fully_shard as eager_fully_shard
from tests.count_collectives import count_collectives
from tests.models import LMConfig, TransformerLM, build, lm_batch, lm_loss

MARK_BEGIN, MARK_END = "<!-- table: begin -->", "<!-- table: end -->"
BATCH, LENGTH = 2, 32
CONFIG = LMConfig(dim=128, heads=4, hidden=352, blocks=4, vocab=512, max_length=LENGTH)


def make(apply: Callable[..., Any], mesh: Any, device: str, **settings: Any) -> nn.Module:
    model = build(TransformerLM, CONFIG).to(device)
    for block in model.blocks:
        apply(block, mesh=mesh, **settings)
    apply(model, mesh=mesh, **settings)
    return model


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    loss = lm_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def peak_memory(step: Callable[[], Any], device: str) -> int:
    """Return the bytes that a step allocates at its peak, above what lives before it."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    total = peak = 0
    for _, nbytes in sorted(changes):
        total += nbytes
        peak = max(peak, total)
    return peak


def variants(mesh: Any, hybrid: Any, device: str) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return (PyTorch's, eager) models for each row of the table."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rows: dict[str, tuple[Any, dict[str, Any]]] = {
        "reshard_after_forward=True": (mesh, {"reshard_after_forward": True}),
        "reshard_after_forward=False": (mesh, {"reshard_after_forward": False}),
        "bf16 parameters, fp32 reduction": (
            mesh,
            {"reshard_after_forward": True, "mp_policy": low},
        ),
        "hybrid, one rank a shard group": (hybrid, {"reshard_after_forward": True}),
    }
    return {
        row: tuple(
            make(apply, where, device, **settings)
            for apply in (stock_fully_shard, eager_fully_shard)
        )
        for row, (where, settings) in rows.items()
    }


def measure(rank: int, ranks: int, steps: int, device: str, path: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" or ranks > torch.cuda.device_count() else "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{path}.store", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp_shard",))
    hybrid = init_device_mesh(device, (ranks, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    tokens, targets = lm_batch(rank, 0, size=BATCH, length=LENGTH, vocab=CONFIG.vocab)
    batch = tokens.to(device), targets.to(device)
    lines = []
    for row, models in variants(mesh, hybrid, device).items():
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
        losses: list[list[float]] = [[], []]
        times: list[list[float]] = [[], []]
        for index in range(steps):
            order = (0, 1) if index % 2 else (1, 0)
            for which in order:
                dist.barrier()
                start = time.perf_counter()
                losses[which].append(one_step(models[which], optimizers[which], batch))
                if index >= 2:  # warm
                    times[which].append(time.perf_counter() - start)
        assert losses[0] == losses[1], f"{row}: the losses are not bit-equal"
        cells = []
        for model, optimizer, seconds in zip(models, optimizers, times, strict=True):
            step = lambda m=model, o=optimizer: one_step(m, o, batch)  # noqa: E731
            peak = peak_memory(step, device)
            with count_collectives() as calls:
                step()
            kinds = calls.kinds()
            counts = "/".join(
                str(kinds.get(k, 0)) for k in ("all_gather", "reduce_scatter", "all_reduce")
            )
            cells.append((statistics.median(seconds) * 1e3, peak / 2**20, counts, calls.nbytes()))
        (t0, m0, c0, b0), (t1, m1, c1, b1) = cells
        lines.append(
            f"| {row} | {t0:.1f} | {t1:.1f} | {t1 / t0:.2f} | {m0:.1f} | {m1:.1f} | {c0} | {c1} "
            f"| {b0 / 2**20:.2f} | {b1 / 2**20:.2f} |"
        )
        if rank == 0:
            print(lines[-1], flush=True)
    if rank == 0:
        Path(path).write_text("\n".join(lines))
    dist.destroy_process_group()


def table(lines: str, ranks: int, steps: int, device: str) -> str:
    name = torch.cuda.get_device_name() if device != "cpu" else f"{os.cpu_count()} CPU cores"
    return f"""\
{ranks} ranks × 1 thread on {name}, torch {torch.__version__}, {platform.system()},
{datetime.date.today().isoformat()}; median of {steps - 2} steps, variants in turns; losses of both
columns bit-equal in every step. Model: {CONFIG.blocks} blocks, dim {CONFIG.dim}, vocab
{CONFIG.vocab}, {BATCH}×{LENGTH} tokens a rank, AdamW. Times in ms, memory in MiB above the resting
state, collectives as all-gather/reduce-scatter/all-reduce, MiB sent by one rank (ring algorithm).

| setting | FSDP2 ms | eager ms | ratio | FSDP2 MiB | eager MiB | FSDP2 AG/RS/AR | eager AG/RS/AR \
| FSDP2 sent | eager sent |
|---|---|---|---|---|---|---|---|---|---|
{lines}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--write", type=Path, help="replace the table between the marks of a file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/table"
        mp.spawn(measure, (options.ranks, options.steps, options.device, path), options.ranks)
        text = table(Path(path).read_text(), options.ranks, options.steps, options.device)
    print(text)
    if options.write is not None:
        before, _, rest = options.write.read_text().partition(MARK_BEGIN)
        _, _, after = rest.partition(MARK_END)
        options.write.write_text(f"{before}{MARK_BEGIN}\n{text}{MARK_END}{after}")


if __name__ == "__main__":
    main()
