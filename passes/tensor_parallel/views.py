"""Layout rules of operators that only rename, cut or join elements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.base import aten, hint
from passes.tensor_parallel.layout import Layout, sharded
from passes.tensor_parallel.rule import Call, Decision, Emit, Rule, listed, rule, shape_of
from passes.tensor_parallel.shapes import groups_of, same_size


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
        return _equal_parts(call, first, out[first])
    return None


def _equal_parts(call: Call, dim: int, length: Any) -> Layout | None:
    if call.divides(length):
        return sharded(dim)
    call.refuse(f"{hint(length)} rows (heads?) do not divide over {call.size} ranks")
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
        return _equal_parts(call, real_out[1], out[real_out[1]])
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
    source = [d % rank for d in listed(call.argument("source"))]
    destination = [d % rank for d in listed(call.argument("destination"))]
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
        dims = {d % len(shape) for d in listed(call.argument("dim"))} - {layout.dim}
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


@rule(
    aten.split.Tensor,
    aten.split.default,
    aten.chunk.default,
    aten.split_with_sizes.default,
    aten.split.sizes,
)
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
