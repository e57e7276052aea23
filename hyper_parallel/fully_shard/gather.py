"""One all-gather for all parameters of a unit: copy in, send, copy out.

The buffer holds ``[ranks, total]``; a rank's row is the padded slices of all parameters one after
another. Slices of one dtype lie side by side; slices of several dtypes, and of dtypes that backends
do not send, share one buffer of bytes, each aligned to its element size. On the CPU a row ends with
the name of the unit, hashed, so that ranks that gather different units at the same time find out
instead of computing with a mixture.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import UnusedParameterError
from hyper_parallel.fully_shard.dtypes import gathers_as_is
from hyper_parallel.fully_shard.param import HSDPParam, ShardedState
from hyper_parallel.fully_shard.streams import Streams
from hyper_parallel.fully_shard.unused import moves_data
from hyper_parallel.groups import GroupInfo
from hyper_parallel.torch_compat.eager import (
    all_gather_flat,
    foreach_copy,
    preserve_version_counter,
)

__all__ = ["AllGather", "PendingGather", "start_all_gather"]

_ALIGNMENT = 16  # bytes; enough for every dtype
_LABEL_BYTES = 16


class AllGather:
    """How a gather is run; ``HSDPModule.set_custom_all_gather`` takes another one."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Runs the all-gather."""
        return all_gather_flat(output_tensor, input_tensor, group, async_op)


@dataclass(frozen=True)
class _Piece:
    """One flat tensor of one parameter in a rank's row; offset in elements of the buffer."""

    param: HSDPParam
    dtype: torch.dtype
    numel: int
    offset: int

    def rows(self, buffer: Tensor) -> Tensor:
        """Returns the piece of every rank: ``[ranks, numel]`` in its own dtype."""
        if buffer.dtype == self.dtype:
            return buffer[:, self.offset : self.offset + self.numel]
        end = self.offset + self.numel * self.dtype.itemsize
        return buffer[:, self.offset : end].view(self.dtype)


@dataclass(frozen=True)
class _Label:
    """The unit that a rank gathers, at the end of its row; offset in elements of the buffer."""

    unit: str
    offset: int
    param: HSDPParam

    @property
    def _hash(self) -> Tensor:
        return torch.full((2,), zlib.crc32(self.unit.encode()), dtype=torch.int64)

    def write(self, row: Tensor) -> None:
        """Puts the label behind the slices of a row."""
        row[self.offset :].copy_(self._hash.view(row.dtype))

    def describe(self) -> str:
        """Names the unit and this rank."""
        return f"{self.unit or '(root)'!r} on rank {self.param.rank}"

    def check(self, buffer: Tensor) -> None:
        """Compares the labels of all ranks.

        Raises:
            UnusedParameterError: Some ranks gathered another unit.
        """
        found = buffer[:, self.offset :].contiguous().view(torch.int64)
        other = (found != self._hash).any(dim=1).nonzero().flatten().tolist()
        if other:
            ranks = [self.param.gather_ranks[index] for index in other]
            raise UnusedParameterError(
                f"unit {self.describe()} was gathered while ranks {ranks} gathered another one; "
                f"run the same units in the same order on all ranks, or make them one unit (or set "
                f"reshard_after_forward=False, if all ranks run them in forward) and call "
                f"set_reduce_scatter_unused_params(True)"
            )


class PendingGather:
    """An all-gather that was started; :meth:`finish` puts its results into the parameters."""

    def __init__(
        self,
        pieces: list[_Piece],
        buffer: Tensor,
        work: dist.Work | None,
        event: Any,
        label: _Label,
    ) -> None:
        self._label = label
        self._pieces = pieces
        self._buffer = buffer
        self._work = work
        self._event = event

    @torch.no_grad()
    def finish(self, streams: Streams) -> None:
        """Waits, copies out, and makes the unsharded parameters."""
        self._wait_for_same_unit(streams)
        ranks = self._buffer.shape[0]
        by_param: dict[int, list[_Piece]] = {}
        for piece in self._pieces:
            by_param.setdefault(id(piece.param), []).append(piece)
        outputs = []
        for pieces in by_param.values():
            param = pieces[0].param
            param.init_all_gather_outputs(
                [piece.numel for piece in pieces], [piece.dtype for piece in pieces], ranks
            )
            param.alloc_all_gather_outputs()
            outputs += param.all_gather_outputs
        with preserve_version_counter(outputs):
            self._copy_out(outputs, ranks)
        for pieces in by_param.values():
            pieces[0].param.init_unsharded_param()

    def wait(self, streams: Streams) -> None:
        """Waits for the collective only."""
        if self._work is not None:
            self._work.wait()
        streams.wait(None, self._event)

    def _wait_for_same_unit(self, streams: Streams) -> None:
        try:
            self.wait(streams)
        except RuntimeError as error:
            raise UnusedParameterError(
                f"the all-gather of unit {self._label.describe()} failed: {error}. See first "
                f"whether another rank ended or raised. If the ranks do not run the same units in "
                f"the same order, make them, or make one unit of what only some use and call "
                f"set_reduce_scatter_unused_params(True)"
            ) from error
        if not streams.real and moves_data(self._label.param.gather_group_info):
            self._label.check(self._buffer)

    def _copy_out(self, outputs: list[Tensor], ranks: int) -> None:
        geometries = [
            None if p.param.extension is not None else p.param.gather_geometry for p in self._pieces
        ]
        unaligned = sum(piece.numel for piece in self._pieces) == self._label.offset
        if unaligned and all(
            piece.dtype == self._buffer.dtype
            and (geometry is None or geometry.is_prefix)
            and output.numel() == ranks * piece.numel
            for piece, geometry, output in zip(self._pieces, geometries, outputs, strict=True)
        ):
            torch.split_with_sizes_copy(
                self._buffer[:, : self._label.offset],
                [piece.numel for piece in self._pieces],
                dim=1,
                out=[output.view(ranks, -1) for output in outputs],
            )
            return
        for piece, geometry, output in zip(self._pieces, geometries, outputs, strict=True):
            gathered = piece.rows(self._buffer)
            if geometry is None:
                output.view(ranks, -1).copy_(gathered)
            else:
                geometry.copy_out(gathered, output)


