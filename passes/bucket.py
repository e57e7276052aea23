"""Bucket: few large collectives instead of one for every parameter.

Contract: needs a partitioned (or forward-only, or reduction) program with per-parameter collectives. Provides the same
program with one collective for every bucket. Numerics do not change: members are packed element by element in
registration order and every rank holds the same layout.

    before                                    after (bucket of a and b, 2 ranks)
      ga = wait(all_gather(a, 2))               flat = cat([view(a, -1), view(b, -1)])
      gb = wait(all_gather(b, 2))               rows = view(wait(all_gather(flat, 2)), [2, na + nb])
                                                pa, pb = split(rows, [na, nb], 1)
                                                ga = reshape(pa, ...); gb = reshape(pb, ...)

Casts and scales that all members have beside the collective are done once, on the flat buffer; and a buffer that would be
put together from all the pieces of one other buffer (the all-reduce after a reduce-scatter) is that buffer:

      r = wait(all_reduce(view(wait(reduce_scatter(...)))))       flat = wait(reduce_scatter(cat(...)))
      o = div(r, 8)                             for every member  flat = div(wait(all_reduce(flat)), 8)
                                                                  o, ... = split(flat)

Members of one bucket share unit, kind, purpose, axes, group and dtype; nothing is ever merged across those. A gather
bucket is issued where its first member was needed, a reduction bucket where its last member was ready.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.base import (
    GATHER,
    REDUCE,
    SCATTER,
    WAIT,
    Comm,
    aten,
    collectives,
    convert,
    emit,
    finish,
    info,
    remove_dead,
    reorder,
)

_MIB = 1 << 20


def bucket(gm: fx.GraphModule, *, bucket_mb: float | None = None) -> fx.GraphModule:
    """Merges the collectives of a program.

    Args:
        gm: program; changed in place and returned.
        bucket_mb: ``None``: one bucket a unit. ``0``: one collective a parameter. A number: neighbouring units are
            merged while the bucket holds at most that many MiB on this rank's side of the wire.

    Returns:
        ``gm``.
    """
    if bucket_mb != 0:
        for members in list(_buckets(gm, bucket_mb)):
            if len(members) > 1:
                _merge(gm, members)
        _stable_topological_sort(gm)
        remove_dead(gm)
    return finish(gm, "bucket", bucket_mb=bucket_mb)


def _key(node: fx.Node, comm: Comm, first: fx.Node) -> tuple[Any, ...]:
    reduce_op = node.args[1] if node.target in (SCATTER, REDUCE) else None
    return (comm.kind, comm.purpose, comm.axes, comm.inner, first.meta["val"].dtype, reduce_op)


def _buckets(gm: fx.GraphModule, bucket_mb: float | None) -> Iterator[list[fx.Node]]:
    """Groups of collectives to merge, each in registration order."""
    program = info(gm)
    position = {fqn: i for i, fqn in enumerate(program.params)}
    by_key: dict[tuple[Any, ...], dict[str, list[fx.Node]]] = {}
    for node, comm in collectives(gm):
        if comm.params:  # not a collective of the model's own computation
            source = node.args[0]
            key = _key(node, comm, source)  # type: ignore[arg-type]
            by_key.setdefault(key, {}).setdefault(comm.unit, []).append(node)
    for units in by_key.values():
        current: list[fx.Node] = []
        size = 0
        for unit_nodes in units.values():
            nodes = sorted(unit_nodes, key=lambda n: position[n.meta["comm"].params[0]])
            nbytes = sum(_nbytes(n.args[0]) for n in nodes)  # type: ignore[arg-type,misc]
            if current and (bucket_mb is None or size + nbytes > bucket_mb * _MIB):
                yield current
                current, size = [], 0
            current = current + nodes
            size += nbytes
        if current:
            yield current


def _nbytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _merge(gm: fx.GraphModule, members: list[fx.Node]) -> None:
    """Replaces collectives of one kind by one collective on a flat buffer."""
    graph, gathers = gm.graph, members[0].target is GATHER
    waits = [_wait_of(node) for node in members]
    comms: list[Comm] = [node.meta["comm"] for node in members]
    units = dict.fromkeys(c.unit for c in comms)
    comm = replace(
        comms[0],
        params=tuple(p for c in comms for p in c.params),
        unit="+".join(units),
    )
    sources, before = _peel_sources([node.args[0] for node in members])  # type: ignore[misc]
    if gathers:
        _prepare_early(sources, min(members))
    results, after = (waits, []) if gathers else _peel_results(waits)
    with graph.inserting_before(min(members) if gathers else max(results).next):

        def add(target: Callable[..., Any], *args: Any) -> fx.Node:
            return emit(graph, target, *args)

        def pack(target: Callable[..., Any], *args: Any) -> fx.Node:
            return emit(graph, target, *args, meta={"packs": True})

        flat = _apply(pack, _PACK[members[0].target](pack, members, sources), before)
        start = emit(graph, members[0].target, flat, *members[0].args[1:], comm=comm)  # type: ignore[arg-type]
        flat = _apply(add, add(WAIT, start), after)
        replacements = _UNPACK[members[0].target](add, flat, members)
    for old, new in zip(results, replacements, strict=True):
        old.replace_all_uses_with(new)
    for wait, result in zip(waits, results, strict=True):
        while result is not wait:  # what was done to each result is done to the buffer now
            inner = result.all_input_nodes[0]
            graph.erase_node(result)
            result = inner
        graph.erase_node(wait)
    for node in members:
        graph.erase_node(node)


def _prepare_early(sources: list[fx.Node], first: fx.Node) -> None:
    """Moves casts of shards in front of the first member of their bucket.

    They stand where their own weight is used. A bucket of the first and the last weight of a model would otherwise be sorted
    behind the last cast, and so behind the gathers of everything in between.
    """
    for source in sources:
        chain: list[fx.Node] = []
        node = source
        while node.op == "call_function" and node > first and len(node.all_input_nodes) == 1:
            chain.append(node)
            node = node.all_input_nodes[0]
        if node.op == "placeholder" or node < first:
            for late in reversed(chain):
                first.prepend(late)


def _wait_of(node: fx.Node) -> fx.Node:
    return next(user for user in node.users if user.target is WAIT)


# ------------------------------------------------------------------ casts and scales, once for a buffer

_Op = tuple[Callable[..., Any], tuple[Any, ...]]


def _common(nodes: list[fx.Node]) -> _Op | None:
    """The cast or scale that every one of these nodes is, with the same numbers, on the same dtype."""
    first = nodes[0]
    if first.target not in (convert, aten.div.Tensor) or first.kwargs:
        return None
    inner = {n.args[0].meta["val"].dtype for n in nodes if n.target is first.target}  # type: ignore[union-attr]
    scalars = first.args[1:]
    same = all(n.target is first.target and n.args[1:] == scalars for n in nodes)
    if not same or len(inner) > 1 or any(isinstance(x, fx.Node) for x in scalars):
        return None
    return first.target, scalars  # type: ignore[return-value]


def _peel_sources(sources: list[fx.Node]) -> tuple[list[fx.Node], list[_Op]]:
    """Takes from all sources the operators that they end with, unless copying the buffer would then move more bytes."""
    operators: list[_Op] = []
    while all(len(node.users) == 1 for node in sources):
        common = _common(sources)
        if common is None:
            break
        inner: list[fx.Node] = [node.args[0] for node in sources]  # type: ignore[misc]
        if _width(inner[0]) > _width(sources[0]):
            break
        operators.insert(0, common)
        sources = inner
    return sources, operators


def _peel_results(waits: list[fx.Node]) -> tuple[list[fx.Node], list[_Op]]:
    """Follows all results through the operators that they have in common; returns the last nodes and the operators."""
    operators: list[_Op] = []
    results = waits
    while all(len(node.users) == 1 for node in results):
        users = [next(iter(node.users)) for node in results]
        common = _common(users)
        if common is None:
            break
        operators.append(common)
        results = users
    return results, operators


def _width(node: fx.Node) -> int:
    return int(node.meta["val"].element_size())


def _apply(add: Callable[..., fx.Node], node: fx.Node, operators: list[_Op]) -> fx.Node:
    for target, scalars in operators:
        node = add(target, node, *scalars)
    return node


# ------------------------------------------------------------------ layouts of the flat buffers


def _pack_flat(
    add: Callable[..., fx.Node], members: list[fx.Node], sources: list[fx.Node]
) -> fx.Node:
    """Elements of every member side by side; all pieces of one split, in order, are what was split."""
    flat: list[fx.Node] = []
    while sources:
        split, _ = _piece(sources[0])
        count = len(split.args[1]) if split is not None else 0  # type: ignore[arg-type]
        if count and [_piece(s) for s in sources[:count]] == [(split, i) for i in range(count)]:
            flat.append(split.args[0])  # type: ignore[union-attr,arg-type]
        else:
            count = 1
            flat.append(add(aten.reshape.default, sources[0], [-1]))
        sources = sources[count:]
    return flat[0] if len(flat) == 1 else add(aten.cat.default, flat)


def _piece(node: fx.Node) -> tuple[fx.Node | None, int]:
    """``(split, index)`` for a view of a piece of a flat buffer that this pass has split."""
    while node.target is aten.view.default:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is operator.getitem and node.args[0].meta.get("splits_buffer"):  # type: ignore[union-attr]
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None, 0


def _pack_rows(
    add: Callable[..., fx.Node], members: list[fx.Node], sources: list[fx.Node]
) -> fx.Node:
    """Row ``r`` of the buffer holds rank ``r``'s part of every member."""
    world = members[0].args[2]
    rows = [add(aten.reshape.default, source, [world, -1]) for source in sources]
    return add(aten.reshape.default, add(aten.cat.default, rows, 1), [-1])


