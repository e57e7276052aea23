"""One rank of a run, from the mesh to the last checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import Any

import checkpoint
import compare
import metrics
import torch
import torch.distributed as dist
from data import Batches, data_rank, standard_library
from models import build_model, call_arguments, next_byte_loss
from options import Options, tp_plan
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hp_compile


class Run:
    """Everything a rank holds.

    Args:
        options: The run.
        mesh: Names and sizes of the mesh dims; all of them but tp carry data.
    """

    def __init__(self, options: Options, mesh: tuple[tuple[str, int], ...]) -> None:
        self.options = options
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = _device(options.device)
        self.console = Console(quiet=self.rank != 0)
        self.console.soft_wrap = not self.console.is_terminal  # long lines stay whole in a log
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, device_id=self.device if backend == "nccl" else None)
        self.mesh = init_device_mesh(
            self.device.type,
            tuple(size for _, size in mesh),
            mesh_dim_names=tuple(name for name, _ in mesh),
        )
        self.data_rank, self.data_ranks = data_rank(self.mesh)
        self.policy = _policy(options)
        model = build_model(
            options.model,
            dim=options.dim,
            layers=options.layers,
            seq_len=options.seq_len,
            seed=options.seed,
        )
        self.model = hp_compile.shard(model, self.mesh, self.policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.batches = Batches(standard_library(), options.seq_len, options.seed)

    def main(self) -> int:
        """Plans, trains, compares. Returns the exit code."""
        options = self.options
        if self.rank == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            if not options.plan_only:
                self._start_output()
        self._headline()
        self._plan()
        if options.plan_only:
            dist.destroy_process_group()
            return 0
        start = self._resume() if options.resume else 0
        self._train(start)
        dist.barrier()
        dist.destroy_process_group()
        return self._finish() if self.rank == 0 else 0

    # ------------------------------------------------------------------ before the first step

    def _start_output(self) -> None:
        options = self.options
        if options.overwrite:
            shutil.rmtree(options.output / "checkpoints", ignore_errors=True)
        text = json.dumps(options.as_json(), indent=1)
        (options.output / "options.json").write_text(text + "\n", encoding="utf-8")

    def _headline(self) -> None:
        options = self.options
        count = sum(p.numel() for p in self.model.parameters())
        dims = " x ".join(
            f"{n}={s}" for n, s in zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)
        )
        self.console.print(
            f"[bold]{options.model}[/], {count:,} parameters, {options.precision}, {options.backend}; "
            f"{self.ranks} ranks on {self.device.type}, {dims}; "
            f"{len(self.batches.windows):,} windows of {options.seq_len} bytes",
            highlight=False,
        )

    def _plan(self) -> None:
        """Shows the plan of a step and proves it, before any weight is gathered."""
        began = time.perf_counter()
        tokens = torch.zeros(
            self.options.batch_size, self.options.seq_len, dtype=torch.int64, device=self.device
        )
        plan = self.model.plan(**call_arguments(self.options.model, tokens))
        text = plan.dump()
        planned = time.perf_counter()
        plan.verify()
        proved = time.perf_counter()
        if self.rank != 0:
            return
        path = self.options.output / "plan.txt"
        path.write_text(text, encoding="utf-8")
        self.console.rule("plan", style="dim")
        if self.console.is_terminal:
            self.console.print(
                text,
                markup=False,
                highlight=False,
                no_wrap=True,
                overflow="ellipsis",
                soft_wrap=False,
            )
        else:
            self.console.print(text, markup=False, highlight=False)
        self.console.rule(style="dim")
        self.console.print(
            f"captured and planned in {planned - began:.1f} s; [green]proved[/] in "
            f"{proved - planned:.2f} s: every gradient is reduced exactly once over every mesh dim "
            f"({len(plan.collectives)} collectives a step, full text in {path})",
            highlight=False,
        )

    def _resume(self) -> int:
        path = checkpoint.complete(self.options.output)[-1]
        progress = checkpoint.load(path, self.model, self.optimizer)
        self.batches.position = progress["position"]
        self.console.print(f"resumed from {path}: step {progress['step']}", highlight=False)
        return int(progress["step"])

    # ------------------------------------------------------------------ the loop

    def _train(self, start: int) -> None:
        options = self.options
        log = metrics.Log(options.output / "metrics.jsonl", start) if self.rank == 0 else None
        first = "compiling and first step" if options.backend == "inductor" else "first step"
        saved = start
        with metrics.Meter(self.console, options.steps, start, first) as meter:
            for step in range(start, options.steps):
                row = self._step(step)
                if log is not None:
                    log.write(row)
                meter.step(row)
                every = options.checkpoint_every
                if every and (step + 1) % every == 0:
                    self._save(saved := step + 1)
        if saved < options.steps:
            self._save(options.steps)
        if log is not None:
            log.close()

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns its row of metrics."""
        options, began = self.options, time.perf_counter()
        compare.set_learning_rate(self.optimizer, options.lr, step)
        total = torch.zeros((), device=self.device)
        for micro in range(options.grad_accum):
            last = micro == options.grad_accum - 1
            if options.zero == 1:  # accumulate whole gradients, reduce once
                self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            tokens, targets = self.batches.take(
                options.batch_size, self.data_rank, self.data_ranks, self.device
            )
            output = self.model(**call_arguments(options.model, tokens))
            loss = next_byte_loss(output, targets) / options.grad_accum
            loss.backward()
            total += loss.detach()
        norm = hp_compile.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss_value = _over_ranks(total, dist.ReduceOp.SUM) / self.ranks
        memory = torch.tensor(metrics.peak_memory_mb(self.device), device=self.device)
        seconds = time.perf_counter() - began
        sequences = options.batch_size * options.grad_accum * self.data_ranks
        tokens_a_step = sequences * options.seq_len
        return {
            "step": step + 1,
            "loss": loss_value,
            "grad_norm": norm.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "seconds": seconds,
            "tokens_per_s": tokens_a_step / seconds,
            "peak_memory_mb": _over_ranks(memory, dist.ReduceOp.MAX),
        }

    def _save(self, step: int) -> None:
        options = self.options
        progress = {"step": step, "position": self.batches.position}
        path = checkpoint.save(options.output, self.model, self.optimizer, progress)
        if not options.checkpoint_every or step == options.steps:
            self.console.print(f"saved {path}", highlight=False)

    # ------------------------------------------------------------------ after the last step

    def _finish(self) -> int:
        """On the first rank alone: the unsharded run, the table, the picture."""
        options = self.options
        rows = metrics.read(options.output / "metrics.jsonl")
        reference: list[float] = []
        good = True
        if options.compare:
            with metrics.Meter(self.console, options.steps, 0, "unsharded") as meter:
                reference = compare.unsharded_losses(
                    options,
                    self.data_ranks,
                    self.device,
                    lambda step, loss: meter.step({"step": step, "loss": loss}, "unsharded"),
                )
            good = compare.report(self.console, rows, reference, options.precision)
        picture = options.output / "loss.png"
        metrics.plot(picture, rows, reference, _title(options, self.ranks))
        steady = sorted(row["tokens_per_s"] for row in rows[1:]) or [rows[0]["tokens_per_s"]]
        self.console.print(
            f"loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f} in {rows[-1]['step']} steps, "
            f"{steady[len(steady) // 2]:,.0f} tokens/s (median); wrote plan.txt, metrics.jsonl, "
            f"loss.png and checkpoints to {options.output}",
            highlight=False,
        )
        return 0 if good else 1


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _policy(options: Options) -> hp_compile.Policy:
    fields: dict[str, Any] = {"backend": options.backend, "tp_plan": tp_plan(options.tp_plan)}
    if options.precision == "bf16":
        fields["mp_policy"] = hp_compile.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if options.zero is None:
        return hp_compile.Policy(**fields)
    return hp_compile.Policy.zero(options.zero, **fields)


def _over_ranks(value: Tensor, op: Any) -> float:
    dist.all_reduce(value, op=op)
    return value.item()


def _title(options: Options, ranks: int) -> str:
    return f"{options.model} on Python's standard library, {ranks} ranks, {options.precision}"
