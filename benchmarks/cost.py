"""How well the cost model agrees with what happens: bytes in the graphs of other meshes, and measured peak memory.

    python benchmarks/cost.py                              # prints both tables
    python benchmarks/cost.py --gloo --write docs/cost.md  # also on processes of gloo, and puts them into the page

Peak memory is what PyTorch's CPU allocator hands out in one training step above what was there before it, as the profiler
sees it. Ranks run on a process group that moves no data, or on gloo. There a step's peak depends on when the threads of
gloo run, so the median of several steps counts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from step import GPT, Workload, peak_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile.cost import DIRECT, GLOO, CostModel, replan

NAMES = ("dp_replicate", "dp_shard")
MESHES = ((2, 4), (1, 7), (4, 1), (3, 8), (16, 64))


class WithLoss(nn.Module):
    """A model that returns its loss, so that all of a step but the optimizer is in its programs."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.net = GPT(w)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy."""
        return F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Run:
    """One measured configuration.

    Attributes:
        mesh: size of every dim.
        transport: ``none`` (one process, which moves no data) or ``gloo`` (one process a rank).
        batch: of one rank.
        policy: fields of the policy that are not the default.
        names: of the mesh dims.
        label: the policy in words.
    """

    mesh: tuple[int, ...]
    transport: str = "none"
    batch: int = 4
    policy: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = NAMES
    label: str = ""


BF16 = hp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KEEP = {"reshard_after_forward": False}
TP = {
    "tp_plan": {
        "net.blocks.*.up": "colwise",
        "net.blocks.*.down": "rowwise",
        "net.head": "colwise_gather_output",
    }
}
WITH_TP = ("dp_shard", "tp")

RUNS = (
    Run((1, 2)),
    Run((2, 2)),
    Run((1, 4)),
    Run((1, 2), batch=16),
    Run((1, 2), policy=KEEP),
    Run((1, 2), policy={"bucket_mb": 0}),
    Run((1, 2), policy={"backend": "inductor"}),
    Run((1, 2), policy={"mp_policy": BF16}, label="bf16"),
    Run((2, 2), policy=TP, names=WITH_TP, label="tp"),
)
GLOO_RUNS = (
    Run((1, 2), "gloo"),
    Run((1, 2), "gloo", batch=1),
    Run((1, 2), "gloo", policy=KEEP),
    Run((1, 2), "gloo", policy={"bucket_mb": 0}),
    Run((1, 2), "gloo", policy={"mp_policy": BF16}, label="bf16"),
    Run((2, 1), "gloo"),
    Run((2, 2), "gloo"),
    Run((2, 2), "gloo", policy=TP, names=WITH_TP, label="tp"),
)


def policy_of(run: Run) -> hp_compile.Policy:
    """The policy of a run."""
    return hp_compile.Policy(**{"backend": "aot_eager", **run.policy})


def step_memory(rank: int, run: Run) -> tuple[int, int]:
    """Measured and estimated bytes of one step on this rank; the process group exists."""
    w = Workload(batch=run.batch)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", run.mesh, mesh_dim_names=run.names)
    model = hp_compile.shard(WithLoss(w), mesh, policy_of(run))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = (
        torch.randint(w.vocab, (w.batch, w.sequence), generator=generator) for _ in range(2)
    )

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    measured = int(statistics.median(peak_bytes(step) for _ in range(5)))
    transport = GLOO if run.transport == "gloo" else DIRECT
    plan = model.plan(tokens, targets)
    return measured, CostModel(plan, transport=transport).at().memory.step


def worker(rank: int, port: int, run: Run, results: Any) -> None:
    """One rank on gloo."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=math.prod(run.mesh))
    results.put(step_memory(rank, run))
    dist.barrier()
    dist.destroy_process_group()


def measure(run: Run) -> tuple[int, int]:
    """Measured and estimated bytes: the largest of the ranks."""
    world = math.prod(run.mesh)
    if run.transport == "none":
        dist.init_process_group("fake", rank=0, world_size=world)
        try:
            return step_memory(0, run)
        finally:
            dist.destroy_process_group()
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=worker, args=(rank, store.port, run, results))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; its traceback is above")
    return max(results.get() for _ in ranks)


def memory_table(runs: Sequence[Run]) -> list[str]:
    """One row a run, as Markdown."""
    lines = [
        "| mesh | dims | transport | batch | policy | measured MB | estimated MB | estimate / measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        measured, estimated = measure(run)
        policy = run.label or ", ".join(f"{k}={v}" for k, v in run.policy.items()) or "default"
        mesh, dims = "×".join(map(str, run.mesh)), ", ".join(run.names)
        lines.append(
            f"| {mesh} | {dims} | {run.transport} | {run.batch} | {policy} | {measured / 1e6:.2f} | "
            f"{estimated / 1e6:.2f} | {estimated / measured:.3f} |"
        )
        print(lines[-1], flush=True)
    return lines


def bytes_table() -> list[str]:
    """Bytes that a rank sends, from the expressions of one plan and in the graphs of every mesh, as Markdown."""
    w = Workload()
    dist.init_process_group("fake", rank=0, world_size=4)
    tokens = torch.zeros(w.batch, w.sequence, dtype=torch.long)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        policy = hp_compile.Policy(backend="aot_eager")
        plan = hp_compile.plan(WithLoss(w), mesh, policy, args=(tokens, tokens))
        plan.collectives  # noqa: B018  the graphs are made while the groups exist
        return list(_bytes_rows(plan))
    finally:
        dist.destroy_process_group()


def _bytes_rows(plan: hp_compile.Plan) -> list[str]:
    model = CostModel(plan)
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    lines = ["| mesh | " + " | ".join(f"{k} B" for k in kinds) + " | in the graphs |"]
    lines.append("|---|---|---|---|---|")
    for shape in MESHES:
        sizes = dict(zip(NAMES, shape, strict=True))
        counted: Counter[str] = Counter()
        for c in replan(plan, sizes).collectives:
            counted[c.kind] += c.nbytes
        sent = model.at(sizes).sent
        equal = all(sent.get(kind, 0) == counted[kind] for kind in kinds)
        cells = " | ".join(f"{sent.get(kind, 0):,}" for kind in kinds)
        lines.append(
            f"| {shape[0]}×{shape[1]} | {cells} | {'equal' if equal else f'DIFFERENT: {dict(counted)}'} |"
        )
        print(lines[-1], flush=True)
    return lines


def replace(path: Path, name: str, lines: Sequence[str]) -> None:
    """Puts lines between the markers of a Markdown page."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = path.read_text().partition(start)
    _, _, after = rest.partition(end)
    path.write_text(before + "\n".join([start, "", *lines, "", end]) + after)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="put the tables into this page")
    parser.add_argument("--runs", type=int, default=len(RUNS), help="measure only the first ones")
    parser.add_argument("--gloo", action="store_true", help="also processes on gloo")
    options = parser.parse_args()
    runs = [*RUNS[: options.runs], *(GLOO_RUNS if options.gloo else ())]
    tables = {"bytes": bytes_table(), "memory": memory_table(runs)}
    if options.write:
        for name, lines in tables.items():
            replace(options.write, name, lines)


if __name__ == "__main__":
    main()
