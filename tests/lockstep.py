"""Run a program on all ranks of a mesh in one process, node by node, on real data.

Every rank's value of a node is computed before the next node starts, so a collective is a few lines on a list of
tensors. Nothing of the code under test is used but the graph: groups are read from the aliases in the program and
enumerated from mesh coordinates. The result of a collective that has not been waited for is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hyper_parallel.mesh import MeshLayout
from passes.base import GATHER, REDUCE, SCATTER, WAIT

Ranks = list[Any]  # one value a rank


class Pending:
    """A result that is not ready."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def group_ranks(alias: str, layout: MeshLayout) -> list[list[int]]:
    """Positions of the ranks of all groups that an alias stands for."""
    name, _, inner = alias.partition("/")
    prefix, dims, digest = name.split(":")
    if prefix != "hp" or digest != layout.digest:
        raise ValueError(f"unknown group {alias}")
    axes = [layout.dim_names.index(d) for d in dims.split(".")]
    points = list(itertools.product(*(range(s) for s in layout.shape)))
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, point in enumerate(points):
        key = tuple(0 if i in axes else c for i, c in enumerate(point))
        groups.setdefault(key, []).append(position)
    size = int(inner) if inner else 0
    if not size:
        return list(groups.values())
    return [g[i : i + size] for g in groups.values() for i in range(0, len(g), size)]


def _reduce(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = torch.maximum(total, value) if op == "max" else total + value
    return total / len(values) if op == "avg" else total


def _collective(node: fx.Node, inputs: Ranks, args: Sequence[Any], layout: MeshLayout) -> Ranks:
    results: Ranks = [None] * len(inputs)
    for group in group_ranks(str(args[-1]), layout):
        values = [inputs[r] for r in group]
        if node.target is GATHER:
            if args[1] != len(group):
                raise ValueError("wrong group size")
            out = [torch.cat(values)] * len(group)
        elif node.target is REDUCE:
            out = [_reduce(values, str(args[1]))] * len(group)
        elif node.target is SCATTER:
            if args[2] != len(group):
                raise ValueError("wrong group size")
            out = list(_reduce(values, str(args[1])).chunk(len(group)))
        else:
            raise ValueError(f"unknown collective {node.target}")
        for rank, value in zip(group, out, strict=True):
            results[rank] = Pending(value.clone())
    return results


def _slice(values: Ranks, parts: int, alias: str, layout: MeshLayout) -> Ranks:
    results: Ranks = [None] * len(values)
    for group in group_ranks(alias, layout):
        for index, rank in enumerate(group):
            results[rank] = values[rank].chunk(parts)[index].clone()
    return results


def _own_parts(node: fx.Node, arguments: list[Any], layout: MeshLayout) -> Ranks:
    results: Ranks = [None] * len(arguments)
    for group in group_ranks(str(node.args[-1]), layout):
        for index, rank in enumerate(group):
            if "local_ids" in str(node.target):
                ids, rows, _ = arguments[rank]
                results[rank] = ids - index * rows
            else:
                full, dim, blocks, parts, _ = arguments[rank]
                pieces = [block.chunk(parts, dim)[index] for block in full.chunk(blocks, dim)]
                results[rank] = torch.cat(pieces, dim)
    return results


def _data_index(rank: int, layout: MeshLayout) -> int:
    """Equal for ranks that differ in tensor parallel only."""
    point = list(itertools.product(*(range(s) for s in layout.shape)))[rank]
    kept = [0 if d in layout.roles.tp else c for d, c in zip(layout.dim_names, point, strict=True)]
    index = 0
    for size, c in zip(layout.shape, kept, strict=True):
        index = index * size + c
    return index


def run(gm: fx.GraphModule, inputs: Sequence[Ranks], layout: MeshLayout) -> list[Ranks]:
    """Run a program.

    Args:
        gm: The program.
        inputs: For each placeholder the value on every rank.
        layout: The mesh; ranks are positions in it.

    Returns:
        For each output the value on every rank; None where the program returns None.
    """
    world = len(layout.ranks)
    env: dict[fx.Node, Ranks] = {}
    feed = iter(inputs)
    last_use = {n: user for user in gm.graph.nodes for n in user.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last_use.items():
        dying.setdefault(user, []).append(node)
    for node in gm.graph.nodes:
        if node.op == "output":
            return [
                [None] * world if item is None else [_ready(v) for v in env[item]]
                for item in node.args[0]
            ]
        env[node] = _step(node, env, feed, layout, world)
        for dead in dying.get(node, ()):
            if dead is not node:
                del env[dead]
    raise AssertionError("a program ends with its output")


def _ready(value: Any) -> Any:
    return torch.full_like(value.value, float("nan")) if isinstance(value, Pending) else value


def _step(
    node: fx.Node, env: dict[fx.Node, Ranks], feed: Any, layout: MeshLayout, world: int
) -> Ranks:
    if node.op == "placeholder":
        return list(next(feed))
    if node.op == "get_attr":
        return [getattr(node.graph.owning_module, str(node.target))] * world
    if node.target is WAIT:
        source: Any = node.args[0]
        return [v.value if isinstance(v, Pending) else v for v in env[source]]

    def at(rank: int) -> tuple[Any, Any]:
        return fx.node.map_arg((node.args, node.kwargs), lambda n: _ready(env[n][rank]))  # type: ignore[return-value]

    name = str(node.target)
    if name.startswith("_c10d_functional"):
        first: Any = node.args[0]
        return _collective(node, [_ready(v) for v in env[first]], node.args, layout)
    if name.startswith("hyper_parallel.shard_slice"):
        source = node.args[0]
        return _slice(
            [_ready(v) for v in env[source]],
            node.args[1],  # type: ignore[arg-type]
            str(node.args[2]),
            layout,
        )
    if name.startswith(("hyper_parallel.take_chunk", "hyper_parallel.local_ids")):
        return _own_parts(node, [at(rank)[0] for rank in range(world)], layout)
    results = []
    for rank in range(world):
        args, kwargs = at(rank)
        if "random" in node.meta:  # ranks that see the same data draw the same numbers
            torch.manual_seed(1000 * node.meta["random"] + _data_index(rank, layout))
        results.append(node.target(*args, **kwargs))  # type: ignore[operator]
    return results
