"""What the units of one model share while it runs. Two models share nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.fully_shard.gather import PendingGather
from hyper_parallel.fully_shard.guard import ReplicaGuard
from hyper_parallel.fully_shard.reduce import PendingReduction
from hyper_parallel.fully_shard.streams import Streams
from hyper_parallel.torch_compat.eager import queue_backward_callback

if TYPE_CHECKING:
    from hyper_parallel.fully_shard.state import UnitState

__all__ = ["RunContext"]


class RunContext:
    """The running state of one model.

    Attributes:
        units: All units of the model, in ``named_modules`` order.
        forward_root: The unit whose forward is the outermost one now.
        callback_queued: Whether the end of the running backward is waited for.
        is_last_backward: Whether that end waits for everything.
        post_forward_order: Units in the order in which they ended forward.
        post_optim_event: What the next gathers wait for, if the user said so.
        guard: Compares replicas, if the environment asks for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.units: list[UnitState] = []
        self.forward_root: UnitState | None = None
        self.callback_queued = False
        self.is_last_backward = True
        self.post_forward_order: list[UnitState] = []
        self.post_optim_event: Any = None
        self.guard = ReplicaGuard()
        self._streams: Streams | None = None
        self._reductions: list[PendingReduction] = []
        self._max_in_flight = 1
        self._checks: list[Callable[[bool], bool]] = []
        # A copy-out in forward overlaps the next gather; its buffer lives until the one after.
        self._in_use: tuple[list[PendingGather], Any] | None = None

    @property
    def streams(self) -> Streams:
        """The streams, made when first needed."""
        if self._streams is None:
            self._streams = Streams(self.device)
        return self._streams

    def share_streams(self, other: RunContext) -> None:
        """Uses the streams of another model."""
        self._streams = other.streams

    # Forward

    def enter_forward(self, unit: UnitState) -> None:
        """Notes the outermost forward; its gathers wait for what runs now, e.g. the optimizer."""
        self.forward_root = unit
        streams = self.streams
        self.run_checks(wait=False)
        if self.post_optim_event is not None:
            for stream in (streams.copy_in, streams.gather):
                streams.wait(stream, self.post_optim_event)
            self.post_optim_event = None
        elif streams.real:
            for stream in (streams.copy_in, streams.gather):
                streams.follow(stream, streams.current())

    def leave_forward(self) -> None:
        """Frees the last gather's buffer."""
        self.free_buffer_in_use()
        self.forward_root = None

    def hold_buffer(self, gathers: list[PendingGather]) -> None:
        """Keeps the buffers of gathers whose copy-out is queued now."""
        self._in_use = (gathers, self.streams.event())

    def free_buffer_in_use(self) -> None:
        """Lets go of the buffers that :meth:`hold_buffer` kept."""
        if self._in_use is not None:
            self.gathers_wait(self._in_use[1])
            self._in_use = None

    def gathers_wait(self, event: Any) -> None:
        """Makes both gather streams wait for an event."""
        streams = self.streams
        if event is not None:
            streams.wait(streams.copy_in, event)
            streams.wait(streams.gather, event)

    # Backward

    def queue_final_callback(self, callback: Callable[[], None]) -> None:
        """Runs ``callback`` when the backward pass that runs now ends; once a pass."""
        if not self.callback_queued:
            self.callback_queued = True
            self._max_in_flight = max(unit.reduce_options.max_in_flight for unit in self.units)
            queue_backward_callback(callback)

    def advance_reductions(self) -> None:
        """Takes the older reductions one step on, before a new one starts: few are in flight."""
        older = max(0, len(self._reductions) - self._max_in_flight + 1)
        for reduction in self._reductions[:older]:
            reduction.advance()
            reduction.release()
        self._forget_finished()

    def add_reduction(self, reduction: PendingReduction) -> None:
        """Notes a reduction that was started."""
        self._reductions.append(reduction)

    def finish_reductions(self) -> None:
        """Completes all reductions; on an accelerator the current stream waits for them."""
        while any(not reduction.done for reduction in self._reductions):
            for reduction in self._reductions:
                reduction.advance()
        for reduction in self._reductions:
            reduction.release()
        self._forget_finished()

    def _forget_finished(self) -> None:
        for reduction in self._reductions:
            if reduction.released and reduction.deferred_check is not None:
                self._checks.append(reduction.deferred_check)
        self._reductions = [r for r in self._reductions if not r.released]

    def run_checks(self, wait: bool) -> None:
        """Reads counts of missing gradients that have arrived by now."""
        checks, self._checks = self._checks, []
        for position, check in enumerate(checks):
            if not check(wait):
                self._checks = checks[position:]
                return

    def reset(self, keep_gradients: bool = False) -> None:
        """Forgets a forward or backward that did not end.

        Args:
            keep_gradients: Only forget the forward; what earlier backwards left stays.
        """
        self.free_buffer_in_use()
        if not keep_gradients:
            while self._reductions:
                reduction = self._reductions.pop()
                reduction.abandon()
                reduction.release()
            self._checks.clear()
        self.post_forward_order.clear()
        self.forward_root = None
        self.callback_queued = False
        for unit in self.units:
            unit.reset_after_failure(keep_gradients)
