"""A step on a machine that is not there: list scheduling of the programs on a compute stream and communication streams.

Operators run in program order on the compute stream. A collective is issued there, and runs on a communication stream when
its input is ready and the stream is free; the wait blocks the compute stream until it is done. An operator takes the longer
of its arithmetic and its memory traffic, and at least a launch. A collective takes the latency of its link and its ring
bytes at the bandwidth of the slowest link that its group crosses.

Every operator is taken to read and write memory: code that a compiler fuses moves less, so elementwise time is an upper
bound. The loss, where it is outside the model, is not in the programs and not in the estimate.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from hp_compile.cost.flops import formula, node_flops
from hp_compile.cost.hardware import Profile
from hp_compile.cost.liveness import renames
from hp_compile.cost.spread import Spread
from hp_compile.cost.symbols import InputSymbols
from hp_compile.cost.traffic import SymbolicCollective
from hp_compile.plan import inner_ranks
from hyper_parallel.mesh import MeshLayout
from passes import base
from passes.base import WAIT, Comm

COMPUTE = "compute"


@dataclass(frozen=True)
class Op:
    """One thing that a step does, for any size of the mesh.

    Attributes:
        name: name of the node.
        phase: ``forward``, ``backward`` or ``optimizer``.
        target: operator.
        module: FQN of the module that it comes from.
        flops: floating-point operations.
        nbytes: bytes that it reads and writes.
        dtype: dtype that its arithmetic runs in.
        comm: metadata, when it starts a collective.
        sent: bytes that a rank sends in it.
        waits: index of the collective that it waits for, -1 for none.
    """

    name: str
    phase: str
    target: str
    module: str
    flops: sympy.Expr
    nbytes: sympy.Expr
    dtype: torch.dtype
    comm: Comm | None = None
    sent: sympy.Expr = sympy.S.Zero
    waits: int = -1


@dataclass(frozen=True)
class Span:
    """One thing on the timeline, times in seconds from the start of the step."""

    name: str
    stream: str
    start: float
    seconds: float
    op: Op


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        spans: what runs, in order of issue.
        seconds: estimated time of the step.
        exposed: seconds in which the compute stream waits for a collective.
        busy: seconds in which each stream works.
        profile: the machine.
    """

    spans: tuple[Span, ...]
    seconds: float
    exposed: float
    busy: Mapping[str, float]
    profile: Profile


def operations(
    graphs: Mapping[str, fx.GraphModule],
    spread: Spread,
    symbols: InputSymbols,
    collectives: Sequence[SymbolicCollective],
    optimizer_bytes: sympy.Expr,
) -> tuple[Op, ...]:
    """What a step does, in order; views and other work that takes no time are left out.

    Args:
        graphs: programs by phase.
        spread: sizes of their values.
        symbols: their dynamic dims.
        collectives: their collectives, in the same order.
        optimizer_bytes: bytes that the optimizer reads and writes; 0 for no optimizer.
    """
    found: list[Op] = []
    starts: dict[fx.Node, int] = {}
    remaining = iter(collectives)
    for phase, gm in graphs.items():
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is WAIT:
                source = node.args[0]
                common = _common(node, phase)
                found.append(Op(**common, waits=starts[source]))
            elif base.is_collective(node):
                starts[node] = len(found)
                comm = node.meta["comm"]
                found.append(Op(**_common(node, phase), comm=comm, sent=next(remaining).nbytes))
            elif node.target is not operator.getitem and renames(node) is None and _tensors(node):
                traffic = [(n, v) for n in (node, *node.all_input_nodes) for v in _tensors(n)]
                common = {
                    **_common(node, phase),
                    "flops": node_flops(node, symbols),
                    "nbytes": sympy.Add(*(spread.nbytes(n, v) for n, v in traffic)),
                }
                found.append(Op(**common))
    if optimizer_bytes != 0:
        zero = sympy.Integer(0)
        found.append(
            Op("optimizer", "optimizer", "AdamW", "", zero, optimizer_bytes, torch.float32)
        )
    return tuple(found)


def _common(node: fx.Node, phase: str) -> dict[str, Any]:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.float32
    if formula(node) is not None:  # operands decide, not an accumulator in a wider dtype
        dtype = next((v.dtype for n in node.all_input_nodes for v in _tensors(n)), dtype)
    zero = sympy.Integer(0)
    return {
        "name": node.name,
        "phase": phase,
        "target": str(node.target).removesuffix(".default"),
        "module": base.module_path(node),
        "flops": zero,
        "nbytes": zero,
        "dtype": dtype,
    }


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def simulate(
    ops: Sequence[Op],
    numbers: Sequence[tuple[float, float, float]],
    *,
    profile: Profile,
    layout: MeshLayout,
    streams: int = 1,
) -> Timeline:
    """Runs a step on paper.

    Args:
        ops: the operations, in program order.
        numbers: FLOPs, bytes and sent bytes of each.
        profile: the machine.
        layout: the mesh; which ranks a group has decides which links it crosses.
        streams: 1 runs all collectives one after another; 2 gives gathers a stream of their own.

    Returns:
        The timeline of the layout's rank.
    """
    clock, exposed = 0.0, 0.0
    free: dict[str, float] = {}
    busy: dict[str, float] = {COMPUTE: 0.0}
    done: dict[int, float] = {}
    spans: list[Span] = []
    links: dict[Any, Any] = {}
    for index, (op, (flops, nbytes, sent)) in enumerate(zip(ops, numbers, strict=True)):
        if op.waits >= 0:
            end = done[op.waits]
            if end > clock:
                exposed += end - clock
                clock = end
        elif op.comm is not None:
            key = (op.comm.axes, op.comm.inner)
            if key not in links:
                ranks = inner_ranks(layout, op.comm)
                links[key] = None if len(ranks) == 1 else profile.link(ranks)
            link = links[key]
            seconds = 0.0 if link is None else link.latency + sent / link.bandwidth
            stream = _stream(op.comm, streams)
            start = max(clock, free.get(stream, 0.0))
            free[stream] = done[index] = start + seconds
            busy[stream] = busy.get(stream, 0.0) + seconds
            if seconds:
                spans.append(Span(op.name, stream, start, seconds, op))
        else:
            arithmetic = flops / profile.flop_rate(op.dtype)
            seconds = max(arithmetic, nbytes / profile.memory_bandwidth, profile.launch)
            spans.append(Span(op.name, COMPUTE, clock, seconds, op))
            busy[COMPUTE] += seconds
            clock += seconds
    return Timeline(tuple(spans), max([clock, *free.values()]), exposed, busy, profile)


def _stream(comm: Comm, streams: int) -> str:
    if streams == 1:
        return "communication"
    return "gathers" if comm.kind == "all_gather" else "reductions"


__all__ = ["COMPUTE", "Op", "Span", "Timeline", "operations", "simulate"]
