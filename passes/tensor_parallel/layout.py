"""How a value lies on the ranks of the tensor-parallel dim, in types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Where the elements of one value are.

    ======================  ===========================================================================
    ``Layout()``            *replicated*: every rank holds the same value, and its gradient is the same
    ``Layout(dim=1)``       *sharded*: rank ``i`` holds the ``i``-th part of dim 1
    ``Layout(dim=1, blocks=3)``  *packed*: dim 1 is three equal blocks, rank ``i`` holds part ``i`` of each
    ======================  ===========================================================================

    A *partial* value, of which every rank holds a term, never lives longer than the operator that makes it: it is
    summed at once.

    Attributes:
        dim: the dim that is cut, or None.
        blocks: how many blocks of it are cut one by one.
    """

    dim: int | None = None
    blocks: int = 1

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return self.dim is None

    def at(self, dim: int) -> Layout:
        """The same cut of another dim."""
        return Layout(dim, self.blocks)

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}, {self.blocks} blocks)"


REPLICATED = Layout()


def sharded(dim: int, blocks: int = 1) -> Layout:
    """A value cut on ``dim``."""
    return Layout(dim, blocks)
