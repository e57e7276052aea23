"""The gradients of a unit: one reduce-scatter, then one all-reduce over the replicas.

A bucket is what can share a collective: equal groups and reduce dtype, usually a whole unit. Its
wire always has the same size, whichever parameters a backward used, so ranks cannot disagree about
it. Behind the gradients each rank's row carries one number a parameter: how many ranks had no
gradient for it. Zero is the normal case; all ranks means that there is no gradient; anything
between is an error that every rank reports, unless the user asked for zeros to be filled in. On the
CPU a hash of the parameters' names follows, so that ranks that reduce different units at the same
time find out instead of computing with a mixture::

    row of one rank   | slice of weight | slice of bias | missing weight, missing bias | hash |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.errors import UnusedParameterError
from hyper_parallel.fully_shard.assign import assign_gradient
from hyper_parallel.fully_shard.dtypes import to_reals
from hyper_parallel.fully_shard.param import HSDPParam
from hyper_parallel.fully_shard.partial import sum_partial_gradients
from hyper_parallel.fully_shard.scale import Scale
from hyper_parallel.fully_shard.streams import Streams
from hyper_parallel.fully_shard.unused import check_label, check_missing, label_of, moves_data
from hyper_parallel.groups import GroupInfo
from hyper_parallel.torch_compat.eager import chunk_cat, reduce_scatter_flat

__all__ = ["PendingReduction", "ReduceBucket", "ReduceOptions", "ReduceScatter", "reduce_buckets"]


class ReduceScatter:
    """How it is run; ``HSDPModule.set_custom_reduce_scatter`` takes another one."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the input or the output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Runs the reduce-scatter."""
        return reduce_scatter_flat(output_tensor, input_tensor, op, group, async_op)


@dataclass
class ReduceOptions:
    """What the setters of a module say about its reductions.

    Attributes:
        mean: Mean over the batch dims; else the sum.
        factor: Divide by this instead.
        sum_only: Only ever use SUM collectives.
        fill_unused: Use zeros where a rank has no gradient.
        all_reduce: Reduce over the replicas now; else accumulate slices.
        comm: Runs the reduce-scatter.
        hook: Called with the reduced flat tensor.
        hook_stream: Where the hook runs, if nothing is all-reduced.
        max_in_flight: Reductions that may run before backward waits for one of them.
    """

    mean: bool = True
    factor: float | None = None
    sum_only: bool = False
    fill_unused: bool = False
    all_reduce: bool = True
    comm: Any = None
    hook: Any = None
    hook_stream: Any = None
    max_in_flight: int = 1


class ReduceBucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, params: Sequence[HSDPParam]) -> None:
        self.params = list(params)
        first = params[0]
        self.sharded: GroupInfo = first.reduce_scatter_group_info
        self.unsharded: GroupInfo = first.unsharded_group_info
        self.dtype = first.reduce_dtype
        self.batch_ranks = first.plan.batch_ranks
        self.device = first.device
        self.partial: Tensor | None = None  # reduce-scattered, not yet all-reduced
        self.partial_missing: list[bool] = []  # which had no gradient on this rank so far

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter in a rank's row."""
        return tuple(
            p.reals_per_element
            * (p.local_tensor.numel() if p.geometry is None else p.geometry.wire_numel)
            for p in self.params
        )

    @cached_property
    def label(self) -> tuple[bool, ...]:
        """Bits that say whose gradients a row carries; none on an accelerator."""
        if self.device.type != "cpu" or not self.communicates:
            return ()
        return label_of(self.params)

    @cached_property
    def row_numel(self) -> int:
        """Elements of a rank's row: all slices, one count a parameter, and the label."""
        return sum(self.numels) + len(self.params) + len(self.label)

    def check_row(self, row: Tensor, full_count: float) -> Tensor:
        """Checks the label behind the slices of a reduced row and returns the counts before it."""
        payload = sum(self.numels)
        counts, label = row[payload:].split([len(self.params), len(self.label)])
        check_label(self.params, self.label, label, full_count)
        return counts

    @property
    def communicates(self) -> bool:
        """Whether another rank takes part, with data that is really sent."""
        return moves_data(self.sharded) or moves_data(self.unsharded)


