"""When each value of a step is in memory: a walk over the programs in the order in which they run.

A value is freed after its last use, as programs run here. Views, waits and results in place have no memory of their own.
What the caller holds (shards, buffers, inputs) is not counted; gradients and outputs stay until the step ends. The input of a
collective lives until its wait where the transport reads it in the meantime; copies that the transport works in live as
long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from passes import base
from passes.base import (
    GATHER,
    REDUCE,
    SCATTER,
    WAIT,
    InputGrad,
    ParamGrad,
    ParamInput,
    SavedInput,
    SavedOutput,
    TangentInput,
    UserOutput,
    aten,
)

#: What memory is for, in the order in which it is shown.
CATEGORIES = ("weights", "saved", "activations", "gradients", "transport", "optimizer")

_RENAMES = frozenset({aten._unsafe_view.default, WAIT})
_MAY_COPY = frozenset({aten.reshape.default, aten.contiguous.default})


@dataclass(frozen=True)
class Transport:
    """What a communication library allocates for each collective between its start and its wait.

    Attributes:
        gather: copies of the result of an all-gather.
        scatter: copies of the input of a reduce-scatter.
    """

    gather: int = 0
    scatter: int = 0


#: Works in the buffers of the program; taken for NCCL, which was not measured.
DIRECT = Transport()
#: Gloo in torch 2.13 gathers into a flat buffer that it copies out, and reduces a copy of what is scattered.
GLOO = Transport(gather=1, scatter=1)


@dataclass
class Buffer:
    """One allocation.

    Attributes:
        name: node that makes it.
        category: one of :data:`CATEGORIES`.
        nbytes: its size.
        born: place in the step where it is made.
        dies: last place where it is needed.
    """

    name: str
    category: str
    nbytes: sympy.Expr
    born: int
    dies: int


@dataclass
class Lifetimes:
    """All allocations of a step.

    Attributes:
        buffers: the allocations.
        places: name and phase of every place in the step: a node, or the optimizer at the end.
    """

    buffers: list[Buffer] = field(default_factory=list)
    places: list[tuple[str, str]] = field(default_factory=list)

    def live(self, nbytes: Iterable[float], category: str | None = None) -> list[float]:
        """Bytes in memory at every place.

        Args:
            nbytes: size of every buffer.
            category: count only these.
        """
        change = [0.0] * (len(self.places) + 1)
        for buffer, size in zip(self.buffers, nbytes, strict=True):
            if category is None or buffer.category == category:
                change[buffer.born] += size
                change[buffer.dies + 1] -= size
        total, result = 0.0, []
        for step in change[:-1]:
            total += step
            result.append(total)
        return result


class _Walk:
    """State of the walk: which buffer each value lies in, and when it was last used."""

    def __init__(
        self, nbytes: Callable[[fx.Node, torch.Tensor], sympy.Expr], transport: Transport
    ) -> None:
        self.nbytes = nbytes
        self.transport = transport
        # Copies of the transport, by the start of their collective.
        self.copies: dict[fx.Node, Buffer] = {}
        self.result = Lifetimes()
        self.owner: dict[fx.Node, tuple[Buffer | None, ...]] = {}
        self.weights: set[fx.Node] = set()  # computed from parameters alone

    def new(self, node: fx.Node, value: Any, category: str) -> tuple[Buffer | None, ...]:
        values = value if isinstance(value, tuple | list) else (value,)
        made: list[Buffer | None] = []
        for item in values:
            if not isinstance(item, torch.Tensor):
                made.append(None)
                continue
            here = len(self.result.places) - 1
            buffer = Buffer(node.name, category, self.nbytes(node, item), here, here)
            self.result.buffers.append(buffer)
            made.append(buffer)
        return tuple(made)

    def start(self, node: fx.Node) -> None:
        """Counts what the transport allocates for a collective."""
        count, value = 0, node
        if node.target is GATHER:
            count = self.transport.gather
        elif node.target is SCATTER and isinstance(node.args[0], fx.Node):
            count, value = self.transport.scatter, node.args[0]
        if count:
            here = len(self.result.places) - 1
            nbytes = count * self.nbytes(value, value.meta["val"])
            self.copies[node] = Buffer(node.name, "transport", nbytes, here, here)
            self.result.buffers.append(self.copies[node])

    def wait(self, node: fx.Node, place: int) -> None:
        """Lets go of it."""
        for source in node.all_input_nodes:
            if source in self.copies:
                self.copies[source].dies = place

    def use(self, node: fx.Node, place: int) -> None:
        for buffer in self.owner.get(node, ()):
            if buffer is not None:
                buffer.dies = max(buffer.dies, place)


def lifetimes(
    graphs: Mapping[str, fx.GraphModule],
    nbytes: Callable[[fx.Node, torch.Tensor], sympy.Expr],
    *,
    optimizer_bytes: sympy.Expr | int = 0,
    transport: Transport = DIRECT,
) -> Lifetimes:
    """Walks over a step.

    Args:
        graphs: ``forward`` and, when it trains, ``backward``.
        nbytes: size of one tensor of a node's value.
        optimizer_bytes: what the optimizer allocates for the time of its step.
        transport: what carries the collectives.
    """
    walk = _Walk(nbytes, transport)
    places = walk.result.places
    saved: dict[int, tuple[Buffer | None, ...]] = {}
    saved_weights: set[int] = set()
    outputs: list[Buffer] = []
    kept: list[Buffer] = []
    for phase, gm in graphs.items():
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            places.append((node.name, phase))
            here = len(places) - 1
            if node.op == "placeholder":
                walk.owner[node] = _input(walk, node, saved)
                role = node.meta.get("role")
                if isinstance(role, ParamInput) or getattr(role, "index", -1) in saved_weights:
                    walk.weights.add(node)
            elif node.op == "call_function":
                walk.owner[node] = _owners(walk, node)
                walk.start(node)
                if node.target is WAIT:
                    walk.wait(node, here)
            for source in _read_by(node, transport):
                # A tuple is let go when its parts are taken; each part then lives for itself.
                walk.use(source, here)
        everything: Iterator[Any] = base.outputs(gm)
        for _, value, role in everything:
            found = [b for b in walk.owner.get(value, ()) if b is not None] if value else []
            if isinstance(role, SavedOutput):
                saved[role.index] = walk.owner.get(value, ())
                if value in walk.weights:
                    saved_weights.add(role.index)
                _rename(found, "saved")
            elif isinstance(role, ParamGrad | InputGrad):
                kept += found
                _rename(found, "gradients")
            elif isinstance(role, UserOutput):
                outputs += found
        end = len(places) - 1
        for buffer in (b for owners in saved.values() for b in owners if b is not None):
            buffer.dies = max(buffer.dies, end) if phase == "forward" else buffer.dies
    end = len(places) - 1
    for buffer in outputs:
        buffer.dies = end
    places.append(("optimizer", "optimizer"))
    if optimizer_bytes != 0:
        walk.result.buffers.append(
            Buffer("optimizer", "optimizer", sympy.sympify(optimizer_bytes), end + 1, end + 1)
        )
    for buffer in kept:
        buffer.dies = end + 1
    return walk.result


def _rename(buffers: Iterable[Buffer], category: str) -> None:
    for buffer in buffers:
        if buffer.category == "activations" or category == "gradients":
            buffer.category = category


def _input(
    walk: _Walk, node: fx.Node, saved: Mapping[int, tuple[Buffer | None, ...]]
) -> tuple[Buffer | None, ...]:
    role = node.meta.get("role")
    if isinstance(role, SavedInput):
        return saved.get(role.index, ())
    if isinstance(role, TangentInput):
        return walk.new(node, node.meta["val"], "activations")
    return ()


def _owners(walk: _Walk, node: fx.Node) -> tuple[Buffer | None, ...]:
    """The buffers of a node's result: those of what it renames, or new ones."""
    if node.target is operator.getitem:
        source, index = node.args[0], node.args[1]
        owners = walk.owner.get(source, ())  # type: ignore[arg-type]
        if source in walk.weights:
            walk.weights.add(node)
        if len(owners) != len(source.meta["val"]):  # type: ignore[union-attr]
            return owners  # pieces of one value
        return (owners[index],)  # type: ignore[index]
    sources = node.all_input_nodes
    if sources and all(n in walk.weights for n in sources):
        walk.weights.add(node)
    renamed = renames(node)
    if renamed is not None:
        return tuple(b for n in renamed for b in walk.owner.get(n, ()))
    return walk.new(node, node.meta.get("val"), _category(walk, node))