def _unpack_rows(
    add: Callable[..., fx.Node], flat: fx.Node, members: list[fx.Node]
) -> list[fx.Node]:
    """Rows of a gathered buffer are ranks, columns are members."""
    world = members[0].args[1]
    numels = [n.args[0].meta["val"].numel() for n in members]  # type: ignore[union-attr]
    rows = add(aten.view.default, flat, [world, sum(numels)])
    parts = add(aten.split_with_sizes.default, rows, numels, 1)
    pieces = [add(operator.getitem, parts, i) for i in range(len(members))]
    return [
        add(aten.reshape.default, piece, list(_wait_of(node).meta["val"].shape))
        for piece, node in zip(pieces, members, strict=True)
    ]


def _unpack_flat(
    add: Callable[..., fx.Node], flat: fx.Node, members: list[fx.Node]
) -> list[fx.Node]:
    """Members lie side by side."""
    shapes = [list(_wait_of(node).meta["val"].shape) for node in members]
    parts = add(aten.split_with_sizes.default, flat, [math.prod(shape) for shape in shapes], 0)
    parts.meta["splits_buffer"] = True
    pieces = [add(operator.getitem, parts, i) for i in range(len(members))]
    return [
        add(aten.view.default, piece, shape) for piece, shape in zip(pieces, shapes, strict=True)
    ]


