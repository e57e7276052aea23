"""Comparing two packs element by element, looking through what was done to all elements alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from passes.verify.packing import Column, Grid, Pack, Run
from passes.verify.sources import WRAPPERS, Cast, Scale


class Mismatch(Exception):
    """Two packs differ: at a flat position, with what is there and what should be."""

    def __init__(self, position: int, found: Any, expected: Any) -> None:
        super().__init__(f"element {position}")
        self.position, self.found, self.expected = position, found, expected


def match(actual: Pack, expected: Pack) -> tuple[Any, ...]:
    """Compares element by element, looking through casts, scales and all-reduces on the actual side.

    Returns:
        The wrappers that every element of ``actual`` has on top of ``expected``, innermost first.

    Raises:
        Mismatch: an element is another one, or the wrappers are not the same everywhere.
    """
    chain: tuple[Any, ...] | None = None
    if actual.numel != expected.numel:
        raise Mismatch(min(actual.numel, expected.numel), None, None)
    position = 0
    for found, wanted in _side_by_side(actual, expected):
        if (found.source is None) != (wanted.source is None):
            raise Mismatch(position, found, wanted)
        if found.source is not None:
            added = peel(found.source, wanted.source)
            if added is None or found.offset != wanted.offset or found.stride != wanted.stride:
                raise Mismatch(position, found, wanted)
            if chain is not None and not _same_chain(added, chain):
                raise Mismatch(position, found, wanted)
            chain = added
        position += found.length
    return chain or ()


def peel(source: Any, bottom: Any) -> tuple[Any, ...] | None:
    """The wrappers of ``source`` on top of ``bottom``, innermost first; None if they do not lead there."""
    layers: list[Any] = []
    while source != bottom:
        if not isinstance(source, WRAPPERS):
            return None
        layers.append(source)
        source = source.of
    return tuple(reversed(layers))


def _same_chain(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    def key(layer: Any) -> tuple[Any, ...]:
        if isinstance(layer, Cast):
            return ("cast", layer.dtype)
        if isinstance(layer, Scale):
            return ("scale", layer.divisor)
        return ("reduced", layer.axes, layer.op)

    return [key(a) for a in left] == [key(b) for b in right]


def _side_by_side(actual: Pack, expected: Pack) -> Iterator[tuple[Column, Column]]:
    """Pairs of equally long runs; grids of the same shape are compared once, not row by row."""
    if len(actual.items) == len(expected.items):
        pairs = list(zip(actual.items, expected.items, strict=True))
        if all(_alike(a, b) for a, b in pairs):
            for a, b in pairs:
                if isinstance(a, Grid) and isinstance(b, Grid):
                    yield from _zip_runs(iter(a.columns), iter(b.columns))
                else:
                    yield from _zip_runs(_flat([a]), _flat([b]))
            return
    yield from _zip_runs(_flat(actual.items), _flat(expected.items))


def _alike(a: Run | Grid, b: Run | Grid) -> bool:
    if isinstance(a, Grid) and isinstance(b, Grid):
        return a.rows == b.rows and a.width == b.width
    return isinstance(a, Run) and isinstance(b, Run) and a.length == b.length


def _flat(items: Sequence[Run | Grid]) -> Iterator[Column]:
    for item in items:
        rows = (item.row(r) for r in range(item.rows)) if isinstance(item, Grid) else ((item,),)
        for runs in rows:
            for run in runs:
                yield Column(run.source, run.offset, 0, run.length)


def _zip_runs(left: Iterator[Column], right: Iterator[Column]) -> Iterator[tuple[Column, Column]]:
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        size = min(a.length, b.length)
        yield Column(a.source, a.offset, a.stride, size), Column(b.source, b.offset, b.stride, size)
        a = _rest(a, size) or next(left, None)
        b = _rest(b, size) or next(right, None)


def _rest(column: Column, size: int) -> Column | None:
    if column.length == size:
        return None
    offset = column.offset + size if column.source else 0
    return Column(column.source, offset, column.stride, column.length - size)