def _read_by(node: fx.Node, transport: Transport) -> list[fx.Node]:
    """What a node keeps in memory: its inputs, and at a wait what the collective reads until then.

    An all-reduce works in its result, into which torch copies the input first; a transport that reduces a copy of what is
    scattered does not need the original either.
    """
    sources = list(node.all_input_nodes)
    if node.target is WAIT:
        start = node.args[0]
        copied = {REDUCE, SCATTER} if transport.scatter else {REDUCE}
        if isinstance(start, fx.Node) and start.target not in copied:
            sources += start.all_input_nodes
    if node.target is operator.getitem:
        return []  # its own uses count, not the unpacking
    return sources


def renames(node: fx.Node) -> list[fx.Node] | None:
    """The inputs whose memory a node returns; ``None`` if it makes memory of its own."""
    if node.target in _RENAMES:
        return list(node.all_input_nodes[:1])
    if node.target in _MAY_COPY and not _viewable(node):
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    found: list[fx.Node] = []
    for value, argument in zip(node.args, schema.arguments, strict=False):
        if argument.alias_info is not None:
            fx.node.map_arg(value, found.append)
    return found


def _viewable(node: fx.Node) -> bool:
    """Whether a reshape can return a view."""
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    if source.is_contiguous():
        return True
    if node.target is aten.contiguous.default:
        return False
    sizes = [base.hint(s) for s in source.shape]
    strides = [base.hint(s) for s in source.stride()]
    try:
        torch.empty_strided(sizes, strides, device="meta").view(
            [base.hint(s) for s in node.meta["val"].shape]
        )
    except RuntimeError:
        return False
    return True


def _category(walk: _Walk, node: fx.Node) -> str:
    """What a value is for, as far as its own inputs say: gathered weights, reduced gradients or activations."""
    sources = node.all_input_nodes
    if sources and all(n in walk.weights for n in sources):
        return "weights"
    comm = node.meta.get("comm")
    reduces = comm is not None and comm.purpose in ("reduce_grad", "replicate_grad")
    return "gradients" if reduces or node.meta.get("packs") else "activations"


__all__ = [
    "CATEGORIES",
    "DIRECT",
    "GLOO",
    "Buffer",
    "Lifetimes",
    "Transport",
    "lifetimes",
    "renames",
]
