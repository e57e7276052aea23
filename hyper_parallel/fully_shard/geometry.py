"""How one parameter lies on the wire: rows first, every rank's part padded to the longest.

A fused collective carries each parameter as ``[ranks, padded_rows, rest]``, flattened. When the
rows are cut on dim 0 and only the last ranks hold fewer of them, the gathered wire *is* the
parameter followed by padding, and no copy is needed::

    10 rows over 4 ranks (3, 3, 3, 1)     wire 0 1 2 | 3 4 5 | 6 7 8 | 9 - -     prefix
    10 rows over 2×2     (3, 2, 3, 2)     wire 0 1 2 | 3 4 - | 5 6 7 | 8 9 -     not a prefix
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hyper_parallel.placement import shard_lengths

__all__ = ["ShardGeometry"]


@dataclass(frozen=True)
class ShardGeometry:
    """One cut of an unsharded local tensor into the parts of a group.

    Attributes:
        full_shape: Shape of the unsharded local tensor (after TP and EP).
        dim: The dim that is cut.
        lengths: Rows of each rank of the group.
        index: This rank's place in the group.
    """

    full_shape: tuple[int, ...]
    dim: int
    lengths: tuple[int, ...]
    index: int

    @cached_property
    def ranks(self) -> int:
        """The number of ranks in the group."""
        return len(self.lengths)

    @cached_property
    def padded_rows(self) -> int:
        """Rows of the longest part."""
        return max(self.lengths)

    @cached_property
    def rest(self) -> tuple[int, ...]:
        """The shape of one row."""
        return (*self.full_shape[: self.dim], *self.full_shape[self.dim + 1 :])

    @cached_property
    def full_numel(self) -> int:
        """Elements of the unsharded local tensor."""
        return math.prod(self.full_shape)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        rows = self.lengths[self.index]
        return (*self.full_shape[: self.dim], rows, *self.full_shape[self.dim + 1 :])

    @cached_property
    def local_numel(self) -> int:
        """Elements of this rank's part."""
        return math.prod(self.local_shape)

    @cached_property
    def wire_numel(self) -> int:
        """Elements that each rank puts on the wire, padding included."""
        return self.padded_rows * math.prod(self.rest)

    @cached_property
    def is_prefix(self) -> bool:
        """Whether the gathered wire starts with the whole tensor, in order."""
        starts = [sum(self.lengths[:rank]) for rank in range(self.ranks)]
        return self.dim == 0 and all(
            start == rank * self.padded_rows
            for rank, (start, rows) in enumerate(zip(starts, self.lengths, strict=True))
            if rows
        )

    @cached_property
    def is_chunked(self) -> bool:
        """Whether the cut is the one of a single ``torch.chunk`` on dim 0."""
        return self.dim == 0 and self.lengths == shard_lengths(self.full_shape[0], (self.ranks,))

    def take(self, full: Tensor) -> Tensor:
        """Returns this rank's part of a full tensor, as a view."""
        return full.narrow(self.dim, sum(self.lengths[: self.index]), self.lengths[self.index])

    def copies_in(self, local: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the (target, source) of the copy that puts this rank's part into its slot.

        Args:
            local: This rank's part.
            slot: ``wire_numel`` elements of the buffer to send.
        """
        if self.dim == 0 and local.is_contiguous():
            return slot[: self.local_numel], local.view(-1)
        rows = slot.view(self.padded_rows, *self.rest)[: self.lengths[self.index]]
        return rows, local.movedim(self.dim, 0)

    def copy_out(self, gathered: Tensor, output: Tensor) -> None:
        """Puts a gathered wire into a flat output that starts with the full tensor.

        Args:
            gathered: Shape ``[ranks, wire_numel]``, any row stride.
            output: At least ``full_numel`` elements.
        """
        if self.is_prefix and output.numel() >= self.ranks * self.wire_numel:
            output[: self.ranks * self.wire_numel].view(self.ranks, -1).copy_(gathered)
            return
        full = output[: self.full_numel].view(self.full_shape).movedim(self.dim, 0)
        wire = gathered.view(self.ranks, self.padded_rows, *self.rest)
        if all(rows == self.padded_rows for rows in self.lengths):
            full.unflatten(0, (self.ranks, self.padded_rows)).copy_(wire)
            return
        start = 0
        for rank, rows in enumerate(self.lengths):
            if rows:
                full[start : start + rows].copy_(wire[rank, :rows])
            start += rows

    def gradient_wire(self, grad: Tensor) -> Tensor:
        """Returns a full gradient such that chunking it on dim 0 gives every rank its part."""
        if self.is_chunked:
            return grad
        rows_first = grad.movedim(self.dim, 0)
        if all(rows == self.padded_rows for rows in self.lengths):
            return rows_first.contiguous()
        wire = torch.zeros(
            (self.ranks, self.padded_rows, *self.rest), dtype=grad.dtype, device=grad.device
        )
        start = 0
        for rank, rows in enumerate(self.lengths):
            wire[rank, :rows].copy_(rows_first[start : start + rows])
            start += rows
        return wire.flatten(0, 1)

    def local_of_wire(self, wire: Tensor) -> Tensor:
        """Returns this rank's part of what a reduce-scatter left: a view where dim 0 is cut."""
        if self.dim == 0:
            return wire[: self.local_numel].view(self.local_shape)
        rows = wire.view(self.padded_rows, *self.rest)[: self.lengths[self.index]]
        return rows.movedim(0, self.dim).contiguous()

    @classmethod
    def even(cls, full_shape: Sequence[int], dim: int, ranks: int, index: int) -> ShardGeometry:
        """Cuts as one ``torch.chunk`` does."""
        return cls(tuple(full_shape), dim, shard_lengths(full_shape[dim], (ranks,)), index)
