"""What each operator does to layouts: which layout it wants of its inputs, and which it gives its output.

A rule looks at one call of the exported forward, whose shapes are those of one device, and answers with a
:class:`Decision`, or with None where the operator cannot run on parts. Then its inputs are gathered, it runs as on one
device, and the plan says so: a missing rule costs a collective and is never wrong.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.base import aten
from passes.tensor_parallel import functional
from passes.tensor_parallel.layout import REPLICATED, Layout, sharded
from passes.tensor_parallel.shapes import groups_of, same_size

#: Emits a call in the local program and returns its node.
Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class Call:
    """One operator call of the single-device forward.

    Attributes:
        node: the call.
        layouts: layout of every tensor that it reads.
        size: ranks of the tensor-parallel dim.
        group: alias of their group.
        is_param: whether a node is a parameter, or a view or cast of one.
    """

    node: fx.Node
    layouts: Mapping[fx.Node, Layout]
    size: int
    group: str
    is_param: Callable[[fx.Node], bool]

    def argument(self, name: str) -> Any:
        """An argument by its name in the operator's schema."""
        schema = self.node.target._schema  # type: ignore[union-attr]
        for position, argument in enumerate(schema.arguments):
            if argument.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                return self.node.kwargs.get(name, argument.default_value)
        raise KeyError(f"{self.node.target} has no argument {name!r}")

    def layout(self, node: fx.Node) -> Layout:
        """Layout of an input."""
        return self.layouts[node]

    @property
    def out_shape(self) -> tuple[Any, ...]:
        """Shape of the output on one device."""
        return shape_of(self.node)

    def divides(self, length: Any, blocks: int = 1) -> bool:
        """Whether the ranks can hold equal parts of so many rows."""
        return isinstance(length, torch.SymInt) or length % (self.size * blocks) == 0


@dataclass(frozen=True)
class Decision:
    """How an operator runs on parts.

    Attributes:
        output: layout of its output, or one a tensor of a list.
        inputs: layout that it needs of each input; replicated where nothing is said.
        partial: its output is a term of a sum.
        emit: makes the local call from the local arguments, when it is not the same call: ``emit(add, args, kwargs)``,
            where ``add(target, *args, **kwargs)`` makes a node.
        after: what is added to the sum of a partial output: the arguments of ``aten.add.Tensor`` after the first.
    """

    output: Layout | tuple[Layout, ...]
    inputs: Mapping[fx.Node, Layout] = field(default_factory=dict)
    partial: bool = False
    emit: Callable[..., fx.Node] | None = None
    after: tuple[fx.Node, ...] = ()


