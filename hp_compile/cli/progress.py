"""Progress of long work, on standard error, only where somebody watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hp_compile import pipeline
from hp_compile.cli.console import stderr

Report = Callable[[str], None]


@contextmanager
def progress(quiet: bool) -> Iterator[Report]:
    """Shows what is being done, with every pass of the pipeline; nothing when quiet or not on a terminal.

    Args:
        quiet: show nothing.

    Yields:
        A function that says what comes next.
    """
    console = stderr()
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[detail]}", style="dim"),
        TimeElapsedColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, detail="")

        def say(what: str) -> None:
            bar.update(task, description=what, detail="")

        def saw(report: pipeline.StepReport) -> None:
            detail = f"{report.name} done, {report.nodes:,} nodes"
            bar.update(task, description="running the passes", detail=detail)

        with pipeline.observe(saw):
            yield say
    console.print(f"done in {time.perf_counter() - start:.1f} s", style="dim")


__all__ = ["Report", "progress"]
