"""Operators of this project that programs may contain."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.torch_compat.distributed import resolve_group


@torch.library.custom_op("hyper_parallel::shard_slice", mutates_args=())
def shard_slice(full: torch.Tensor, parts: int, group: str) -> torch.Tensor:
    """This rank's slice of a gathered buffer, for ``reshard_after_forward=int``.

    The text of a program must not depend on the rank, so the index is looked up when it runs.

    Args:
        full: gathered buffer; dim 0 is divisible by ``parts``.
        parts: ranks of the smaller group.
        group: alias of the smaller group.

    Returns:
        A copy of slice ``i`` of ``parts`` on dim 0, where ``i`` is this rank's place in the group.
    """
    index = dist.get_rank(resolve_group(group))
    rows = full.size(0) // parts
    return full.narrow(0, index * rows, rows).clone()


@shard_slice.register_fake
def _(full: torch.Tensor, parts: int, group: str) -> torch.Tensor:
    return full.new_empty((full.size(0) // parts, *full.shape[1:]))


@torch.library.custom_op("hyper_parallel::take_chunk", mutates_args=())
def take_chunk(full: torch.Tensor, dim: int, blocks: int, parts: int, group: str) -> torch.Tensor:
    """This rank's part of a tensor that all ranks of a group hold.

    Args:
        full: the tensor; ``blocks * parts`` divides ``full.size(dim)``.
        dim: the dim to cut.
        blocks: how many equal blocks are cut one by one (1: the dim as a whole).
        parts: ranks of the group.
        group: alias of the group.

    Returns:
        A copy of part ``i`` of every block, where ``i`` is this rank's place in the group.
    """
    index = dist.get_rank(resolve_group(group))
    rows = full.size(dim) // (blocks * parts)
    cut = full.unflatten(dim, (blocks, parts, rows)).select(dim + 1, index)
    return cut.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


@take_chunk.register_fake
def _(full: torch.Tensor, dim: int, blocks: int, parts: int, group: str) -> torch.Tensor:
    shape = list(full.shape)
    shape[dim] = shape[dim] // parts
    return full.new_empty(shape)


@torch.library.custom_op("hyper_parallel::local_ids", mutates_args=())
def local_ids(ids: torch.Tensor, rows: int, group: str) -> torch.Tensor:
    """Row numbers of a whole table as row numbers of this rank's part of it.

    Args:
        ids: integers, any shape.
        rows: rows of every rank's part.
        group: alias of the group.

    Returns:
        ``ids - i * rows``, where ``i`` is this rank's place in the group: outside ``[0, rows)`` for rows of others.
    """
    return ids - dist.get_rank(resolve_group(group)) * rows


@local_ids.register_fake
def _(ids: torch.Tensor, rows: int, group: str) -> torch.Tensor:
    return torch.empty_like(ids)
