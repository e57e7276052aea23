"""Bucket: few large collectives instead of one for every parameter.

Contract: needs a partitioned (or forward-only, or reduction) program with per-parameter collectives. Provides the same
program with one collective for every bucket. Numerics do not change: members are packed element by element in
registration order and every rank holds the same layout.

    before                                    after (bucket of a and b, 2 ranks)
      ga = wait(all_gather(a, 2))               flat = cat([view(a, -1), view(b, -1)])
      gb = wait(all_gather(b, 2))               rows = view(wait(all_gather(flat, 2)), [2, na + nb])
                                                pa, pb = split(rows, [na, nb], 1)
                                                ga = reshape(pa, ...); gb = reshape(pb, ...)

Members of one bucket share unit, kind, purpose, axes, group and dtype; nothing is ever merged across those. A gather
bucket is issued where its first member was needed, a reduction bucket where its last member was ready.
"""

from __future__ import annotations

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
    emit,
    finish,
    info,
    remove_dead,
)

_MIB = 1 << 20
_MERGED_PURPOSES = frozenset({"unshard", "reduce_grad", "replicate_grad"})


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
        if comm.purpose in _MERGED_PURPOSES:
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
    waits = [_wait_of(node) for node in members]
    comms: list[Comm] = [node.meta["comm"] for node in members]
    units = dict.fromkeys(c.unit for c in comms)
    comm = replace(
        comms[0],
        params=tuple(p for c in comms for p in c.params),
        unit="+".join(units),
    )
    anchor = min(members) if members[0].target is GATHER else max(waits).next
    graph = gm.graph
    tags = {k: v for k, v in waits[0].meta.items() if k in ("recompute", "ac_graph_id")}
    with graph.inserting_before(anchor):

        def add(target: Callable[..., Any], *args: Any, comm: Comm | None = None) -> fx.Node:
            return emit(graph, target, *args, comm=comm, meta=tags)

        merge = _MERGE[members[0].target]
        results = merge(add, members, comm)
    for wait, result in zip(waits, results, strict=True):
        result.meta.setdefault("gathered", wait.meta.get("gathered"))
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
    for node in members:
        graph.erase_node(node)


def _wait_of(node: fx.Node) -> fx.Node:
    return next(user for user in node.users if user.target is WAIT)


def _flatten(add: Callable[..., fx.Node], node: fx.Node, shape: list[int]) -> fx.Node:
    return add(aten.reshape.default, node, shape)


def _merge_gathers(
    add: Callable[..., fx.Node], members: list[fx.Node], comm: Comm
) -> list[fx.Node]:
    """``[shard elements]`` of every member side by side; rows of the result are ranks."""
    sources = [node.args[0] for node in members]
    world, group = members[0].args[1], members[0].args[2]
    numels = [s.meta["val"].numel() for s in sources]  # type: ignore[union-attr]
    flat = add(aten.cat.default, [_flatten(add, s, [-1]) for s in sources])  # type: ignore[arg-type]
    gathered = add(WAIT, add(GATHER, flat, world, group, comm=comm))
    rows = add(aten.view.default, gathered, [world, sum(numels)])
    parts = add(aten.split_with_sizes.default, rows, numels, 1)
    return [
        _flatten(add, add(operator.getitem, parts, i), list(_wait_of(node).meta["val"].shape))
        for i, node in enumerate(members)
    ]


def _merge_scatters(
    add: Callable[..., fx.Node], members: list[fx.Node], comm: Comm
) -> list[fx.Node]:
    """Row ``r`` of the buffer holds rank ``r``'s part of every member."""
    sources = [node.args[0] for node in members]
    op, world, group = members[0].args[1], members[0].args[2], members[0].args[3]
    rows = [_flatten(add, s, [world, -1]) for s in sources]  # type: ignore[arg-type,list-item]
    flat = _flatten(add, add(aten.cat.default, rows, 1), [-1])
    result = add(WAIT, add(SCATTER, flat, op, world, group, comm=comm))
    return _unflatten(add, result, members)


def _merge_reduces(
    add: Callable[..., fx.Node], members: list[fx.Node], comm: Comm
) -> list[fx.Node]:
    """One flat all-reduce."""
    op, group = members[0].args[1], members[0].args[2]
    flat = add(aten.cat.default, [_flatten(add, node.args[0], [-1]) for node in members])  # type: ignore[arg-type]
    result = add(WAIT, add(REDUCE, flat, op, group, comm=comm))
    return _unflatten(add, result, members)


def _unflatten(add: Callable[..., fx.Node], flat: fx.Node, members: list[fx.Node]) -> list[fx.Node]:
    shapes = [list(_wait_of(node).meta["val"].shape) for node in members]
    numels = [torch.Size(shape).numel() for shape in shapes]
    parts = add(aten.split_with_sizes.default, flat, numels, 0)
    return [
        add(aten.view.default, add(operator.getitem, parts, i), shape)
        for i, shape in enumerate(shapes)
    ]


_MERGE: Mapping[Any, Callable[..., list[fx.Node]]] = {
    GATHER: _merge_gathers,
    SCATTER: _merge_scatters,
    REDUCE: _merge_reduces,
}


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
    previous = ordered[0]
    for node in ordered[1:]:
        if previous.next is not node:
            previous.append(node)
        previous = node
