"""Reduce gradients: the decision matrix, on local tensors, at the output edge.

Contract: needs a backward program whose ``ParamGrad`` outputs are full local gradients. Provides one whose outputs are
reduced as ``ParamPlan.reduction`` says: reduce-scatter over the shard axes, all-reduce over the replica axes, each
exactly once. Only the output edge is rewired; other users of a gradient node see the value they saw before.

    before                        after  (w cut over dp_shard=4, replicated over dp_replicate=2)
      g = mm(a, b)                  g = mm(a, b)
      return g                      c = convert(g, f32)                      to reduce_dtype
                                    r = wait(reduce_scatter_tensor(c, sum, 4, dp_shard))
                                    s = wait(all_reduce(r, sum, dp_replicate))
                                    m = mul(s, 1/8)                          mean over the batch dims
                                    o = convert(m, ...)                      to the parameter's dtype
                                    return o

A gradient that is a term of a sum over a tensor-parallel dim (``ParamPlan.sum_axes``) is summed over it first, in every
variant: what is accumulated over micro-batches is the gradient of one device.

Sums are plain sums followed by one scale: that is right on every backend (gloo has no AVG), and bitwise what FSDP2's
AVG gives on gloo. Reducing in fp16 divides before and after, by factors whose product is the whole, against overflow.
A gradient that is reduced in a wider dtype than it is stored in leaves in that dtype: the runtime adds micro-batches up
before it rounds. Every gradient leaves in contiguous memory of its own: a gradient node may serve two parameters, or be
the caller's own tangent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyper_parallel.plan import ParamPlan
from passes.base import (
    REDUCE,
    SCATTER,
    VIEWS,
    WAIT,
    Comm,
    GradInput,
    OutputRole,
    ParamGrad,
    ProgramInfo,
    aten,
    convert,
    emit,
    finish,
    info,
    output_node,
    outputs,
    set_outputs,
)


@dataclass(frozen=True)
class Scale:
    """Factors around a reduction: ``pre`` divides before it, ``post`` after it; ``1.0`` means no node."""

    pre: float = 1.0
    post: float = 1.0


def scale_for(
    plan: ParamPlan, reduce_op: str, divide_factor: float | None, dtype: torch.dtype
) -> Scale:
    """Divisors for one parameter.

    Args:
        plan: its plan; ``batch_ranks`` is the number of ranks whose data the mean is over.
        reduce_op: ``"avg"`` or ``"sum"``.
        divide_factor: replaces ``batch_ranks`` when given.
        dtype: dtype of the reduction.
    """
    whole = divide_factor if divide_factor is not None else float(plan.batch_ranks)
    if reduce_op == "sum" and divide_factor is None:
        whole = 1.0
    if dtype is not torch.float16 or whole == 1.0:
        return Scale(post=whole)
    pre = 1.0
    while whole % pre == 0 and whole / pre > pre:
        pre *= 2
    return Scale(pre=pre, post=whole / pre)


def reduce_grads(
    gm: fx.GraphModule,
    *,
    reduce_dtype: torch.dtype | None = None,
    reduce_op: str = "avg",
    divide_factor: float | None = None,
    variant: str = "sync",
) -> fx.GraphModule:
    """Adds the gradient reductions of a backward (or reduction) program.

    Args:
        gm: program with ``ParamGrad`` outputs; changed in place and returned.
        reduce_dtype: dtype on the wire; ``None`` keeps the gradient's own.
        reduce_op: ``"avg"`` (mean over the batch dims) or ``"sum"``.
        divide_factor: divides the sum by this instead of the number of ranks with different data.
        variant: ``"sync"``: everything. ``"scatter"``: reduce-scatter only, unscaled, in ``reduce_dtype`` (the
            all-reduce is deferred). ``"none"``: cast to ``reduce_dtype`` only (accumulated unsharded).
            ``"replicate"``: inputs are results of ``"scatter"``; the all-reduce and the scale.

    Returns:
        ``gm``.
    """
    program = info(gm)
    reduced: dict[int, fx.Node] = {}
    for position, node, role in list(outputs(gm, ParamGrad)):
        if node is None:
            continue
        plan = program.params[role.fqn]
        if plan.ignored:
            continue
        reduced[position] = _reduce_one(
            gm.graph, node, plan, program, reduce_dtype, reduce_op, divide_factor, variant
        )
    set_outputs(gm, reduced)
    _own_gradients(gm)
    return finish(
        gm,
        "reduce_grads",
        reduced=variant,
        reduce_op=reduce_op,
        divide_factor=divide_factor,
        reduce_dtype=reduce_dtype,
    )


def _reduce_one(
    graph: fx.Graph,
    grad: fx.Node,
    plan: ParamPlan,
    program: ProgramInfo,
    reduce_dtype: torch.dtype | None,
    reduce_op: str,
    divide_factor: float | None,
    variant: str,
) -> fx.Node:
    """Emits the chain of one gradient directly behind it; returns what the output edge takes.

    Packing comes before the cast and the scale, so that ``bucket`` finds these next to the collective and does them once
    for the whole bucket.
    """
    layout = program.layout
    wire = reduce_dtype or grad.meta["val"].dtype
    scale = scale_for(plan, reduce_op, divide_factor, wire)
    unit = program.units[plan.fqn]
    with graph.inserting_before(_after(grad)):

        def add(target: Callable[..., Any], *args: Any, comm: Comm | None = None) -> fx.Node:
            return emit(graph, target, *args, comm=comm)

        def prepared(value: fx.Node) -> fx.Node:
            if value.meta["val"].dtype != wire:
                value = add(convert, value, wire)
            if variant not in ("none", "replicate") and scale.pre != 1.0:
                value = add(aten.div.Tensor, value, scale.pre)
            return value

        value = grad
        sums = layout.size(plan.sum_axes) > 1 and not isinstance(grad.meta.get("role"), GradInput)
        if sums:  # before packing: padding has no terms
            comm = Comm("all_reduce", plan.sum_axes, "tp", (plan.fqn,), unit)
            group = layout.group_name(plan.sum_axes)
            value = add(WAIT, add(REDUCE, prepared(value), "sum", group, comm=comm))
        scatters = variant in ("sync", "scatter") and plan.shard_size > 1
        if scatters:
            value = pack(add, value, plan)
        if not sums:
            value = prepared(value)
        if variant == "none":
            return value
        if scatters:
            comm = Comm("reduce_scatter", plan.shard_axes, "reduce_grad", (plan.fqn,), unit)
            group = layout.group_name(plan.shard_axes)
            value = add(WAIT, add(SCATTER, value, "sum", plan.shard_size, group, comm=comm))
        if variant == "scatter":
            return value
        if plan.dp_size > 1:
            comm = Comm("all_reduce", plan.replica_axes, "replicate_grad", (plan.fqn,), unit)
            group = layout.group_name(plan.replica_axes)
            value = add(WAIT, add(REDUCE, value, "sum", group, comm=comm))
        if scale.post != 1.0:
            value = add(aten.div.Tensor, value, scale.post)
        if value.meta["val"].dtype != plan.dtype and not is_wider(wire, plan.dtype):
            value = add(convert, value, plan.dtype)
    return value


def is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether ``dtype`` holds every value of ``other``, and more."""
    return dtype != other and torch.promote_types(dtype, other) == dtype


