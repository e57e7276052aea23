"""The unsharded run: plain PyTorch on one process, on the batches that all ranks saw together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from data import Batches, standard_library
from models import build_model, call_arguments, next_byte_loss
from options import Options
from rich.console import Console
from rich.table import Table
from torch import nn

# Largest relative difference of a loss that still counts as equal: rounding, not a wrong gradient.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


def unsharded_losses(
    options: Options,
    ranks: int,
    device: torch.device,
    on_step: Callable[[int, float], None],
) -> list[float]:
    """Trains the plain model from the first step on and returns its losses.

    Args:
        options: The run.
        ranks: Ranks of the sharded run that saw different data.
        device: Where.
        on_step: Called with the number of finished steps and the loss.
    """
    if device.type == "cpu":
        torch.set_num_threads(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        )
    model = build_model(
        options.model,
        dim=options.dim,
        layers=options.layers,
        seq_len=options.seq_len,
        seed=options.seed,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    batches = Batches(standard_library(), options.seq_len, options.seed)
    losses = []
    for step in range(options.steps):
        set_learning_rate(optimizer, options.lr, step)
        total = 0.0
        for _ in range(options.grad_accum):
            tokens, targets = batches.take(options.batch_size * ranks, 0, 1, device)
            output = _call(model, call_arguments(options.model, tokens), options.precision)
            loss = next_byte_loss(output, targets) / options.grad_accum
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        on_step(step + 1, total)
    return losses


def _call(model: nn.Module, kwargs: dict[str, Any], precision: str) -> Any:
    """Forward, with parameters cast to bfloat16 on the way in, as mixed precision defines it."""
    if precision == "fp32":
        return model(**kwargs)
    cast = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, cast, kwargs=kwargs)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, step: int) -> None:
    """Ten steps of linear warm-up, then constant: a function of the step only."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (step + 1) / 10)


def report(
    console: Console, rows: Sequence[dict[str, Any]], reference: Sequence[float], precision: str
) -> bool:
    """Prints both losses side by side; returns whether all differences are within tolerance.

    Args:
        console: Where to.
        rows: Metrics of the sharded run.
        reference: Loss of the unsharded run at each step from the first on.
        precision: Key of `TOLERANCE`.
    """
    limit = TOLERANCE[precision]
    table = Table(title="sharded against unsharded", title_justify="left", title_style="bold")
    for name in ("step", "sharded", "unsharded", "difference", "relative"):
        table.add_column(name, justify="right")
    differences = [
        (row["step"], row["loss"], reference[row["step"] - 1])
        for row in rows
        if row["step"] <= len(reference)
    ]
    worst = max(differences, key=lambda d: _relative(d[1], d[2]))
    stride = max(1, len(differences) // 10)
    for index, (step, ours, theirs) in enumerate(differences):
        last = index == len(differences) - 1
        if index % stride == 0 or last or step == worst[0]:
            relative = _relative(ours, theirs)
            table.add_row(
                str(step),
                f"{ours:.6f}",
                f"{theirs:.6f}",
                f"{ours - theirs:+.1e}",
                f"{relative:.1e}",
                style="red" if not relative <= limit else None,
            )
    console.print(table)
    largest = _relative(worst[1], worst[2])
    good = all(_relative(ours, theirs) <= limit for _, ours, theirs in differences)
    verdict = "[green]equal[/]" if good else "[bold red]DIFFERENT[/]"
    console.print(
        f"{verdict}: largest relative difference {largest:.1e} at step {worst[0]} of "
        f"{len(differences)} compared; tolerance {limit:.0e} ({precision})"
    )
    return good


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-12)
