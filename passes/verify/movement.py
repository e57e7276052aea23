"""What data-movement operators do to a :class:`Pack`; anything else ends the walk."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from passes.base import aten, convert
from passes.origin import COPIES
from passes.verify.packing import Pack, concat, pad, whole
from passes.verify.sources import Cast, Scale

Packs = Pack | tuple[Pack, ...]
Get = Callable[[fx.Node], Any]


def _same(get: Get, x: fx.Node, *_: Any, **__: Any) -> Packs:
    return get(x)  # type: ignore[no-any-return]


def _reshape(get: Get, x: fx.Node, shape: Any, **_: Any) -> Packs:
    return get(x).reshape(shape)  # type: ignore[no-any-return]


def _unsqueeze(get: Get, x: fx.Node, dim: int) -> Packs:
    pack = get(x)
    shape = list(pack.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return pack.reshape(shape)  # type: ignore[no-any-return]


def _squeeze(get: Get, x: fx.Node, dims: Any) -> Packs:
    pack = get(x)
    chosen = {d % len(pack.shape) for d in ((dims,) if isinstance(dims, int) else dims)}
    return pack.reshape([s for d, s in enumerate(pack.shape) if d not in chosen or s != 1])  # type: ignore[no-any-return]


def _cat(get: Get, tensors: Any, dim: int = 0) -> Packs:
    return concat([get(t) for t in tensors], dim)


def _split(get: Get, x: fx.Node, size: int, dim: int = 0) -> Packs:
    pack = get(x)
    total = pack.shape[dim]
    return tuple(pack.slice(dim, at, at + size) for at in range(0, max(total, 1), size))


def _split_with_sizes(get: Get, x: fx.Node, sizes: Any, dim: int = 0) -> Packs:
    pack, at, parts = get(x), 0, []
    if sum(sizes) != pack.shape[dim]:
        raise ValueError(f"sizes {list(sizes)} do not add up to {pack.shape[dim]}")
    for size in sizes:
        parts.append(pack.slice(dim, at, at + size))
        at += size
    return tuple(parts)


def _slice(
    get: Get, x: fx.Node, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Packs:
    if step != 1:
        raise ValueError("slice with a step")
    pack = get(x)
    size = pack.shape[dim]
    start = 0 if start is None else start + size if start < 0 else start
    stop = size if stop is None else stop + size if stop < 0 else stop
    return pack.slice(dim, start, stop)  # type: ignore[no-any-return]


def _narrow(get: Get, x: fx.Node, dim: int, start: int, length: int) -> Packs:
    return get(x).slice(dim, start, start + length)  # type: ignore[no-any-return]


def _select(get: Get, x: fx.Node, dim: int, index: int) -> Packs:
    pack = get(x)
    dim %= len(pack.shape)
    index = index + pack.shape[dim] if index < 0 else index
    shape = [s for d, s in enumerate(pack.shape) if d != dim]
    return pack.slice(dim, index, index + 1).reshape(shape)  # type: ignore[no-any-return]


def _pad(get: Get, x: fx.Node, pads: Any, value: float = 0) -> Packs:
    if value != 0:
        raise ValueError(f"padding with {value}")
    return pad(get(x), pads)


def _getitem(get: Get, x: fx.Node, index: int) -> Packs:
    return get(x)[index]  # type: ignore[no-any-return]


def _convert(get: Get, x: fx.Node, dtype: Any) -> Packs:
    return get(x).map(lambda s: Cast(dtype, s))  # type: ignore[no-any-return]


def _div(get: Get, x: fx.Node, other: Any) -> Packs:
    if not isinstance(other, int | float):
        raise ValueError("division by a tensor")
    return get(x).map(lambda s: Scale(float(other), s))  # type: ignore[no-any-return]


def _mul(get: Get, x: fx.Node, other: Any) -> Packs:
    if not isinstance(other, int | float) or other == 0:
        raise ValueError("multiplication by a tensor")
    return get(x).map(lambda s: Scale(1.0 / other, s))  # type: ignore[no-any-return]


def _zeros(get: Get, *args: Any, **_: Any) -> Packs:
    shape = args[0]
    return whole(None, shape)


#: Operators that move, cast or scale elements and never mix two.
MOVES: Mapping[Any, Callable[..., Packs]] = {
    **dict.fromkeys(COPIES, _same),
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.constant_pad_nd.default: _pad,
    operator.getitem: _getitem,
    convert: _convert,
    aten.div.Tensor: _div,
    aten.mul.Tensor: _mul,
    aten.zeros.default: _zeros,
}


def move(node: fx.Node, get: Get) -> Packs:
    """The pack (or packs) that a data-movement operator makes.

    Args:
        node: a node whose target is in :data:`MOVES`.
        get: packs of its inputs.

    Raises:
        ValueError: the operator does more than move elements here.
    """
    return MOVES[node.target](get, *node.args, **node.kwargs)


def static_shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a node's value if all sizes are numbers."""
    shape = getattr(node.meta.get("val"), "shape", None)
    if shape is None or not all(isinstance(s, int) for s in shape):
        return None
    return tuple(shape)


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
