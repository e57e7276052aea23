"""Sizes, numbers or symbols, compared without adding a guard to the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from passes.base import hint


def expression(size: Any) -> Any:
    """A size as a number or a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def same_size(size: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal."""
    return bool(expression(size) == expression(other))


class _Side:
    """One of the two shapes while its dims are taken one by one."""

    def __init__(self, shape: Sequence[Any]) -> None:
        self.shape = shape
        self.next = 0
        self.start()

    def start(self) -> None:
        """Begins a group."""
        self.dims: list[int] = []
        self.product: Any = 1
        self.hint = 1

    @property
    def left(self) -> bool:
        """Whether there are more dims."""
        return self.next < len(self.shape)

    def take(self) -> None:
        """Takes the next dim into the group."""
        size = self.shape[self.next]
        self.dims.append(self.next)
        self.product = self.product * expression(size)
        self.hint *= hint(size)
        self.next += 1


def groups_of(
    old: Sequence[Any], new: Sequence[Any]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """The smallest groups of neighbouring dims of a view that hold the same elements.

    Args:
        old: shape before.
        new: shape after.

    Returns:
        Pairs of old and new dims, or None when they cannot be told.

    Example:
        >>> groups_of((2, 3, 8), (6, 4, 2))
        [((0, 1), (0,)), ((2,), (1, 2))]
    """
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    before, after = _Side(old), _Side(new)
    while before.left or after.left:
        for side in (before, after):
            side.start()
            if side.left:
                side.take()
        while before.product != after.product:
            shorter = before if before.hint < after.hint else after
            longer = after if shorter is before else before
            if not shorter.left and not longer.left:
                return None
            (shorter if shorter.left else longer).take()
        groups.append((tuple(before.dims), tuple(after.dims)))
    return groups
