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
