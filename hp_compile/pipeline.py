"""The pipeline as data: lists of steps, and one loop that checks contracts, times and dumps.

captured --annotate, cleanup--> joint --unshard--> joint --partition--> forward, backward
forward  --bucket, overlap--> lowered
backward --reduce_grads, bucket, overlap--> lowered

Every program is proved (``passes.verify``) before it is lowered. The environment variable ``HP_COMPILE_VERIFY`` changes
that: ``0`` proves nothing, ``1`` (the default) what is lowered, ``each`` also the result of every single pass.

With ``TORCH_TRACE=folder`` the program after every pass is an artifact of torch's structured trace; the index of
``tlparse`` lists it as ``hp_compile_<stage>_<pass>``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

import passes
from hp_compile.dump import graph_text
from hyper_parallel.errors import PolicyError, VerificationError
from hyper_parallel.policy import Policy
from hyper_parallel.torch_compat import graph as compat
from hyper_parallel.torch_compat.tracing import trace_artifact
from passes.base import info
from passes.verify import verify_programs, verify_stage

log = logging.getLogger("hp_compile")


@dataclass(frozen=True)
class Step:
    """One pass and its keyword options."""

    run: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the pass."""
        return self.run.__name__


@dataclass(frozen=True)
class StepReport:
    """What one step did; a step that returns two programs gives two reports with half the time each."""

    name: str
    seconds: float
    nodes: int
    program: fx.GraphModule


@dataclass
class PassRow:
    """What one pass cost, over all its runs.

    Attributes:
        name: the pass.
        stage: stage of the program that it leaves.
        runs: how often it ran.
        seconds: seconds in all runs.
        nodes: nodes of the program after the latest run.
    """

    name: str
    stage: str
    runs: int = 0
    seconds: float = 0.0
    nodes: int = 0


Observer = Callable[[StepReport], None]
_observers: list[Observer] = []


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Calls ``observer`` after every pass that runs inside the block: for timing, dumps and tests."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class PassTable:
    """An observer that adds up what every pass cost.

    Example:
        >>> table = PassTable()
        >>> with observe(table):
        ...     pass  # hp_compile.plan(...).graphs, or the first call of a sharded model
        >>> table.rows()
        []
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], PassRow] = {}

    def __call__(self, report: StepReport) -> None:
        """Adds one report."""
        stage = _stage(report.program)
        row = self._rows.setdefault((report.name, stage), PassRow(report.name, stage))
        row.runs += 1
        row.seconds += report.seconds
        row.nodes = report.nodes

    def rows(self) -> list[PassRow]:
        """One row for each pass and stage of the program after it, in the order they first ran."""
        return list(self._rows.values())

    def __str__(self) -> str:
        rows = [("pass", "leaves", "runs", "seconds", "nodes")]
        rows += [
            (r.name, r.stage, str(r.runs), f"{r.seconds:.3f}", f"{r.nodes:,}") for r in self.rows()
        ]
        total = sum(r.seconds for r in self.rows())
        rows.append(("total", "", "", f"{total:.3f}", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join(
            "  ".join(
                c.ljust(w) if i < 2 else c.rjust(w)
                for i, (c, w) in enumerate(zip(r, widths, strict=True))
            )
            for r in rows
        )


def run(gm: fx.GraphModule, steps: Sequence[Step]) -> fx.GraphModule:
    """Runs steps in order.

    Raises:
        VerificationError: a step's contract does not hold for the program it is given.
    """
    for step in steps:
        gm = _timed(step, gm)
    return gm


def split(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partitions a joint program into forward and backward."""
    forward, backward = _timed(Step(passes.partition), gm)
    return forward, backward


def _timed(step: Step, gm: fx.GraphModule) -> Any:
    _check_contract(step, gm)
    start = time.perf_counter()
    with compat.fast_tracing():  # passes compute sizes of what they add
        result = step.run(gm, **step.options)
    seconds = time.perf_counter() - start
    programs = result if isinstance(result, tuple) else (result,)
    for program in programs:
        report = StepReport(step.name, seconds / len(programs), len(program.graph.nodes), program)
        for observer in list(_observers):
            observer(report)
        trace_artifact(f"hp_compile_{_stage(program)}_{step.name}", partial(graph_text, program))
        if verification() == "each":
            verify_stage(program)
    return result


def _stage(program: fx.GraphModule) -> str:
    return info(program).stage if "program" in program.meta else ""


def verification() -> str:
    """How much is proved: ``"0"``, ``"1"`` or ``"each"`` (see the module's docstring)."""
    level = os.environ.get("HP_COMPILE_VERIFY", "1")
    if level not in ("0", "1", "each"):
        raise PolicyError(f"HP_COMPILE_VERIFY: expected 0, 1 or each, got {level!r}")
    return level


def prove(graphs: Mapping[str, fx.GraphModule]) -> None:
    """Proves programs that are about to be lowered, unless verification is off.

    Raises:
        VerificationError: a gradient is not reduced exactly once over every axis, or another rule is broken.
    """
    if verification() == "0":
        return
    start = time.perf_counter()
    verify_programs(graphs)
    log.info("proved %s in %.3f s", " and ".join(graphs), time.perf_counter() - start)


def _check_contract(step: Step, gm: fx.GraphModule) -> None:
    contract = passes.CONTRACTS.get(step.name)
    if contract is None or "program" not in gm.meta:
        return
    program = info(gm)
    missing = [name for name in contract.after if name not in program.done]
    late = [name for name in contract.before if name in program.done]
    if missing or late or (contract.stages and program.stage not in contract.stages):
        raise VerificationError(
            f"pass {step.name!r} cannot run here: it needs {list(contract.after)} before it and "
            f"{list(contract.before)} not yet, on a program in stage {list(contract.stages)}; the program is in stage "
            f"{program.stage!r} after {list(program.done)}"
        )


def capture_steps(**options: Any) -> list[Step]:
    """What every captured graph goes through once."""
    return [Step(passes.annotate, options), Step(passes.cleanup)]


def shard_steps(policy: Policy, reshard: Mapping[str, bool | int], gather: bool) -> list[Step]:
    """From the single-device program to the one on shards."""
    return [Step(passes.unshard, {"reshard": reshard, "gather": gather})]


def reduce_steps(policy: Policy, reduction: Any) -> list[Step]:
    """Gradient reductions of one backward variant."""
    return [
        Step(
            passes.reduce_grads,
            {
                "reduce_dtype": policy.mp_policy.reduce_dtype,
                "reduce_op": reduction.reduce_op,
                "divide_factor": reduction.divide_factor,
                "variant": reduction.variant,
            },
        )
    ]


def schedule_steps(policy: Policy) -> list[Step]:
    """Few, large, early collectives."""
    return [Step(passes.bucket, {"bucket_mb": policy.bucket_mb}), Step(passes.overlap)]