def reduce_buckets(params: Sequence[HSDPParam]) -> list[ReduceBucket]:
    """Groups the trained parameters of a unit by what can share a collective, in order."""
    buckets: dict[tuple[Any, ...], list[HSDPParam]] = {}
    for param in params:
        if param.sharded_param.requires_grad:
            plan = param.plan
            key = (plan.sharded_ranks, plan.unsharded_ranks, plan.batch_ranks, param.reduce_dtype)
            buckets.setdefault(key, []).append(param)
    return [ReduceBucket(members) for members in buckets.values()]


class PendingReduction:
    """A reduction on its way: reduce-scatter, all-reduce, then the gradients of the slices.

    On an accelerator everything is queued at once; on the CPU :meth:`advance` takes one step.
    """

    def __init__(self, bucket: ReduceBucket, options: ReduceOptions, streams: Streams) -> None:
        self.bucket = bucket
        self._options = options
        self._streams = streams
        self._scale = Scale.of(
            bucket.sharded,
            bucket.unsharded,
            bucket.batch_ranks,
            bucket.dtype,
            mean=options.mean,
            factor=options.factor,
            sum_only=options.sum_only,
        )
        self._steps: list[Any] = []
        self._work: dist.Work | None = None
        self._missing_here: list[bool] = []
        self._keep: list[Tensor] = []  # used on side streams until `_event`
        self._event: Any = None
        self._released = False
        self.deferred_check: Any = None

    @property
    def done(self) -> bool:
        """Whether the gradients are handed out (on an accelerator: queued to be)."""
        return not self._steps

    @property
    def released(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.done and self._released

    @torch.no_grad()
    def start(self, grads: list[Tensor | None]) -> None:
        """Copies the gradients in and starts the first collective.

        Args:
            grads: One a parameter of the bucket, unsharded; the list is emptied, which frees them.
        """
        bucket, streams = self.bucket, self._streams
        self._missing_here = [grad is None for grad in grads]
        buffer = self._copy_in(grads)
        streams.follow(streams.scatter, streams.current())
        with streams.use(streams.scatter):
            if self._scale.before != 1.0:
                buffer.div_(self._scale.before)
            if bucket.sharded.group is not None:
                output = self._comm.allocate(
                    (bucket.row_numel,), dtype=bucket.dtype, device=bucket.device
                )
                self._work = self._comm(
                    output,
                    buffer,
                    bucket.sharded.group,
                    self._scale.scatter_op,
                    not streams.real,
                )
                self._keep.append(buffer)
            else:
                output = buffer
        self._output = output
        self._steps = [self._after_scatter]
        if streams.real:
            while self._steps:
                self.advance()

    def advance(self) -> None:
        """Waits for the collective that runs now and does what follows it."""
        if not self._steps:
            return
        step = self._steps.pop(0)
        self._wait()
        step()

    def abandon(self) -> None:
        """Waits for the collective that runs now and drops its result."""
        self._wait()
        self._steps = []
        self.bucket.partial = None

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            first = self.bucket.params[0]
            raise UnusedParameterError(
                f"the reduction of the gradients of {first.fqn} and {len(self.bucket.params) - 1} "
                f"more parameters failed on rank {first.rank}: {error}. See first whether "
                f"another rank ended or raised. If the ranks do not use the same units, make them, "
                f"or call set_reduce_scatter_unused_params(True)"
            ) from error

    def release(self) -> None:
        """Makes the current stream wait for all of it; the buffers may then be used again."""
        self._streams.wait(None, self._event)
        self._keep.clear()
        self._released = True

    @property
    def _comm(self) -> ReduceScatter:
        return self._options.comm or ReduceScatter()

    def _copy_in(self, grads: list[Tensor | None]) -> Tensor:
        bucket = self.bucket
        ranks = bucket.sharded.rank_size
        found = [(p, g) for p, g in zip(bucket.params, grads, strict=True) if g is not None]
        grads.clear()
        summed = sum_partial_gradients(found, bucket.dtype)
        found.clear()
        # Gradients of one dtype are cast by the copy itself, without a copy of each before it.
        dtypes = {grad.dtype.to_real() for grad in summed}
        dtype = dtypes.pop() if len(dtypes) == 1 else bucket.dtype
        locals_ = iter([grad if grad.is_complex() else grad.to(dtype) for grad in summed])
        del summed
        wires = []
        for param, missing in zip(bucket.params, self._missing_here, strict=True):
            if missing:
                rows = ranks if param.geometry is None else ranks * param.geometry.padded_rows
                rest = () if param.geometry is None else param.geometry.rest
                shape = (param.local_tensor.numel(),) if param.geometry is None else (rows, *rest)
                shape = (*shape, param.reals_per_element)
                wires.append(torch.zeros(shape, dtype=dtype, device=bucket.device))
            elif param.geometry is None:
                wires.append(to_reals(next(locals_).reshape(-1)).to(dtype))
            else:
                wires.append(to_reals(param.geometry.gradient_wire(next(locals_))).to(dtype))
        behind = torch.tensor(
            [*self._missing_here, *bucket.label], dtype=dtype, device=bucket.device
        )
        wires.append(behind.repeat(ranks))
        buffer = self._comm.allocate(
            (ranks * bucket.row_numel,), dtype=bucket.dtype, device=bucket.device
        )
        chunk_cat(wires, ranks, out=buffer.view(ranks, -1))
        return buffer

    def _after_scatter(self) -> None:
        bucket, streams, output = self.bucket, self._streams, self._output
        with torch.no_grad(), streams.use(streams.scatter):
            _divide(output, self._scale.after_scatter)
            event = streams.event(streams.scatter)
            if bucket.unsharded.group is not None:
                self._merge_partial(output)
                if not self._options.all_reduce:
                    self._event = event
                    return
        if bucket.unsharded.group is None:
            stream = self._options.hook_stream or streams.scatter
            if stream is not streams.scatter:
                self._keep.append(output)
                streams.follow(stream, streams.scatter)
            self._finish(stream)
            return
        streams.follow(streams.reduce, streams.scatter)
        with torch.no_grad(), streams.use(streams.reduce):
            self._work = dist.all_reduce(
                output, self._scale.reduce_op, bucket.unsharded.group, async_op=not streams.real
            )
            self._keep.append(output)
        self._steps = [lambda: self._finish(streams.reduce)]

    def _merge_partial(self, output: Tensor) -> None:
        """Adds what earlier backwards left; if there is no all-reduce yet, leaves it all there."""
        bucket, payload = self.bucket, sum(self.bucket.numels)
        if not self._options.all_reduce and moves_data(bucket.sharded):
            check_missing(
                bucket.params,
                self._missing_here,
                bucket.check_row(output, self._full_after_scatter),
                self._full_after_scatter,
                self._options.fill_unused,
                self._streams,
            )
        if bucket.partial is not None:
            output[:payload] += bucket.partial[:payload]
            # No gradient so far means none in any of the backwards.
            torch.minimum(output[payload:], bucket.partial[payload:], out=output[payload:])
            pairs = zip(self._missing_here, bucket.partial_missing, strict=True)
            self._missing_here = [now and before for now, before in pairs]
        deferred = not self._options.all_reduce
        bucket.partial = output if deferred else None
        bucket.partial_missing = self._missing_here if deferred else []

    def _finish(self, stream: Any) -> None:
        bucket, output = self.bucket, self._output
        with torch.no_grad(), self._streams.use(stream):
            if self._options.hook is not None:
                self._options.hook(output[: sum(bucket.numels)])
            _divide(output, self._scale.at_end)
            if bucket.communicates:
                unused, self.deferred_check = check_missing(
                    bucket.params,
                    self._missing_here,
                    bucket.check_row(output, self._full_count),
                    self._full_count,
                    self._options.fill_unused,
                    self._streams,
                )
            else:
                unused = self._missing_here
            offset = 0
            for param, numel, skip in zip(bucket.params, bucket.numels, unused, strict=True):
                wire = output[offset : offset + numel]
                offset += numel
                if not skip:
                    assign_gradient(param, wire, self._streams, stream)
            self._event = self._streams.event(stream)

    @property
    def _full_after_scatter(self) -> float:
        """What a count is after the reduce-scatter if every rank lacks the gradient."""
        averaged = self._scale.scatter_op == dist.ReduceOp.AVG
        ranks = 1 if averaged else self.bucket.sharded.rank_size
        return ranks / (self._scale.before * self._scale.after_scatter)

    @property
    def _full_count(self) -> float:
        """The same at the end."""
        averaged = self._scale.reduce_op == dist.ReduceOp.AVG
        ranks = 1 if averaged else self.bucket.unsharded.rank_size
        return self._full_after_scatter * ranks / self._scale.at_end


def _divide(tensor: Tensor, divisor: float) -> None:
    if divisor != 1.0:
        tensor.div_(divisor)
