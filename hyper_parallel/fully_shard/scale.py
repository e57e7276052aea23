"""What a reduced gradient is divided by, and when.

The default mean divides after each collective by the size of its group, which is what an AVG
reduction does where the backend has one (Gloo has none) and gives the same bits. float16 is divided
in part before the sum, because a sum of large gradients may overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.groups import GroupInfo

__all__ = ["Scale"]


@dataclass(frozen=True)
class Scale:
    """Divisors around the collectives, and the reduce ops.

    Attributes:
        before: Divide by this before the first collective.
        after_scatter: Divide by this after the reduce-scatter.
        at_end: Divide by this at the end.
        scatter_op: Op of the reduce-scatter.
        reduce_op: Op of the all-reduce.
    """

    before: float = 1.0
    after_scatter: float = 1.0
    at_end: float = 1.0
    scatter_op: Any = dist.ReduceOp.SUM
    reduce_op: Any = dist.ReduceOp.SUM

    @classmethod
    def of(
        cls,
        sharded: GroupInfo,
        unsharded: GroupInfo,
        batch_ranks: int,
        dtype: torch.dtype,
        *,
        mean: bool,
        factor: float | None,
        sum_only: bool,
    ) -> Scale:
        """Chooses the divisors.

        Args:
            sharded: Group of the reduce-scatter.
            unsharded: Group of the all-reduce.
            batch_ranks: Ranks whose data the mean is taken over.
            dtype: The reduce dtype.
            mean: Whether to take the mean; else the sum.
            factor: Divide by this instead.
            sum_only: Only ever use SUM collectives.
        """
        if not mean and factor is None:
            return cls()
        # Ranks along a dim that EP cuts are averaged too, but never reduced over.
        rest = batch_ranks / (sharded.rank_size * unsharded.rank_size)
        if dtype not in (torch.float32, torch.float64, torch.bfloat16):
            total = float(batch_ranks) if factor is None else float(factor)
            before = 1
            while total % before == 0 and total / before > before:
                before *= 2
            return cls(before=float(before), at_end=total / before)
        if factor is not None:
            return cls(at_end=float(factor))
        scatter_avg = not sum_only and _has_avg(sharded)
        reduce_avg = not sum_only and _has_avg(unsharded)
        return cls(
            after_scatter=1.0 if scatter_avg else float(sharded.rank_size),
            at_end=rest * (1.0 if reduce_avg else unsharded.rank_size),
            scatter_op=dist.ReduceOp.AVG if scatter_avg else dist.ReduceOp.SUM,
            reduce_op=dist.ReduceOp.AVG if reduce_avg else dist.ReduceOp.SUM,
        )


def _has_avg(info: GroupInfo) -> bool:
    return info.group is not None and "nccl" in dist.get_backend(info.group)
