"""Equal units: which blocks of an exported forward do the same with the same neighbours.

The exported forward is the whole truth about what every block does. Two units are equal when their operators, constants,
values and inner wiring are, and every operand from outside is the parameter of the same name in the unit, the very same
node for all, or the value at the same place of the unit before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from hyper_parallel.torch_compat import graph as compat

log = logging.getLogger("hp_compile")

#: Equal units that a run needs: the first two and the last are traced, and at least one is not.
SHORTEST = 4


class Unequal(Exception):
    """Why what is known of one unit does not hold for the others."""


@dataclass
class Segment:
    """The operators from the first one in a unit to the first one in the next unit.

    Attributes:
        unit: FQN.
        nodes: in order.
        regions: checkpoint regions that begin here, in order.
    """

    unit: str
    nodes: list[fx.Node] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)


@dataclass
class Run:
    """Equal units in a row; the first two and the last are traced.

    Attributes:
        segments: of the equal units.
        before: the unit before them.
        after: the unit behind them.
    """

    segments: list[Segment]
    before: Segment
    after: Segment

    @property
    def units(self) -> list[str]:
        """FQNs of the equal units."""
        return [segment.unit for segment in self.segments]

    @property
    def dropped(self) -> list[Segment]:
        """Segments that are not traced."""
        return self.segments[2:-1]

    def region(self, number: int, begins: int, index: int) -> int:
        """A checkpoint region that unit ``number`` of the run sees: the ``index``-th of ``begins`` units earlier."""
        place = number - begins
        return (self.segments[place] if place >= 0 else self.before).regions[index]

    def owner(self, name: str) -> int | None:
        """Number of the unit that the attribute ``name`` belongs to."""
        return next((i for i, unit in enumerate(self.units) if name.startswith(unit + ".")), None)


def find_runs(forward: fx.GraphModule, units: Sequence[str]) -> list[Run]:
    """Runs of equal units that may be reused."""
    segments = _segments(forward.graph, {_head(unit) for unit in units})
    keys = [_key(segments, i) for i in range(len(segments) - 1)]  # the last has no end
    runs = []
    start = 1
    while start < len(keys):
        stop = start + 1
        while stop < len(keys) and keys[stop] == keys[start]:
            stop += 1
        if stop - start >= SHORTEST:
            run = Run(segments[start:stop], segments[start - 1], segments[stop])
            try:
                _check(forward, run)
                runs.append(run)
            except Unequal as reason:
                log.debug("tracing every unit of %s ...: %s", run.units[0], reason)
        start = stop
    return runs


def _head(unit: str) -> str:
    """The outermost module of a list that ``unit`` is or lies in: ``layers.3`` of ``layers.3.mlp``."""
    parts = unit.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _segments(graph: fx.Graph, heads: set[str]) -> list[Segment]:
    segments: list[Segment] = []
    seen = {""}
    regions: set[int | None] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for path in paths(node, "nn_module_stack"):
            if path in heads and path not in seen:
                seen.add(path)
                segments.append(Segment(path))
        region = compat.checkpoint_region(node)
        if segments:
            segments[-1].nodes.append(node)
            if region is not None and region not in regions:
                segments[-1].regions.append(region)
        regions.add(region)
    return segments


def paths(node: fx.Node, kind: str) -> list[str]:
    """FQNs of the modules around a node, outermost first."""
    return [entry[0] for entry in (node.meta.get(kind) or {}).values()]


def _key(segments: Sequence[Segment], index: int) -> tuple[Any, ...]:
    """Equal for two units that do the same with the same neighbours."""
    segment = segments[index]
    own = {node: i for i, node in enumerate(segment.nodes)}
    previous = {node: i for i, node in enumerate(segments[index - 1].nodes)} if index else {}
    before = segments[index - 1] if index else None

    def operand(node: fx.Node) -> str:
        if node in own:
            return f"own {own[node]}"
        if node in previous:
            return f"previous {previous[node]}"
        if node.op == "get_attr" and str(node.target).startswith(segment.unit + "."):
            name = str(node.target)[len(segment.unit) :]
            return f"attribute {name} {value_text(node.meta.get('val'))}"
        return f"outside {node.name}"

    return tuple(
        (
            node.target,
            text_of(node.args, operand),
            text_of(node.kwargs, operand),
            value_text(node.meta.get("val")),
            region_of(node, segment, before),
        )
        for node in segment.nodes
    )


def region_of(node: fx.Node, own: Segment, previous: Segment | None) -> tuple[int, int] | None:
    """Checkpoint region of a node: how many units earlier it began, and which one it is of those that began there."""
    region = compat.checkpoint_region(node)
    for begins, segment in enumerate((own, previous)):
        if segment is not None and region in segment.regions:
            return begins, segment.regions.index(region)
    return None if region is None else (-1, region)


def _check(forward: fx.GraphModule, run: Run) -> None:
    """Raises for what the key does not see."""
    attributes = [_attributes(forward.get_submodule(unit)) for unit in run.units]
    if any(found != attributes[1] for found in attributes):
        raise Unequal("parameters or buffers differ")
    home = {node: i for i, segment in enumerate(run.segments) for node in segment.nodes}
    for node, index in home.items():
        for written in compat.written_values(node):
            if home.get(written) != index or not compat.makes_memory(written):
                raise Unequal(f"{node.target} writes to memory from outside of its unit")
    for node in forward.graph.find_nodes(op="get_attr"):
        owner = run.owner(str(node.target))
        users = {home.get(user) for user in node.users}
        if owner is not None and users - {owner}:
            raise Unequal(f"{node.target} is used outside of its unit")
        value = node.meta.get("val")
        trained = isinstance(value, torch.Tensor) and value.requires_grad
        if owner is None and trained and users & set(range(len(run.segments))):
            raise Unequal(f"{node.target} is shared by units")
    for index, segment in enumerate(run.segments[2:-1], start=2):
        for node in segment.nodes:
            if any(home.get(user) not in (index, index + 1) for user in node.users):
                raise Unequal(f"{node} of {segment.unit} is used behind the next unit")


def _attributes(unit: nn.Module) -> list[tuple[Any, ...]]:
    named = [
        *unit.named_parameters(remove_duplicate=False),
        *unit.named_buffers(remove_duplicate=False),
    ]
    return [(name, isinstance(t, nn.Parameter), value_text(t)) for name, t in named]


@contextmanager
def reduced(forward: fx.GraphModule, runs: Sequence[Run]) -> Iterator[None]:
    """``forward`` without the dropped units while active; its modules, and after an error its graph, are whole again then.

    Args:
        forward: exported forward.
        runs: its runs of equal units.
    """
    whole = forward.graph
    replaced: dict[fx.Node, fx.Node] = {}
    dropped: dict[str, None] = {}
    skipped: set[fx.Node] = set()
    for run in runs:
        replaced.update(zip(run.segments[-2].nodes, run.segments[1].nodes, strict=True))
        dropped.update(dict.fromkeys(segment.unit for segment in run.dropped))
        skipped.update(node for segment in run.dropped for node in segment.nodes)
    prefixes = tuple(f"{unit}." for unit in dropped)
    graph = compat.empty_graph_like(whole)
    copies: dict[fx.Node, fx.Node] = {}
    for node in whole.nodes:
        gone = node.op == "get_attr" and str(node.target).startswith(prefixes)
        if not gone and node not in skipped:
            copies[node] = graph.node_copy(node, lambda n: copies[replaced.get(n, n)])
    children: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
    for unit in dropped:
        path, _, name = unit.rpartition(".")
        owner = forward.get_submodule(path)
        children.setdefault(path, (owner, dict(owner._modules)))
        del owner._modules[name]
    try:
        forward.graph = graph
        yield
    except Exception:  # the caller goes on with the whole graph
        forward.graph = whole
        raise
    finally:
        for owner, modules in children.values():  # in their old order
            owner._modules.clear()
            owner._modules.update(modules)


# ------------------------------------------------------------------ texts


def text_of(value: Any, operand: Callable[[fx.Node], str]) -> str:
    """An argument as text, with ``operand`` for nodes."""
    if isinstance(value, fx.Node):
        return operand(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(text_of(item, operand) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{text_of(v, operand)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({text_of((value.start, value.stop, value.step), operand)})"
    return f"{type(value).__name__} {value!r}"


def value_text(value: Any) -> str:
    """Everything that is known about a value."""
    if isinstance(value, torch.Tensor):
        sizes = [_size_text(s) for s in (*value.shape, *value.stride(), value.storage_offset())]
        return f"{value.dtype} {value.device} {value.requires_grad} {','.join(sizes)}"
    if isinstance(value, list | tuple):
        return f"[{';'.join(map(value_text, value))}]"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"{type(value).__name__} {_expression_text(value.node.expr)}"
    return repr(value)


def _size_text(size: Any) -> str:
    return str(size) if isinstance(size, int) else _expression_text(size.node.expr)


@lru_cache(maxsize=4096)
def _expression_text(expression: Any) -> str:
    return str(expression)


__all__ = [
    "Run",
    "Segment",
    "Unequal",
    "find_runs",
    "paths",
    "reduced",
    "region_of",
    "text_of",
    "value_text",
]
