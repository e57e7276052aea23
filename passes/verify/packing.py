"""Where every element of a packed buffer comes from, without looking at any number.

A :class:`Pack` lists, in row-major order, runs of elements of *sources*: ``Run(source, offset, length)`` is contiguous,
``Grid(rows, columns)`` repeats a row of runs whose offsets advance by a stride (a cut along an inner dim of a tensor with
8,192 rows is one grid, not 8,192 runs). Reshape leaves the list alone; cat, split, slice and pad cut and join it. So the
cost follows the number of parameters and ranks in a bucket, never the number of elements.

Padding is a run whose source is ``None``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# ------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Run:
    """``length`` consecutive elements of a source; ``source=None`` is padding."""

    source: Any
    offset: int
    length: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.length

    def cut(self, start: int, stop: int) -> Iterator[Run | Grid]:
        """The elements ``start:stop`` of the run."""
        offset = 0 if self.source is None else self.offset + start
        yield Run(self.source, offset, stop - start)


@dataclass(frozen=True)
class Column:
    """A run in every row of a grid, ``stride`` elements of the source further on from row to row."""

    source: Any
    offset: int
    stride: int
    length: int


@dataclass(frozen=True)
class Grid:
    """``rows`` rows of the same columns."""

    rows: int
    columns: tuple[Column, ...]

    @cached_property
    def width(self) -> int:
        """Elements in a row."""
        return sum(c.length for c in self.columns)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.width

    def row(self, index: int) -> Iterator[Run]:
        """The runs of one row."""
        for c in self.columns:
            yield Run(c.source, 0 if c.source is None else c.offset + index * c.stride, c.length)

    def cut(self, start: int, stop: int) -> Iterator[Run | Grid]:
        """The elements ``start:stop`` of the grid: part of a row, whole rows, part of a row."""
        first, head = divmod(start, self.width)
        last, tail = divmod(stop, self.width)
        if head or first == last:
            end = self.width if last > first else tail
            yield from _cut_runs(self.row(first), head, end)
            first += 1
        if last > first:
            moved = (
                Column(c.source, c.offset + first * c.stride if c.source else 0, c.stride, c.length)
                for c in self.columns
            )
            yield Grid(last - first, tuple(moved))
        if tail and last >= first:
            yield from _cut_runs(self.row(last), 0, tail)


def _cut_runs(runs: Iterator[Run], start: int, stop: int) -> Iterator[Run | Grid]:
    position = 0
    for run in runs:
        low, high = max(start, position), min(stop, position + run.length)
        if low < high:
            yield from run.cut(low - position, high - position)
        position += run.length


# ------------------------------------------------------------------ packs


class Pack:
    """The elements of a tensor, by source.

    Args:
        shape: its shape.
        items: runs and grids in row-major order.
    """

    def __init__(self, shape: Sequence[int], items: Sequence[Run | Grid]) -> None:
        self.shape = tuple(shape)
        self.items = _normal(items)
        self.numel = math.prod(self.shape)
        have = sum(item.size for item in self.items)
        if have != self.numel:
            raise ValueError(f"{have} elements do not make shape {list(self.shape)}")

    @cached_property
    def _starts(self) -> list[int]:
        starts, position = [], 0
        for item in self.items:
            starts.append(position)
            position += item.size
        return starts

    def elements(self, start: int, stop: int) -> list[Run | Grid]:
        """The items of the flat elements ``start:stop``."""
        found: list[Run | Grid] = []
        if start >= stop:
            return found
        for index in range(bisect_right(self._starts, start) - 1, len(self.items)):
            begin, item = self._starts[index], self.items[index]
            if begin >= stop:
                break
            found.extend(item.cut(max(start - begin, 0), min(stop - begin, item.size)))
        return found

    def columns(self, rows: int) -> tuple[Column, ...] | None:
        """The pack as one grid of ``rows`` rows, if it is one."""
        if len(self.items) != 1 or rows == 0:
            return None
        (item,) = self.items
        if isinstance(item, Grid):
            return item.columns if item.rows == rows else None
        width = item.length // rows
        return (Column(item.source, item.offset, width if item.source else 0, width),)

    def reshape(self, shape: Sequence[int]) -> Pack:
        """The same elements in another shape, with at most one ``-1``."""
        sizes = list(shape)
        if -1 in sizes:
            rest = math.prod(s for s in sizes if s != -1)
            sizes[sizes.index(-1)] = self.numel // rest if rest else 0
        return Pack(sizes, self.items)

    def slice(self, dim: int, start: int, stop: int) -> Pack:
        """Rows ``start:stop`` of a dim."""
        dim %= len(self.shape)
        start, stop = max(start, 0), min(stop, self.shape[dim])
        stop = max(start, stop)
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        rows, inner = math.prod(self.shape[:dim]), math.prod(self.shape[dim + 1 :])
        if math.prod(shape) == 0:
            return Pack(shape, ())
        return Pack(shape, self._columns_between(rows, start * inner, stop * inner))

    def _columns_between(self, rows: int, low: int, high: int) -> list[Run | Grid]:
        width = self.numel // rows
        columns = self.columns(rows) if rows > 1 else None
        if columns is None:
            return [
                item
                for row in range(rows)
                for item in self.elements(row * width + low, row * width + high)
            ]
        kept, position = [], 0
        for c in columns:
            a, b = max(low, position), min(high, position + c.length)
            if a < b:
                offset = c.offset + a - position if c.source else 0
                kept.append(Column(c.source, offset, c.stride, b - a))
            position += c.length
        return [Grid(rows, tuple(kept))]

    def map(self, change: Callable[[Any], Any]) -> Pack:
        """The same elements of other sources; padding stays padding."""
        memo: dict[int, Any] = {}

        def to(source: Any) -> Any:
            if source is None:
                return None
            if id(source) not in memo:
                memo[id(source)] = change(source)
            return memo[id(source)]

        items: list[Run | Grid] = []
        for item in self.items:
            if isinstance(item, Run):
                items.append(Run(to(item.source), item.offset, item.length))
            else:
                columns = (Column(to(c.source), c.offset, c.stride, c.length) for c in item.columns)
                items.append(Grid(item.rows, tuple(columns)))
        return Pack(self.shape, items)

    def sources(self) -> dict[Any, None]:
        """The sources in order of appearance, padding left out."""
        found: dict[Any, None] = {}
        for item in self.items:
            for part in item.columns if isinstance(item, Grid) else (item,):
                if part.source is not None:
                    found[part.source] = None
        return found


def whole(source: Any, shape: Sequence[int]) -> Pack:
    """All elements of one source in order."""
    numel = math.prod(shape)
    return Pack(shape, [Run(source, 0, numel)] if numel else ())


def concat(packs: Sequence[Pack], dim: int) -> Pack:
    """``torch.cat``; empty 1-D tensors are dropped as torch drops them."""
    kept = [p for p in packs if p.shape != (0,)] or list(packs[:1])
    dim %= max(len(kept[0].shape), 1)
    first = kept[0].shape
    shape = (*first[:dim], sum(p.shape[dim] for p in kept), *first[dim + 1 :])
    rows = math.prod(first[:dim])
    kept = [p for p in kept if p.numel]
    if rows == 1:
        return Pack(shape, [item for p in kept for item in p.items])
    columns = [p.columns(rows) for p in kept]
    if kept and all(c is not None for c in columns):
        return Pack(shape, [Grid(rows, tuple(c for part in columns for c in part or ()))])
    items: list[Run | Grid] = []
    for row in range(rows):
        for p in kept:
            width = p.numel // rows
            items.extend(p.elements(row * width, (row + 1) * width))
    return Pack(shape, items)


def pad(pack: Pack, pads: Sequence[int]) -> Pack:
    """``constant_pad_nd``: pairs of ``(before, after)`` from the last dim on."""
    for position in range(len(pads) // 2):
        dim = len(pack.shape) - 1 - position
        for amount, after in ((pads[2 * position], False), (pads[2 * position + 1], True)):
            if amount < 0:
                size = pack.shape[dim]
                pack = (
                    pack.slice(dim, 0, size + amount) if after else pack.slice(dim, -amount, size)
                )
            elif amount > 0:
                shape = (*pack.shape[:dim], amount, *pack.shape[dim + 1 :])
                extra = whole(None, shape)
                pack = concat([pack, extra] if after else [extra, pack], dim)
    return pack


def _normal(items: Sequence[Run | Grid]) -> tuple[Run | Grid, ...]:
    """Neighbouring runs that continue each other become one; a grid that is contiguous becomes a run."""
    result: list[Run | Grid] = []
    for item in items:
        if isinstance(item, Grid):
            item = _simpler(item)
        if item.size == 0:
            continue
        last = result[-1] if result else None
        if isinstance(item, Run) and isinstance(last, Run) and _follows(last, item):
            result[-1] = Run(last.source, last.offset, last.length + item.length)
            continue
        if isinstance(item, Grid) and item.rows == 1:
            result.extend(item.row(0))
        else:
            result.append(item)
    return tuple(result)


def _follows(last: Run, item: Run) -> bool:
    if last.source != item.source:
        return False
    return item.source is None or last.offset + last.length == item.offset


def _simpler(grid: Grid) -> Run | Grid:
    merged: list[Column] = []
    for c in grid.columns:
        if c.length == 0:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.source == c.source:
            follows = last.offset + last.length == c.offset and last.stride == c.stride
            if c.source is None or follows:
                merged[-1] = Column(last.source, last.offset, last.stride, last.length + c.length)
                continue
        merged.append(c)
    if len(merged) == 1:
        (only,) = merged
        if only.source is None or only.stride == only.length or grid.rows == 1:
            return Run(only.source, only.offset, only.length * grid.rows)
    return Grid(grid.rows, tuple(merged))
