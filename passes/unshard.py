"""Unshard: give each sharded parameter its all-gather, on the shard axis only.

Contract: needs a joint (or forward-only) program whose ``ParamInput`` placeholders are full parameters in compute
dtype. Provides a program whose placeholders are this rank's padded shards in storage dtype. TP and EP entries of the
placement are not touched.

    before                                   after  (w: f32[8, 4] cut over dp_shard=4)
      w: f32[8, 4]                             w: f32[2, 4]
      y = mm(x, w)                             c = convert(w, bf16)              only under a mixed precision policy
                                               g = all_gather_into_tensor(c, 4, dp_shard)
                                               f = wait_tensor(g)
                                               y = mm(x, f)

The cast comes before the gather, so the wire carries ``param_dtype``. Rows that padding added are cut off after the
gather. Every node of the chain, and every view of a gathered weight, is tagged for the partitioner: recomputed in
backward when the unit reshards after forward, saved when it does not. With an integer the forward gather is followed
by this rank's slice of the smaller group, which is what is saved, and a second gather over that group is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from hyper_parallel.plan import ParamPlan
from passes.base import (
    GATHER,
    VIEWS,
    WAIT,
    Comm,
    ParamInput,
    ProgramInfo,
    aten,
    convert,
    emit,
    finish,
    info,
    inputs,
)

#: Larger than any activation checkpoint region, so a region that uses a weight never forces it to be saved.
_WEIGHT_REGION = 1 << 30


def unshard(
    gm: fx.GraphModule, *, reshard: Mapping[str, bool | int], gather: bool = True
) -> fx.GraphModule:
    """Inserts the all-gathers of a program.

    Args:
        gm: joint or forward-only program; changed in place and returned.
        reshard: for every unit, ``reshard_after_forward``: ``True`` gathers again in backward, ``False`` keeps the
            full weight, an integer keeps the slice of a group of that many ranks.
        gather: ``False`` builds the variant for weights that the runtime holds unsharded: placeholders stay full
            and no collective is added; only the dtype of the placeholder and of the use may differ.

    Returns:
        ``gm``.
    """
    program = info(gm)
    for node, role in list(inputs(gm, ParamInput)):
        plan = program.params[role.fqn]
        if plan.ignored:
            continue
        unit = program.units[role.fqn]
        if gather:
            _unshard_parameter(gm.graph, node, plan, program, unit, reshard[unit])
    return finish(gm, "unshard", stage="sharded", gathered=gather)


def _unshard_parameter(
    graph: fx.Graph,
    node: fx.Node,
    plan: ParamPlan,
    program: ProgramInfo,
    unit: str,
    reshard: bool | int,
) -> None:
    """Turns one full placeholder into shard placeholder + gather chain."""
    users = list(node.users)
    full = node.meta["val"]
    compute = full.dtype
    if plan.shard_size == 1 and plan.dtype == compute:
        return
    node.meta["val"] = full.new_empty(plan.padded_shard_shape, dtype=plan.dtype)
    if not users:
        return
    chain: list[fx.Node] = []
    with graph.inserting_before(_first_in_order(graph, users)):
        value = node
        if plan.dtype != compute:
            value = emit(graph, convert, value, compute, like=users[0])
            chain.append(value)
        if plan.shard_size > 1:
            value = _gather(graph, value, plan, program, unit, reshard, chain)
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in chain)
    keep = reshard is False or (plan.shard_size == 1 and plan.dtype == compute)
    _tag(chain, value, keep)


def _gather(
    graph: fx.Graph,
    shard: fx.Node,
    plan: ParamPlan,
    program: ProgramInfo,
    unit: str,
    reshard: bool | int,
    chain: list[fx.Node],
) -> fx.Node:
    """Emits gather, wait and the removal of padding; for an integer, slice and inner gather too."""
    layout = program.layout

    def add(target: object, *args: object, comm: Comm | None = None) -> fx.Node:
        node = emit(graph, target, *args, comm=comm)  # type: ignore[arg-type]
        chain.append(node)
        return node

    comm = Comm("all_gather", plan.shard_axes, "unshard", (plan.fqn,), unit)
    gathered = add(GATHER, shard, plan.shard_size, layout.group_name(plan.shard_axes), comm=comm)
    flat = add(WAIT, gathered)
    inner = reshard if reshard is not True and reshard is not False else 0
    if inner and inner < plan.shard_size:
        axis = layout.group_name(plan.shard_axes, inner=inner)
        sliced = add(torch.ops.hyper_parallel.shard_slice.default, flat, inner, axis)
        sliced.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        comm = Comm("all_gather", plan.shard_axes, "unshard", (plan.fqn,), unit, inner)
        flat = add(WAIT, add(GATHER, sliced, inner, axis, comm=comm))
    return assemble(add, flat, plan)


def assemble(add: object, flat: fx.Node, plan: ParamPlan) -> fx.Node:
    """Full parameter from the gathered buffer ``[shard_size * shard.size(0), ...]``: padding off, dims in order.

    Args:
        add: ``add(target, *args) -> node``.
        flat: the gathered shards, concatenated on dim 0 in group order.
        plan: plan of the parameter.
    """
    size = plan.local_shape[plan.shard_dim]
    lengths, rows = plan.lengths, plan.padded_rows
    if plan.shard_dim == 0 and _padding_is_a_tail(lengths, rows):
        if rows * plan.shard_size == size:
            return flat
        return add(aten.slice.Tensor, flat, 0, 0, size)  # type: ignore[operator]
    pieces = []
    parts = add(aten.split.Tensor, flat, plan.padded_shard_shape[0], 0)  # type: ignore[operator]
    import operator

    for index, length in enumerate(lengths):
        if length == 0:
            continue
        piece = add(operator.getitem, parts, index)  # type: ignore[operator]
        if length != rows:
            piece = add(aten.slice.Tensor, piece, plan.shard_dim, 0, length)  # type: ignore[operator]
        pieces.append(piece)
    return add(aten.cat.default, pieces, plan.shard_dim)  # type: ignore[operator]


def _padding_is_a_tail(lengths: Sequence[int], rows: int) -> bool:
    """True when the real rows are a prefix of the gathered rows (plain ``torch.chunk`` over one axis)."""
    seen_short = False
    for length in lengths:
        if seen_short and length:
            return False
        seen_short = seen_short or length != rows
    return True


def _tag(chain: Sequence[fx.Node], full: fx.Node, keep: bool) -> None:
    """Tells the partitioner what to do with the chain and with everything that only renames the full weight."""
    if keep:
        full.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return
    for node in chain:
        if node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _WEIGHT_REGION
    derived = [full]
    while derived:
        for user in derived.pop().users:
            weight_only = user.target in VIEWS or user.target is convert
            if weight_only and user.op == "call_function" and len(user.all_input_nodes) == 1:
                user.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                user.meta["ac_graph_id"] = _WEIGHT_REGION
                derived.append(user)


def _first_in_order(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """The node of ``nodes`` that comes first in the graph."""
    return min(nodes)
