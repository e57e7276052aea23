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

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import hyper_parallel.ops  # noqa: F401  registers shard_slice
from hyper_parallel.groups import inner_group_name
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
    is_backward,
    remove_dead,
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
    remove_dead(gm)  # a second gather whose value backward does not need
    return finish(gm, "unshard", stage="sharded", gathered=gather, reshard=dict(reshard))


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
            flat, value = _gather(graph, value, plan, program, unit, chain)
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in chain)
    inner = 0 if isinstance(reshard, bool) else reshard
    if plan.shard_size > 1 and 1 < inner < plan.shard_size:
        with graph.inserting_after(value):
            after = value.next
        with graph.inserting_before(after):
            again_chain, again = _gather_from_slice(graph, flat, plan, program, unit, inner)
        _move_backward_uses(value, again)
        _tag(again_chain[1:], again, keep=False)
        again_chain[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    _tag(chain, value, keep=reshard is False)


def _gather(
    graph: fx.Graph,
    shard: fx.Node,
    plan: ParamPlan,
    program: ProgramInfo,
    unit: str,
    chain: list[fx.Node],
) -> tuple[fx.Node, fx.Node]:
    """Emits gather, wait and the removal of padding; returns the gathered buffer and the full parameter."""
    layout = program.layout

    def add(target: Any, *args: Any, comm: Comm | None = None) -> fx.Node:
        node = emit(graph, target, *args, comm=comm)  # type: ignore[arg-type]
        chain.append(node)
        return node

    comm = Comm("all_gather", plan.shard_axes, "unshard", (plan.fqn,), unit)
    gathered = add(GATHER, shard, plan.shard_size, layout.group_name(plan.shard_axes), comm=comm)
    flat = add(WAIT, gathered)
    return flat, assemble(add, flat, plan)


def _gather_from_slice(
    graph: fx.Graph, flat: fx.Node, plan: ParamPlan, program: ProgramInfo, unit: str, inner: int
) -> tuple[list[fx.Node], fx.Node]:
    """For an integer reshard: slice of the smaller group after forward, and the gather that backward issues from it."""
    chain: list[fx.Node] = []

    def add(target: Any, *args: Any, comm: Comm | None = None) -> fx.Node:
        node = emit(graph, target, *args, comm=comm)
        chain.append(node)
        return node

    group = inner_group_name(program.layout, plan.shard_axes, inner)
    sliced = add(torch.ops.hyper_parallel.shard_slice.default, flat, inner, group)
    comm = Comm("all_gather", plan.shard_axes, "unshard", (plan.fqn,), unit, inner)
    full = assemble(add, add(WAIT, add(GATHER, sliced, inner, group, comm=comm)), plan)
    return chain, full


def _move_backward_uses(full: fx.Node, again: fx.Node) -> None:
    """Backward nodes that read ``full``, or a view of it, read the same of ``again``; forward keeps ``full``."""
    copies: dict[fx.Node, fx.Node] = {full: again}
    views = [full]
    for view in views:
        for user in list(view.users):
            if user is again or user.target is torch.ops.hyper_parallel.shard_slice.default:
                continue
            if is_backward(user):
                user.replace_input_with(view, _copy_of(view, copies))
            elif is_weight_view(user):
                views.append(user)


def _copy_of(view: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """``view`` rebuilt on the second gather, behind it in the graph."""
    if view not in copies:
        source = _copy_of(view.all_input_nodes[0], copies)
        anchor = max(source, view)
        with view.graph.inserting_after(anchor):
            copies[view] = view.graph.node_copy(view, lambda n: _copy_of(n, copies))
    return copies[view]


def assemble(add: Callable[..., fx.Node], flat: fx.Node, plan: ParamPlan) -> fx.Node:
    """Full parameter from the gathered buffer ``[shard_size * shard.size(0), ...]``: padding off, dims in order.

    Args:
        add: ``add(target, *args) -> node``.
        flat: the gathered shards, concatenated on dim 0 in group order.
        plan: plan of the parameter.
    """
    assert plan.shard_dim is not None
    if 0 in plan.local_shape:
        return add(aten.reshape.default, flat, list(plan.local_shape))
    size = plan.local_shape[plan.shard_dim]
    lengths, rows = plan.lengths, plan.padded_rows
    if plan.shard_dim == 0 and _padding_is_a_tail(lengths, rows):
        if rows * plan.shard_size == size:
            return flat
        return add(aten.slice.Tensor, flat, 0, 0, size)
    pieces = []
    parts = add(aten.split.Tensor, flat, plan.padded_shard_shape[0], 0)
    for index, length in enumerate(lengths):
        if length == 0:
            continue
        piece = add(operator.getitem, parts, index)
        if length != rows:
            piece = add(aten.slice.Tensor, piece, plan.shard_dim, 0, length)
        pieces.append(piece)
    return add(aten.cat.default, pieces, plan.shard_dim)


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
            if is_weight_view(user) and user.meta.get("recompute") is None:
                user.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                user.meta["ac_graph_id"] = _WEIGHT_REGION
                derived.append(user)


def is_weight_view(node: fx.Node) -> bool:
    """A view or a cast of one value: of a weight it is as large as the weight, so it is treated like it."""
    known = node.target in VIEWS or node.target in (convert, aten._to_copy.default)
    return known and node.op == "call_function" and len(node.all_input_nodes) == 1


def _first_in_order(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """The node of ``nodes`` that comes first in the graph."""
    return min(nodes)
