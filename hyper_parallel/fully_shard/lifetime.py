"""When the full parameters of one unit exist: started, waited for, freed.

::

    SHARDED ──unshard──> gathers run ──wait_for_unshard──> UNSHARDED
       ^                                                       │
       └──to_sharded── SHARDED_POST_FORWARD <──an integer──── reshard
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch

from hyper_parallel.errors import ShardedStateError
from hyper_parallel.fully_shard.context import RunContext
from hyper_parallel.fully_shard.gather import AllGather, PendingGather, start_all_gather
from hyper_parallel.fully_shard.param import HSDPParam, ShardedState
from hyper_parallel.torch_compat.eager import outside_transforms, preserve_version_counter

__all__ = ["ParamLifetime", "TrainingState"]


class TrainingState(Enum):
    """Where a unit is in a step."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class ParamLifetime:
    """Gathers and frees the parameters of one unit; :class:`UnitState` says when.

    Attributes:
        params: The parameters of the unit, in registration order.
        context: What it shares with the other units of its model.
        unshard_in_backward: Whether backward needs the parameters at all.
        unshard_async_op: Gather on the current stream, for explicit prefetching only.
    """

    def __init__(
        self, params: Sequence[HSDPParam], device: torch.device, reshard_after_forward: bool | None
    ) -> None:
        self.params = list(params)
        self.name = ""
        self.is_root: bool | None = None
        self.context = RunContext(device)
        self.training_state = TrainingState.IDLE
        self.sharded_state = ShardedState.SHARDED
        self.unshard_in_backward = True
        self.unshard_async_op = False
        self.all_gather_comm = AllGather()
        self._reshard_after_forward = reshard_after_forward  # None: all but the root
        self._gathers: list[PendingGather] | None = None
        self._reshard_event: Any = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def unshard(self, async_op: bool = False) -> None:
        """Starts the all-gather; nothing if it runs already or is not needed."""
        if self._gathers is not None or self.sharded_state is ShardedState.UNSHARDED:
            return
        preparing_backward = self.training_state is TrainingState.PRE_BACKWARD
        if preparing_backward and not self.unshard_in_backward:
            return
        if self._reshard_event is not None:
            self.context.gathers_wait(self._reshard_event)
            self._reshard_event = None
        if self.sharded_state is ShardedState.SHARDED:
            for param in self.params:
                if not param.is_registered():
                    param.reset_sharded_param()
        async_op = async_op or self.unshard_async_op
        in_step = self.training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        groups: dict[tuple[int, ...], list[HSDPParam]] = {}
        for param in self.params:
            if param.gather_geometry is not None:
                groups.setdefault(param.gather_ranks, []).append(param)
        with outside_transforms():
            self._gathers = [
                start_all_gather(
                    members,
                    members[0].gather_group_info,
                    self.context.streams,
                    self.all_gather_comm,
                    unit=self.name,
                    side_streams=in_step and not async_op,
                    async_op=async_op,
                )
                for members in groups.values()
            ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Ends the all-gather and registers the unsharded parameters."""
        if self._gathers is None:
            return
        context = self.context
        in_forward = self.training_state is TrainingState.FORWARD
        if in_forward:
            context.free_buffer_in_use()
        gathers, self._gathers = self._gathers, None
        with outside_transforms():
            for gather in gathers:
                gather.finish(context.streams)
            for param in self.params:
                if param.gather_geometry is None:
                    _fill_whole(param)
                param.to_unsharded()
        self.sharded_state = ShardedState.UNSHARDED
        if context.streams.real and gathers:
            if in_forward and not self.unshard_async_op:
                context.hold_buffer(gathers)
            else:
                context.gathers_wait(context.streams.event())

    def prefetch(self, state: TrainingState) -> None:
        """Starts the all-gather ahead of time, as if the unit were in ``state``."""
        before, self.training_state = self.training_state, state
        try:
            self.unshard()
        finally:
            self.training_state = before

    def reshard(self) -> None:
        """Frees the full parameters; after forward as the unit's setting says."""
        if self.training_state is TrainingState.FORWARD:
            if not self.reshards_after_forward:
                return
            if any(param.post_forward is not None for param in self.params):
                self._to_sharded_post_forward()
                return
        self.to_sharded()

    @property
    def reshards_after_forward(self) -> bool:
        """Whether forward ends by freeing the parameters; None means all but the root."""
        if self._reshard_after_forward is None:
            return not self.is_root
        return self._reshard_after_forward

    def set_reshard_after_forward(self, value: bool) -> None:
        """Changes it; True forgets the smaller group of an integer."""
        self._reshard_after_forward = value
        for param in self.params:
            param.post_forward = None

    def to_sharded(self, check: bool = True) -> None:
        """Registers the slices, whatever the state.

        Args:
            check: Raise an error if this loses changes of full parameters.

        Raises:
            ShardedStateError: It lost them.
        """
        self._drop_gathers()
        if self.sharded_state is ShardedState.SHARDED:
            return
        changed = self._changed_params() if check else []
        for param in self.params:
            param.to_sharded()
        self.sharded_state = ShardedState.SHARDED
        _refuse_changes(changed)

    @torch.inference_mode(False)
    def _to_sharded_post_forward(self) -> None:
        if self.sharded_state is not ShardedState.UNSHARDED:
            return
        changed = self._changed_params()
        for param in self.params:
            if param.post_forward is not None:
                param.to_sharded_post_forward()
            else:
                param.to_sharded()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD
        self._reshard_event = self.context.streams.event()
        _refuse_changes(changed)

    def check_unchanged(self) -> None:
        """Checks that nothing changed the full parameters, which their slices would not know.

        Raises:
            ShardedStateError: Something did.
        """
        _refuse_changes(self._changed_params())

    def _changed_params(self) -> list[str]:
        if self.sharded_state is not ShardedState.UNSHARDED:
            return []
        return [param.fqn for param in self.params if param.is_changed()]

    def _drop_gathers(self) -> None:
        if self._gathers is not None:
            for gather in self._gathers:
                gather.wait(self.context.streams)
            self._gathers = None


def _refuse_changes(names: Sequence[str]) -> None:
    if names:
        raise ShardedStateError(
            f"changed in place while gathered: {', '.join(names)}. The change is made on a copy and "
            f"lost when that is freed; change parameters outside forward and while they are sharded "
            f"(p.copy_, torch.nn.init under torch.no_grad()), or make what forward updates a buffer"
        )


def _fill_whole(param: HSDPParam) -> None:
    """Makes the unsharded form of a parameter that is not cut: shared, or a cast copy."""
    param.init_all_gather_outputs()
    param.alloc_all_gather_outputs()
    with preserve_version_counter(param.all_gather_outputs):
        for output in param.all_gather_outputs:
            output.copy_(param.local_tensor.view(-1), non_blocking=True)
    param.init_unsharded_param()