@torch.no_grad()
def start_all_gather(
    params: Sequence[HSDPParam],
    info: GroupInfo,
    streams: Streams,
    comm: AllGather,
    *,
    unit: str,
    side_streams: bool,
    async_op: bool,
) -> PendingGather:
    """Starts one all-gather for parameters that share a group.

    Args:
        params: Parameters that are cut, in registration order.
        info: Their gather group.
        streams: The streams of the model.
        comm: Runs the collective.
        unit: Name of the unit, the same on all ranks.
        side_streams: Use the copy-in and gather streams rather than the current one.
        async_op: Return before the collective ends (always so on the CPU).
    """
    assert info.group is not None
    copy_in, gather = streams.copy_in, streams.gather
    if not side_streams:
        copy_in = gather = streams.current()
    ranks, rank = info.rank_size, info.group.rank()
    with streams.use(copy_in):
        inputs = [_inputs(param) for param in params]
        pieces, end, dtype = _lay_out(params, inputs)
        label = _Label(unit, end, params[0])
        total = end if streams.real else end + _LABEL_BYTES // dtype.itemsize
        flat = comm.allocate((ranks * total,), dtype=dtype, device=params[0].device)
        buffer = flat.view(ranks, total)
        _copy_in(pieces, inputs, buffer[rank : rank + 1])
        if not streams.real:
            label.write(buffer[rank])
    streams.follow(gather, copy_in)
    with streams.use(gather):
        work = comm(
            flat, flat[rank * total : (rank + 1) * total], info.group, async_op or not streams.real
        )
        event = streams.event(gather)
    return PendingGather(pieces, buffer, work, event, label)


def _inputs(param: HSDPParam) -> list[Tensor] | None:
    """Returns what an extension sends; None for a slice that is copied straight to its slot."""
    if param.extension is not None and param.sharded_state is ShardedState.SHARDED:
        return param.all_gather_inputs
    return None


def _lay_out(
    params: Sequence[HSDPParam], inputs: Sequence[list[Tensor] | None]
) -> tuple[list[_Piece], int, torch.dtype]:
    sizes: list[tuple[HSDPParam, torch.dtype, int]] = []
    for param, tensors in zip(params, inputs, strict=True):
        if tensors is not None:
            sizes += [(param, tensor.dtype, tensor.numel()) for tensor in tensors]
        else:
            geometry = param.gather_geometry
            assert geometry is not None
            sizes.append((param, param.param_dtype, geometry.wire_numel))
    dtypes = {dtype for _, dtype, _ in sizes}
    pieces, offset = [], 0
    if len(dtypes) == 1 and gathers_as_is(*dtypes):
        for param, dtype, numel in sizes:
            pieces.append(_Piece(param, dtype, numel, offset))
            offset += numel
        return pieces, offset, dtypes.pop()
    for param, dtype, numel in sizes:
        pieces.append(_Piece(param, dtype, numel, offset))
        offset += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return pieces, offset, torch.uint8


def _copy_in(pieces: Sequence[_Piece], inputs: Sequence[list[Tensor] | None], row: Tensor) -> None:
    targets, sources = [], []
    flat_inputs = [t for tensors in inputs for t in (tensors if tensors is not None else [None])]
    for piece, tensor in zip(pieces, flat_inputs, strict=True):
        slot = piece.rows(row)[0]
        if tensor is None:
            param = piece.param
            geometry = param.gather_geometry
            assert geometry is not None
            local = param.gather_source
            if local.device != slot.device:
                local = local.to(slot.device, non_blocking=True)
            target, source = geometry.copies_in(local, slot)
        else:
            target, source = slot, tensor
        targets.append(target)
        sources.append(source)
    foreach_copy(targets, sources)