_PACK: Mapping[Any, Callable[..., fx.Node]] = {
    GATHER: _pack_flat,
    SCATTER: _pack_rows,
    REDUCE: _pack_flat,
}
_UNPACK: Mapping[Any, Callable[..., list[fx.Node]]] = {
    GATHER: _unpack_rows,
    SCATTER: _unpack_flat,
    REDUCE: _unpack_flat,
}

# ------------------------------------------------------------------ order


def _stable_topological_sort(gm: fx.GraphModule) -> None:
    """Moves nodes that now precede an input of theirs behind it; keeps the order of everything else."""
    graph = gm.graph
    placed: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    remaining: dict[fx.Node, int] = {}
    ordered: list[fx.Node] = []

    def place(start: fx.Node) -> None:
        stack = [start]
        while stack:
            node = stack.pop()
            placed.add(node)
            ordered.append(node)
            ready = []
            for blocked in waiting.pop(node, ()):
                remaining[blocked] -= 1
                if remaining[blocked] == 0:
                    ready.append(blocked)
            stack.extend(reversed(ready))

    for node in list(graph.nodes):
        missing = [n for n in node.all_input_nodes if n not in placed]
        if not missing:
            place(node)
            continue
        remaining[node] = len(missing)
        for n in missing:
            waiting.setdefault(n, []).append(node)
    if len(ordered) != len(graph.nodes):
        raise RuntimeError("bucketing made a cycle; this is a bug in passes.bucket")
    reorder(graph, ordered)