Rule = Callable[[Call], Decision | None]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return add


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Shape of a tensor on one device."""
    return tuple(node.meta["val"].shape)


def decide(call: Call) -> Decision | None:
    """How a call whose inputs are not all replicated runs on parts; None if it cannot."""
    target = call.node.target
    found = RULES.get(target)
    if found is None:
        tags = getattr(target, "tags", ())
        if torch.Tag.pointwise in tags or target in _ALIKE:
            found = pointwise
    return None if found is None else found(call)


# ------------------------------------------------------------------ element by element

#: Operators without the tag that work element by element, or keep every element where it is.
_ALIKE = frozenset(
    getattr(packet, overload)
    for packet in (
        aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.detach, aten.alias, aten.type_as,
        aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.masked_fill,
        aten.masked_fill_, aten.where, aten.silu, aten.gelu, aten.relu, aten.sigmoid, aten.tanh,
        aten.softplus, aten.mish, aten.hardswish, aten.hardtanh, aten.leaky_relu, aten.elu, aten.selu,
        aten.celu, aten.relu6, aten.log_sigmoid, aten.copy_, aten.copy, aten.rsub, aten.square, aten.float_power,
        aten.nan_to_num, aten.clamp, aten.clip, aten.__and__, aten.__or__, aten.__xor__, aten.logical_not,
        aten.true_divide, aten.divide, aten.multiply, aten.subtract, aten.negative, aten.expand_as,
    )
    for overload in packet.overloads()
)  # fmt: skip


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
    return Decision(REPLICATED, dict(call.layouts))


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


def _list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


_one_dim = _along(lambda call: [call.argument("dim")])
rule(
    aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.cumsum.default,
    aten.cumprod.default, aten.logcumsumexp.default,
)(_one_dim)  # fmt: skip
rule(aten.triu.default, aten.tril.default)(_along(lambda call: [-1, -2]))
rule(aten.flip.default)(_along(lambda call: call.argument("dims")))
rule(aten.roll.default)(
    _along(
        lambda call: call.argument("dims") or range(len(shape_of(call.argument("self"))))
    )
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
    dims = {d % rank for d in _list(given)} if given not in (None, [], ()) else set(range(rank))
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


# ------------------------------------------------------------------ views


def _localised(sizes: Sequence[Any], dim: int, call: Call, add: Emit, start: int = 0) -> list[Any]:
    """The sizes of a local view, from those of one device.

    Args:
        sizes: sizes for dims ``start`` and following of the output, -1 for one to be inferred.
        dim: dim of the output that is cut.
        call: the call.
        add: emits nodes.
        start: first dim that ``sizes`` is about.
    """
    known = call.out_shape[start:]
    # Left to be inferred, a number could come out as a symbolic quotient.
    local = [k if s == -1 and isinstance(k, int) else s for s, k in zip(sizes, known, strict=False)]
    entry = local[dim - start]
    if isinstance(entry, fx.Node):
        local[dim - start] = add(operator.floordiv, entry, call.size)
    elif entry != -1:
        local[dim - start] = entry // call.size
    return local


def _view_output(call: Call, source: fx.Node, out: Sequence[Any]) -> Layout | None:
    """Layout of a reshaped value, or None where its parts are no parts of the result."""
    layout = call.layout(source)
    assert layout.dim is not None
    shape = shape_of(source)
    for inside, outside in groups_of(shape, out) or ():
        if layout.dim not in inside:
            continue
        real_in = [d for d in inside if not same_size(shape[d], 1)]
        real_out = [d for d in outside if not same_size(out[d], 1)]
        if real_in[0] != layout.dim or not real_out:
            return None
        if layout.blocks > 1:
            return _unpacked(call, layout, shape, out, real_in, real_out)
        first = real_out[0]
        return sharded(first) if call.divides(out[first]) else None
    return None


def _unpacked(
    call: Call,
    layout: Layout,
    shape: Sequence[Any],
    out: Sequence[Any],
    real_in: Sequence[int],
    real_out: Sequence[int],
) -> Layout | None:
    """A packed dim is taken apart into blocks and the rest, or left as it is."""
    if len(real_in) == len(real_out) == 1:
        return layout.at(real_out[0])
    if len(real_out) > 1 and same_size(out[real_out[0]], layout.blocks):
        return sharded(real_out[1]) if call.divides(out[real_out[1]]) else None
    return None


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(call: Call) -> Decision | None:
    source = call.node.args[0]
    assert isinstance(source, fx.Node)
    output = _view_output(call, source, call.out_shape)
    if output is None or output.dim is None:
        return None
    dim = output.dim

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        return add(call.node.target, args[0], _localised(args[1], dim, call, add))

    return Decision(output, {source: call.layout(source)}, emit=emit)


@rule(aten.unflatten.int)
def _unflatten(call: Call) -> Decision | None:
    source = call.argument("self")
    start = call.argument("dim") % len(shape_of(source))
    output = _view_output(call, source, call.out_shape)
    if output is None or output.dim is None:
        return None
    inside = output.dim - start
    count = len(call.argument("sizes"))

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        sizes = args[2]
        if 0 <= inside < count:
            sizes = _localised(sizes, inside + start, call, add, start)
        return add(call.node.target, args[0], args[1], sizes)

    return Decision(output, {source: call.layout(source)}, emit=emit)


@rule(aten.flatten.using_ints)
def _flatten(call: Call) -> Decision | None:
    source = call.argument("self")
    output = _view_output(call, source, call.out_shape)
    return None if output is None else Decision(output, {source: call.layout(source)})


@rule(aten.expand.default, aten.broadcast_to.default)
def _expand(call: Call) -> Decision | None:
    source, sizes = call.argument("self"), call.argument("size")
    layout = call.layout(source)
    assert layout.dim is not None
    output = layout.at(layout.dim + len(sizes) - len(shape_of(source)))
    dim: Any = output.dim

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        return add(call.node.target, args[0], _localised(args[1], dim, call, add))

    return Decision(output, {source: layout}, emit=emit)


def _permuted(order: Callable[[Call, int], Sequence[int]]) -> Rule:
    def decide_permuted(call: Call) -> Decision | None:
        source = call.node.args[0]
        assert isinstance(source, fx.Node)
        layout, rank = call.layout(source), len(shape_of(source))
        dims = [d % rank for d in order(call, rank)]
        assert layout.dim is not None
        return Decision(layout.at(dims.index(layout.dim)), {source: layout})

    return decide_permuted


def _swap(call: Call, rank: int) -> Sequence[int]:
    names = [a.name for a in call.node.target._schema.arguments][1:3]  # type: ignore[union-attr]
    first, second = (call.argument(name) % rank for name in names)
    dims = list(range(rank))
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _moved(call: Call, rank: int) -> Sequence[int]:
    source = [d % rank for d in _list(call.argument("source"))]
    destination = [d % rank for d in _list(call.argument("destination"))]
    dims: list[int] = [-1] * rank
    for old, new in zip(source, destination, strict=True):
        dims[new] = old
    rest = iter(d for d in range(rank) if d not in source)
    return [next(rest) if d == -1 else d for d in dims]


rule(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)(_permuted(_swap))
rule(aten.t.default, aten.mT.default, aten.numpy_T.default)(
    _permuted(lambda _, rank: [*range(rank - 2), *reversed(range(max(rank - 2, 0), rank))])
)
rule(aten.permute.default)(_permuted(lambda call, _: call.argument("dims")))
rule(aten.movedim.intlist, aten.movedim.int)(_permuted(_moved))


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Decision | None:
    source = call.argument("self")
    layout = call.layout(source)
    assert layout.dim is not None
    at = call.argument("dim") % (len(shape_of(source)) + 1)
    return Decision(layout.at(layout.dim + (at <= layout.dim)), {source: layout})


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call) -> Decision | None:
    source = call.argument("self")
    layout, shape = call.layout(source), shape_of(source)
    assert layout.dim is not None
    if call.node.target is aten.squeeze.default:
        dims = set(range(len(shape)))
        if shape[layout.dim] == call.size:  # its local part has one row, which must stay
            return None
    else:
        dims = {d % len(shape) for d in _list(call.argument("dim"))} - {layout.dim}
    gone = sum(d < layout.dim and same_size(shape[d], 1) for d in dims)

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        chosen = sorted(d for d in dims if same_size(shape[d], 1))
        return add(aten.squeeze.dims, args[0], chosen)

    return Decision(layout.at(layout.dim - gone), {source: layout}, emit=emit)


@rule(aten.select.int)
def _select(call: Call) -> Decision | None:
    source = call.argument("self")
    layout = call.layout(source)
    dim = call.argument("dim") % len(shape_of(source))
    if layout.dim is None or dim == layout.dim:
        return None
    return Decision(layout.at(layout.dim - (dim < layout.dim)), {source: layout})


@rule(aten.slice.Tensor, aten.narrow.default)
def _slice(call: Call) -> Decision | None:
    source = call.argument("self")
    layout, shape = call.layout(source), shape_of(source)
    dim = call.argument("dim") % len(shape)
    assert layout.dim is not None
    if dim != layout.dim:
        return Decision(layout, {source: layout})
    length = shape[dim]
    if call.node.target is aten.narrow.default:
        start, end, step = call.argument("start"), None, 1
        if not isinstance(start, int) or not isinstance(call.argument("length"), int):
            return None
        end = start + call.argument("length")
    else:
        start, end, step = (call.argument(n) for n in ("start", "end", "step"))
    start = 0 if start is None else start
    if step != 1 or isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    if start == 0 and (end is None or same_size(call.out_shape[dim], length)):

        def emit_whole(add: Emit, args: Any, kwargs: Any) -> fx.Node:
            return add(aten.alias.default, args[0])

        return Decision(layout, {source: layout}, emit=emit_whole)
    return _block_slice(call, source, dim, start, end)


def _block_slice(call: Call, source: fx.Node, dim: int, start: Any, end: Any) -> Decision | None:
    """Some whole blocks of a packed dim."""
    layout, length = call.layout(source), shape_of(source)[dim]
    if layout.blocks == 1 or not isinstance(length, int) or length % layout.blocks:
        return None
    block = length // layout.blocks
    start = start + length if start < 0 else start
    end = length if end is None else min(end + length if end < 0 else end, length)
    if start % block or end % block or end <= start:
        return None

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        return add(aten.slice.Tensor, args[0], dim, start // call.size, end // call.size)

    return Decision(Layout(dim, (end - start) // block), {source: layout}, emit=emit)


@rule(aten.split.Tensor, aten.split.default, aten.chunk.default, aten.split_with_sizes.default, aten.split.sizes)
def _split(call: Call) -> Decision | None:
    source = call.node.args[0]
    assert isinstance(source, fx.Node)
    layout, shape = call.layout(source), shape_of(source)
    dim = call.argument("dim") % len(shape)
    pieces = call.node.meta["val"]
    if dim != layout.dim:
        return Decision((layout,) * len(pieces), {source: layout})
    length = shape[dim]
    if layout.blocks == 1 or not isinstance(length, int):
        return None
    block = length // layout.blocks
    sizes = [piece.shape[dim] for piece in pieces]
    if any(size % block for size in sizes):
        return None

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        local = [size // call.size for size in sizes]
        return add(aten.split_with_sizes.default, args[0], local, dim)

    outputs = tuple(Layout(dim, size // block) for size in sizes)
    return Decision(outputs, {source: layout}, emit=emit)


@rule(aten.unbind.int)
def _unbind(call: Call) -> Decision | None:
    source = call.argument("self")
    layout = call.layout(source)
    dim = call.argument("dim") % len(shape_of(source))
    if layout.dim is None or dim == layout.dim:
        return None
    output = layout.at(layout.dim - (dim < layout.dim))
    return Decision((output,) * len(call.node.meta["val"]), {source: layout})


@rule(aten.cat.default, aten.stack.default, aten.concat.default)
def _cat(call: Call) -> Decision | None:
    tensors: Any = call.node.args[0]
    chosen = next(call.layout(t) for t in tensors if not call.layout(t).replicated)
    stacked = call.node.target is aten.stack.default
    rank = len(shape_of(tensors[0]))
    dim = call.argument("dim") % (rank + stacked)
    assert chosen.dim is not None
    if not stacked and dim == chosen.dim:
        return None
    output = chosen.at(chosen.dim + 1) if stacked and dim <= chosen.dim else chosen
    return Decision(output, dict.fromkeys(tensors, chosen))


@rule(aten.repeat.default)
def _repeat(call: Call) -> Decision | None:
    source, repeats = call.argument("self"), call.argument("repeats")
    layout = call.layout(source)
    assert layout.dim is not None
    dim = layout.dim + len(repeats) - len(shape_of(source))
    return None if repeats[dim] != 1 else Decision(layout.at(dim), {source: layout})


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(call: Call) -> Decision | None:
    """Every row of a part is repeated in place, so parts stay parts."""
    source, dim = call.argument("self"), call.argument("dim")
    layout = call.layout(source)
    if dim is None or layout.blocks > 1 or call.argument("output_size") is not None:
        return None
    return Decision(layout, {source: layout})


# ------------------------------------------------------------------ products


def _contract(
    call: Call, operands: Sequence[tuple[fx.Node, str]], out: str
) -> tuple[Layout, bool, dict[fx.Node, Layout]] | None:
    """Layouts of a product whose operands' dims have letters: output, whether it is a term, inputs.

    Parameters stay where they are; activations follow them.
    """
    cut = [(n, s, call.layout(n)) for n, s in operands if not call.layout(n).replicated]
    cut.sort(key=lambda item: not call.is_param(item[0]))
    for node, letters, layout in cut:
        assert layout.dim is not None
        letter = letters[layout.dim]
        others = [(n, s) for n, s in operands if n is not node and letter in s]
        summed = letter not in out
        if summed and not call.is_param(node) and any(call.is_param(n) for n, _ in others):
            continue  # a whole weight is not cut for the sake of an activation
        if layout.blocks > 1 and (summed or others):
            continue
        inputs = {n: REPLICATED for n, _ in operands}
        inputs[node] = layout
        for other, s in others:
            length = shape_of(other)[s.index(letter)]
            if not same_size(length, 1):
                inputs[other] = sharded(s.index(letter))
        output = REPLICATED if summed else layout.at(out.index(letter))
        return output, summed, inputs
    return None


def _letters(rank: int, last: str) -> str:
    """Letters of a batched matrix: batch dims are ``A``, ``B`` … from the right, then ``last``."""
    batch = "ABCDEFGH"[: rank - len(last)]
    return batch[::-1] + last


@rule(aten.linear.default)
def _linear(call: Call) -> Decision | None:
    source, weight, bias = (call.argument(n) for n in ("input", "weight", "bias"))
    rank = len(shape_of(source))
    left, out = _letters(rank, "k"), _letters(rank, "n")
    return _product(call, [(source, left), (weight, "nk")], out, bias)


@rule(aten.addmm.default)
def _addmm(call: Call) -> Decision | None:
    bias, left, right = (call.argument(n) for n in ("self", "mat1", "mat2"))
    if call.argument("beta") != 1 or call.argument("alpha") != 1:
        return None
    return _product(call, [(left, "mk"), (right, "kn")], "mn", bias, bias_first=True)


def _product(
    call: Call,
    operands: Sequence[tuple[fx.Node, str]],
    out: str,
    bias: fx.Node | None,
    bias_first: bool = False,
) -> Decision | None:
    """A product with a bias along its last dim, which is added once: after the sum over the ranks."""
    found = _contract(call, operands, out)
    if found is None:
        return None
    output, partial, inputs = found
    if bias is None:
        return Decision(output, inputs, partial)
    if not partial:
        along = output.dim == len(out) - 1
        inputs[bias] = output.at(len(shape_of(bias)) - 1) if along else REPLICATED
        return Decision(output, inputs)
    plain = aten.mm.default if bias_first else aten.linear.default

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        return add(plain, *(args[1:3] if bias_first else args[:2]))

    return Decision(output, inputs, True, emit, after=(bias,))


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(call: Call) -> Decision | None:
    left, right = call.node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    ranks = len(shape_of(left)), len(shape_of(right))
    if left is right or min(ranks) < 2:
        return None
    operands = [(left, _letters(ranks[0], "mk")), (right, _letters(ranks[1], "kn"))]
    return _product(call, operands, _letters(max(ranks), "mn"), None)


@rule(aten.einsum.default)
def _einsum(call: Call) -> Decision | None:
    equation, tensors = call.node.args[:2]
    assert isinstance(equation, str)
    equation = equation.replace(" ", "")
    if "..." in equation or "->" not in equation or len(set(tensors)) != len(tensors):  # type: ignore[arg-type]
        return None
    sides, out = equation.split("->")
    operands = list(zip(tensors, sides.split(","), strict=True))  # type: ignore[arg-type]
    if any(len(set(letters)) != len(letters) for _, letters in operands):
        return None
    return _product(call, operands, out, None)


@rule(aten.scaled_dot_product_attention.default)
def _attention(call: Call) -> Decision | None:
    """Heads (or batch rows) are computed apart; queries, keys and values are cut alike."""
    query, key, value, mask = (
        call.argument(n) for n in ("query", "key", "value", "attn_mask")
    )
    if len({query, key, value}) < 3:
        return None
    rank = len(shape_of(query))
    cut = [n for n in (query, key, value) if not call.layout(n).replicated]
    if not cut:
        return None
    chosen = call.layout(cut[0])
    if chosen.dim is None or chosen.dim >= rank - 2 or chosen.blocks > 1:
        return None
    if not all(call.divides(shape_of(n)[chosen.dim]) for n in (query, key, value)):
        return None
    inputs = dict.fromkeys((query, key, value), chosen)
    if mask is not None:
        shape = shape_of(mask)
        dim = chosen.dim - (rank - len(shape))
        alone = dim < 0 or same_size(shape[dim], 1)
        inputs[mask] = REPLICATED if alone else sharded(dim)
    p = call.argument("dropout_p")
    if not p:
        return Decision(chosen, inputs)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    order = {a.name: i for i, a in enumerate(call.node.target._schema.arguments)}  # type: ignore[union-attr]

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        given = [
            args[order[n]] if order[n] < len(args) else kwargs.get(n, call.argument(n))
            for n in names
        ]
        return add(functional.dropout_attention, *given, chosen.dim, call.size, call.group)

    return Decision(chosen, inputs, emit=emit)


# ------------------------------------------------------------------ vocabulary


@rule(aten.embedding.default)
def _embedding(call: Call) -> Decision | None:
    weight, ids = call.argument("weight"), call.argument("indices")
    table, rows = call.layout(weight), call.layout(ids)
    rank = len(shape_of(ids))
    if table.dim == 1:
        return Decision(table.at(rank), {weight: table})
    if table.dim == 0:
        if table.blocks > 1 or call.argument("scale_grad_by_freq") or call.argument("sparse"):
            return None
        padding = call.argument("padding_idx")
        padding += shape_of(weight)[0] if -shape_of(weight)[0] <= padding < -1 else 0

        def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
            return add(functional.vocab_embedding, args[0], args[1], padding, call.group)

        return Decision(REPLICATED, {weight: table}, partial=True, emit=emit)
    return Decision(rows, {ids: rows})


@rule(aten.cross_entropy_loss.default)
def _cross_entropy(call: Call) -> Decision | None:
    logits, target = call.argument("self"), call.argument("target")
    layout = call.layout(logits)
    simple = len(shape_of(logits)) == 2 and not target.meta["val"].is_floating_point()
    if layout.dim != 1 or layout.blocks > 1 or not simple or call.argument("weight") is not None:
        return None
    options = [call.argument(n) for n in ("reduction", "ignore_index", "label_smoothing")]

    def emit(add: Emit, args: Any, kwargs: Any) -> fx.Node:
        call_args = (args[0], args[1], *options, call.size, call.group)
        return add(functional.vocab_cross_entropy, *call_args)

    return Decision(REPLICATED, {logits: layout}, emit=emit)


__all__ = ["RULES", "Call", "Decision", "decide", "shape_of"]