def _own_gradients(gm: fx.GraphModule) -> None:
    """Copies gradients that share memory with an input or another output, or are not contiguous."""
    everything: list[tuple[int, fx.Node | None, OutputRole]] = list(outputs(gm))
    taken = {
        _owner(node)
        for _, node, role in everything
        if node is not None and not isinstance(role, ParamGrad)
    }
    copies: dict[int, fx.Node] = {}
    with gm.graph.inserting_before(output_node(gm)):
        for position, node, _ in list(outputs(gm, ParamGrad)):
            if node is None:
                continue
            owner = _owner(node)
            given_up = isinstance(owner.meta.get("role"), GradInput)
            shared = owner in taken or (owner.op == "placeholder" and not given_up)
            taken.add(owner)
            if shared or not node.meta["val"].is_contiguous():
                copied = emit(
                    gm.graph, aten.clone.default, node, memory_format=torch.contiguous_format
                )
                copies[position] = copied
    set_outputs(gm, copies)


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` shows."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return bool(node.all_input_nodes) and (aliases or node.target in VIEWS)


def pack(add: Callable[..., fx.Node], grad: fx.Node, plan: ParamPlan) -> fx.Node:
    """The reduce-scatter input ``[shard_size * padded_shard.size(0), ...]``: the inverse of ``unshard.assemble``.

    Args:
        add: ``add(target, *args) -> node``.
        grad: full local gradient.
        plan: plan of the parameter.
    """
    dim, rows, lengths = plan.shard_dim, plan.padded_rows, plan.lengths
    assert dim is not None
    size = plan.local_shape[dim]
    even = all(length == rows for length in lengths)
    if even and dim == 0:
        return grad
    if dim == 0 and list(lengths) == sorted(lengths, reverse=True) and _chunked(lengths, rows):
        return add(
            aten.constant_pad_nd.default, grad, _pad_dim(grad, 0, rows * plan.shard_size - size)
        )
    parts = add(aten.split_with_sizes.default, grad, list(lengths), dim)
    pieces = []
    for index, length in enumerate(lengths):
        piece = add(operator.getitem, parts, index)
        if length != rows:
            piece = add(aten.constant_pad_nd.default, piece, _pad_dim(grad, dim, rows - length))
        pieces.append(piece)
    return add(aten.cat.default, pieces, 0)


def _chunked(lengths: Sequence[int], rows: int) -> bool:
    """True for full chunks, at most one partial chunk, then empty ones."""
    partial = [length for length in lengths if 0 < length < rows]
    return len(partial) <= 1


def _pad_dim(node: fx.Node, dim: int, amount: int) -> list[int]:
    """``constant_pad_nd`` argument that appends ``amount`` rows on ``dim``."""
    ndim = node.meta["val"].dim()
    pads = [0, 0] * ndim
    pads[2 * (ndim - 1 - dim) + 1] = amount
    return pads


def _after(node: fx.Node) -> fx.Node:
    """The node that follows ``node``, past placeholders and the siblings of a ``getitem``."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following
