"""Ranks that used different parameters in one backward: an error with names instead of a hang."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import UnusedParameterError
from hyper_parallel.fully_shard.param import HSDPParam
from hyper_parallel.fully_shard.streams import Streams
from hyper_parallel.groups import GroupInfo

__all__ = ["check_label", "check_missing", "label_of", "moves_data"]

_LABEL_BITS = 16
# bfloat16 rounds large counts.
_ALL_RANKS = 1 - 2**-7


def moves_data(info: GroupInfo) -> bool:
    """Tells whether collectives of a group really run: those of the fake backend do not."""
    return info.group is not None and dist.get_backend(info.group) != "fake"


def label_of(params: Sequence[HSDPParam]) -> tuple[bool, ...]:
    """Returns bits that differ, most likely, from those of other parameters."""
    digest = zlib.crc32("\n".join(param.fqn for param in params).encode())
    return tuple(bool(digest >> bit & 1) for bit in range(_LABEL_BITS))


def check_label(
    params: Sequence[HSDPParam], label: Sequence[bool], reduced: Tensor, full_count: float
) -> None:
    """Compares the labels that the ranks put behind their gradients.

    Args:
        params: The parameters that this rank reduces.
        label: Their label.
        reduced: The sum of the labels of all ranks, scaled like the gradients.
        full_count: What a bit is if all ranks set it.

    Raises:
        UnusedParameterError: Some ranks reduced the gradients of other parameters.
    """
    for bit, count in zip(label, reduced.tolist(), strict=True):
        if (count < full_count * _ALL_RANKS) if bit else (count != 0):
            names = ", ".join(param.fqn for param in params)
            raise UnusedParameterError(
                f"this rank, {params[0].rank}, reduced the gradients of {names} while other ranks "
                f"reduced those of other parameters; use the same units in the same order on all "
                f"ranks, or call set_reduce_scatter_unused_params(True) on those that only some "
                f"ranks use"
            )


def check_missing(
    params: Sequence[HSDPParam],
    missing_here: Sequence[bool],
    counts: Tensor,
    full_count: float,
    fill: bool,
    streams: Streams,
) -> tuple[list[bool], Callable[[bool], bool] | None]:
    """Compares which ranks had gradients.

    Reading the counts makes the host wait for an accelerator, so there a rank that has all its
    gradients reads them later, when they have arrived by themselves.

    Args:
        params: The parameters of a bucket.
        missing_here: Which of them got no gradient on this rank.
        counts: How many ranks got none, a parameter, scaled like the gradients.
        full_count: The count if no rank got one.
        fill: Whether a missing gradient counts as zero.
        streams: The streams of the model.

    Returns:
        Which parameters get no gradient, and a check to run later (given whether to wait, it tells
        whether it is settled) or None.

    Raises:
        UnusedParameterError: Some ranks have a gradient and others do not.
    """
    if streams.real and not any(missing_here):
        if fill:
            return [False] * len(params), None
        host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        host.copy_(counts, non_blocking=True)
        event = streams.event()

        def check(wait: bool) -> bool:
            if not wait and not event.query():
                return False
            event.synchronize()
            _compare(params, missing_here, host.tolist(), full_count, fill)
            return True

        return [False] * len(params), check
    return _compare(params, missing_here, counts.tolist(), full_count, fill), None


def _compare(
    params: Sequence[HSDPParam],
    missing_here: Sequence[bool],
    counts: Sequence[float],
    full_count: float,
    fill: bool,
) -> list[bool]:
    unused, differ = [], []
    for param, here, count in zip(params, missing_here, counts, strict=True):
        everywhere = here and count >= full_count * _ALL_RANKS
        unused.append(everywhere)
        if count != 0 and not everywhere:
            differ.append((param, here, count))
    if differ and not fill:
        param, here, count = differ[0]
        ranks = param.sharded_group_info.rank_size * param.unsharded_group_info.rank_size
        lack = max(1, round(count / full_count * ranks))
        others = f", and {len(differ) - 1} more parameters" if len(differ) > 1 else ""
        raise UnusedParameterError(
            f"{param.fqn}{others}: {lack} of {ranks} ranks got no gradient in this backward (this "
            f"rank, {param.rank}, {'did not' if here else 'did'}); use the same parameters on all "
            f"ranks, or call set_reduce_scatter_unused_params(True) to count missing gradients as "
            f"zero"
        )
    return unused
