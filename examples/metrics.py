"""What a run shows and leaves behind: progress, metrics as JSON lines, the loss curve."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this rank: the allocator's on an accelerator, the resident set on a CPU."""
    if device.type != "cpu":
        return torch.get_device_module(device.type).max_memory_allocated() / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class Log:
    """`metrics.jsonl`: one object a step. A resumed run drops what came after its checkpoint.

    Args:
        path: The file.
        start: First step of this run; earlier lines are kept.
    """

    def __init__(self, path: Path, start: int) -> None:
        kept = [row for row in read(path) if row["step"] <= start]
        self._file = path.open("w", encoding="utf-8")
        for row in kept:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        """Appends one line, at once."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; none if it does not exist, and without a line that was cut off."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


class Meter:
    """A progress bar on a terminal, one line every few steps elsewhere.

    Args:
        console: Where to.
        total: Steps in all.
        done: Steps that an earlier run has done.
        first: What the first step does besides a step.
    """

    def __init__(self, console: Console, total: int, done: int, first: str) -> None:
        self._console, self._total = console, total
        self._every = max(1, total // 10)
        self._shown = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(compact=True),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task(first, total=total, completed=done, facts="")
        else:
            console.print(first + " ...")

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, row: dict[str, Any], name: str = "training") -> None:
        """Shows one step."""
        facts = f"loss {row['loss']:.3f}"
        if "tokens_per_s" in row:
            facts += f"  {_short(row['tokens_per_s'])} tok/s  {_short(row['peak_memory_mb'])} MB"
        if self._bar is not None:
            self._bar.update(self._task, description=name, completed=row["step"], facts=facts)
            return
        late = time.monotonic() - self._shown > 30
        if row["step"] == 1 or row["step"] % self._every == 0 or row["step"] == self._total or late:
            self._shown = time.monotonic()
            self._console.print(
                f"{name} step {row['step']:>4}/{self._total}  {facts}", highlight=False
            )


def _short(value: float) -> str:
    return f"{value:,.0f}"


def plot(
    path: Path, rows: Sequence[dict[str, Any]], reference: Sequence[float], title: str
) -> None:
    """Draws the loss curve and, where there is a reference, the difference to it.

    Args:
        path: PNG file.
        rows: Rows of the metrics file.
        reference: Loss of the unsharded run at each step from the first on; may be empty.
        title: One line about the run.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    heights = {"height_ratios": [3, 1]} if reference else None
    figure, axes = plt.subplots(
        2 if reference else 1,
        1,
        figsize=(8, 5.4 if reference else 4),
        dpi=150,
        sharex=True,
        squeeze=False,
        gridspec_kw=heights,
        layout="constrained",
    )
    top = axes[0, 0]
    steps = [row["step"] for row in rows]
    losses = [row["loss"] for row in rows]
    marks = "o" if len(rows) <= 40 else None
    top.plot(
        steps,
        losses,
        color="#3b6fb6",
        linewidth=2.2,
        marker=marks,
        markersize=4,
        label="sharded by hp_compile",
    )
    if reference:
        xs = range(1, len(reference) + 1)
        top.plot(
            xs,
            reference,
            color="#e08a1e",
            linewidth=1.4,
            linestyle=(0, (4, 3)),
            label="plain PyTorch, one process",
        )
        gaps = [(s, abs(loss - reference[s - 1])) for s, loss in zip(steps, losses, strict=True)]
        low = axes[1, 0]
        low.bar([s for s, _ in gaps], [g for _, g in gaps], color="#8a8f98", width=0.8)
        low.set_ylabel("|difference|")
        low.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    top.set_ylabel("loss (nats per byte)")
    top.set_title(title, fontsize=11, loc="left")
    top.legend(frameon=False)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path)
    plt.close(figure)
