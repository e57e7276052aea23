"""Layout rules of operators that work element by element, or along some dims and keep the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from passes.base import aten
from passes.tensor_parallel import functional
from passes.tensor_parallel.layout import REPLICATED, Layout
from passes.tensor_parallel.rule import Call, Decision, Emit, Rule, listed, rule, shape_of
from passes.tensor_parallel.shapes import same_size

#: Operators without the tag that work element by element, or keep every element where it is.
_ALIKE = frozenset(
    getattr(packet, overload)
    for packet in (
        aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.detach, aten.alias,
        aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.masked_fill,
        aten.masked_fill_, aten.where, aten.silu, aten.gelu, aten.relu, aten.sigmoid, aten.tanh,
        aten.softplus, aten.mish, aten.hardswish, aten.hardtanh, aten.leaky_relu, aten.elu, aten.selu,
        aten.celu, aten.relu6, aten.log_sigmoid, aten.copy_, aten.copy, aten.rsub, aten.square, aten.float_power,
        aten.nan_to_num, aten.clamp, aten.clip, aten.__and__, aten.__or__, aten.__xor__, aten.logical_not,
        aten.true_divide, aten.divide, aten.multiply, aten.subtract, aten.negative, aten.expand_as,
    )
    for overload in packet.overloads()
)  # fmt: skip


@rule(torch.Tag.pointwise, *_ALIKE)
def pointwise(call: Call) -> Decision | None:
    """Inputs broadcast; the largest cut input says where the output is cut."""
    tensors = call.node.all_input_nodes
    tensors = [n for n in tensors if n in call.layouts]
    rank = len(call.out_shape)
    schema = getattr(call.node.target, "_schema", None)
    written = schema is not None and schema.is_mutable
    first = call.node.args[0]
    if written:
        assert isinstance(first, fx.Node)
        chosen = _aligned(call, first, rank)
        if chosen is None:  # the whole is written: everything else is gathered
            return None
    else:
        cut = [n for n in tensors if not call.layout(n).replicated]
        cut.sort(key=lambda n: _elements(n), reverse=True)
        chosen = next((at for n in cut if (at := _aligned(call, n, rank)) is not None), None)
        if chosen is not None and not _as_long(call, chosen, cut):
            return None
    if chosen is None or chosen.dim is None:
        return None
    inputs = {}
    for node in tensors:
        shape = shape_of(node)
        dim = chosen.dim - (rank - len(shape))
        if dim < 0 or same_size(shape[dim], 1):
            inputs[node] = REPLICATED
        else:
            inputs[node] = chosen.at(dim)
    return Decision(chosen, inputs)


@rule(aten.type_as.default, aten.to.other)
def _dtype_of_another(call: Call) -> Decision | None:
    """Of the second tensor only the dtype is read, so it may be cut in any way."""
    source, other = call.argument("self"), call.argument("other")
    layout = call.layout(source)
    inputs = {other: call.layout(other), source: layout}
    return Decision(layout, inputs, alike=layout.replicated)


def _as_long(call: Call, chosen: Layout, cut: Sequence[fx.Node]) -> bool:
    """Whether the output is as long on the dim that is cut as an input that is: else it does not follow it."""
    rank = len(call.out_shape)
    back = (chosen.dim or 0) - rank
    inputs = [n for n in cut if _aligned(call, n, rank) == chosen]
    return any(same_size(shape_of(n)[back], call.out_shape[back]) for n in inputs)


def _aligned(call: Call, node: fx.Node, rank: int) -> Layout | None:
    layout = call.layout(node)
    if layout.dim is None:
        return None
    return layout.at(layout.dim + rank - len(shape_of(node)))


def _elements(node: fx.Node) -> float:
    return math.prod(s if isinstance(s, int) else 2.0 for s in shape_of(node))


@rule(
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default,
    aten._assert_tensor_metadata.default,
)  # fmt: skip
def _no_content(call: Call) -> Decision | None:
    """Only dtype and device of the input are read."""
    return Decision(REPLICATED, dict(call.layouts), alike=True)


@rule(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
def _dropout(call: Call) -> Decision | None:
    source, p, train = (call.argument(name) for name in ("input", "p", "train"))
    layout = call.layout(source)
    if not train or p == 0.0:
        return Decision(layout, {source: layout})
    if call.node.target is not aten.dropout.default:
        return None
    where = (layout.dim, layout.blocks, call.size, call.group)

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        return add(functional.whole_dropout, args[0], p, *where)

    return Decision(layout, {source: layout}, emit=emit)


# ------------------------------------------------------------------ along dims


def _along(dims: Callable[[Call], Iterable[int]], name: str = "self") -> Rule:
    """A rule for operators that mix elements along some dims and keep the shape: those dims must not be cut."""

    def decide_along(call: Call) -> Decision | None:
        source = call.argument(name)
        layout = call.layout(source)
        rank = len(shape_of(source))
        if layout.dim is None or layout.dim in {d % rank for d in dims(call)}:
            return None
        return Decision(layout, {source: layout})

    return decide_along


_one_dim = _along(lambda call: [call.argument("dim")])
rule(
    aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.cumsum.default,
    aten.cumprod.default, aten.logcumsumexp.default,
)(_one_dim)  # fmt: skip
rule(aten.triu.default, aten.tril.default)(_along(lambda call: [-1, -2]))
rule(aten.flip.default)(_along(lambda call: call.argument("dims")))
rule(aten.roll.default)(
    _along(lambda call: call.argument("dims") or range(len(shape_of(call.argument("self")))))
)
rule(aten.view_as_complex.default, aten.glu.default)(_along(lambda call: [-1]))


@rule(aten.view_as_real.default)
def _view_as_real(call: Call) -> Decision | None:
    source = call.argument("self")
    return Decision(call.layout(source), {source: call.layout(source)})


@rule(aten.layer_norm.default, aten.rms_norm.default)
def _norm(call: Call) -> Decision | None:
    source = call.argument("input")
    layout = call.layout(source)
    kept = len(shape_of(source)) - len(call.argument("normalized_shape"))
    if layout.dim is None or layout.dim >= kept:
        return None
    return Decision(layout, {source: layout})


@rule(aten.pad.default, aten.constant_pad_nd.default)
def _pad(call: Call) -> Decision | None:
    source, pads = call.argument("self"), call.argument("pad")
    layout, rank = call.layout(source), len(shape_of(source))
    if layout.dim is None or rank - 1 - layout.dim < len(pads) // 2:
        index = 2 * (rank - 1 - (layout.dim or 0))
        if layout.dim is None or any(p != 0 for p in pads[index : index + 2]):
            return None
    return Decision(layout, {source: layout})


@rule(
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.all.dim, aten.any.dim,
)  # fmt: skip
def _reduce(call: Call) -> Decision | None:
    source = call.argument("self")
    layout, rank = call.layout(source), len(shape_of(source))
    assert layout.dim is not None
    target = call.node.target
    whole = target in (aten.sum.default, aten.mean.default)
    given = None if whole else call.argument("dim")
    dims = {d % rank for d in listed(given)} if given not in (None, [], ()) else set(range(rank))
    keep = False if whole else bool(call.argument("keepdim"))
    if layout.dim not in dims:
        below = 0 if keep else sum(d < layout.dim for d in dims)
        return Decision(layout.at(layout.dim - below), {source: layout})
    if target in (aten.sum.default, aten.sum.dim_IntList):
        return Decision(REPLICATED, {source: layout}, partial=True)
    if target in (aten.mean.default, aten.mean.dim):

        def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
            return add(aten.div.Tensor, add(target, *args, **kwargs), call.size)

        return Decision(REPLICATED, {source: layout}, partial=True, emit=emit)
    return None
