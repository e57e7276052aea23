"""FullParam: the full parameter beside its slice; how it is gathered, kept and freed.

Autograd may have saved the unsharded parameter or a view of it, so it is one object for good: it is
freed by resizing its storage to zero bytes and filled again in place, unseen by version counters.
A parameter that is not cut (``shard_size`` 1) and not cast is never copied: its unsharded form
shares the storage of the slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import ShardedStateError
from hyper_parallel.fully_shard.geometry import ShardGeometry
from hyper_parallel.fully_shard.optim import note_replacement
from hyper_parallel.fully_shard.post_forward import PostForward
from hyper_parallel.fully_shard.slice import ParamSlice, notes_on
from hyper_parallel.groups import GroupInfo
from hyper_parallel.torch_compat.eager import dtensor_from_local, dtensor_local

__all__ = ["FullParam", "ShardedState"]


class ShardedState(Enum):
    """What is registered on the module; see the table of ``param.py``."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()


class FullParam(ParamSlice):
    """A slice, and the full parameter that is made of all ranks' slices.

    Args:
        *args: Those of :class:`ParamSlice`.
        post_forward: The smaller group of an integer ``reshard_after_forward``.
        **kwargs: Those of :class:`ParamSlice`.
    """

    def __init__(self, *args: Any, post_forward: PostForward | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.post_forward = post_forward
        self.sharded_state = ShardedState.SHARDED
        self.all_gather_outputs: list[Tensor] = []
        self._unsharded_param: nn.Parameter | None = None
        self._unsharded_inner: list[Tensor] = []
        self._post_forward_local: Tensor | None = None
        self._placed: Tensor | None = None
        self._counted: tuple[Tensor, ...] = ()
        self._stamp: tuple[int, ...] = ()
        if post_forward is not None:
            self._init_sharded_post_forward_param_metadata()

    def _init_sharded_post_forward_param_metadata(self) -> None:
        """Plans the slice that an integer ``reshard_after_forward`` keeps after forward."""
        assert self.post_forward is not None
        self.post_forward_geometry = self.post_forward.geometry(self.plan)

    # What the next all-gather sends

    @property
    def _shares_storage(self) -> bool:
        """Whether the unsharded form is the slice itself: not cut, not cast, not moved."""
        return (
            self.geometry is None
            and self.extension is None
            and self.param_dtype == self.orig_dtype
            and self.local_tensor.device.type == self.device.type
        )

    @property
    def gather_geometry(self) -> ShardGeometry | None:
        """The cut that the next all-gather undoes; None if there is nothing to gather."""
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            return self.post_forward_geometry
        return self.geometry

    @property
    def gather_group_info(self) -> GroupInfo:
        """The group of the next all-gather."""
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            assert self.post_forward is not None
            return self.post_forward.group_info
        return self.sharded_group_info

    @property
    def gather_ranks(self) -> tuple[int, ...]:
        """Global ranks of the group of the next all-gather."""
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            assert self.post_forward is not None
            return self.post_forward.layout.ranks_along(self.post_forward.axes)
        return self.plan.sharded_ranks

    @property
    def gather_source(self) -> Tensor:
        """The slice that the next all-gather sends."""
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            assert self._post_forward_local is not None
            return self._post_forward_local
        return self.local_tensor

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What this rank sends in an all-gather: flat, cast and padded.

        Raises:
            ShardedStateError: The parameter is unsharded.
        """
        self._expect("all_gather_inputs", ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD)
        with torch.no_grad():
            if self.extension is not None and self.sharded_state is ShardedState.SHARDED:
                return self.extension.pre_all_gather()
            source = self.gather_source.to(self.device, non_blocking=True)
            geometry = self.gather_geometry
            if geometry is None:
                return [source.reshape(-1).to(self.param_dtype)]
            slot = torch.zeros(geometry.wire_numel, dtype=self.param_dtype, device=self.device)
            target, values = geometry.copies_in(source, slot)
            target.copy_(values)
            return [slot]

    # The full parameter

    @torch.inference_mode(False)
    def init_all_gather_outputs(
        self,
        all_gather_input_numels: Sequence[int] | None = None,
        all_gather_input_dtypes: Sequence[torch.dtype] | None = None,
        world_size: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Makes the flat output tensors of the all-gather, once.

        Args:
            all_gather_input_numels: Elements of each input; from the plan by default.
            all_gather_input_dtypes: Dtypes of the inputs.
            world_size: Ranks of the gather.
            device: Where to allocate.
        """
        if self.all_gather_outputs or self._shares_storage:
            return
        if self.extension is not None and all_gather_input_numels is not None:
            assert all_gather_input_dtypes is not None and world_size is not None
            self.all_gather_outputs = [
                torch.empty(numel * world_size, dtype=dtype, device=device or self.device)
                for numel, dtype in zip(
                    all_gather_input_numels, all_gather_input_dtypes, strict=True
                )
            ]
            return
        geometry = self.geometry
        if geometry is None:
            numel = self.local_tensor.numel()
        elif geometry.is_prefix:
            numel = geometry.ranks * geometry.wire_numel
        else:
            numel = geometry.full_numel
        self.all_gather_outputs = [
            torch.empty(numel, dtype=self.param_dtype, device=device or self.device)
        ]

    def alloc_all_gather_outputs(self) -> None:
        """Gives the output tensors their memory back."""
        for tensor in self.all_gather_outputs:
            _resize_storage(tensor, tensor.numel() * tensor.itemsize)

    @torch.inference_mode(False)
    def init_unsharded_param(self) -> None:
        """Makes the unsharded parameter from the gathered outputs, once; later calls keep it."""
        if self.extension is not None:
            for inner in self._unsharded_inner:
                _resize_storage(inner, inner.numel() * inner.itemsize)
            full, inners = self.extension.post_all_gather(
                self.all_gather_outputs, out=self._unsharded_param
            )
            if self._unsharded_param is not None:
                return
            self._unsharded_inner = inners
        elif self._unsharded_param is not None:
            return
        elif self._shares_storage:
            full = self.local_tensor.detach()
        else:
            self.init_all_gather_outputs()
            full = self.all_gather_outputs[0][: math.prod(self.plan.local_shape)]
            full = full.view(self.plan.local_shape)
        if self._unsharded_mesh is not None:
            full = dtensor_from_local(
                full, self._unsharded_mesh, self.unsharded_placements, self.plan.shape
            )
        with torch.inference_mode(full.is_inference()):
            self._unsharded_param = nn.Parameter(full, self.sharded_param.requires_grad)
        self._unsharded_param.__dict__.update(notes_on(self.sharded_param))
        self._watch(self._unsharded_param)
        note_replacement(self._unsharded_param, self)  # an optimizer may find it in the module

    def stamp_unsharded_param(self) -> None:
        """Notes what the full parameter is now, so that a change of it is seen."""
        self._stamp = self._present_stamp()

    def is_changed(self) -> bool:
        """Tells whether the full parameter was changed, a change that goes when it is freed.

        Changes in place are counted by autograd, but not for inference tensors; they are no loss
        where it shares the storage of the slice. ``param.data = ...`` moves it to other memory.
        """
        return bool(self._stamp) and self._stamp != self._present_stamp()

    def _present_stamp(self) -> tuple[int, ...]:
        place = 0 if self._placed is None else self._placed.data_ptr()
        return (place, *[tensor._version for tensor in self._counted])

    def _watch(self, full: nn.Parameter) -> None:
        """Chooses what stamps are made of, once: they are made in every gather."""
        local = dtensor_local(full)
        self._placed = local if type(local) in (Tensor, nn.Parameter) else None
        self._counted = (full,) if local is full else (full, local)
        if self._shares_storage or any(tensor.is_inference() for tensor in self._counted):
            self._counted = ()

    def free_unsharded_param(self) -> None:
        """Frees the memory of the full parameter; its object, and views of it, stay."""
        if self._stamp and self._stamp[0] != self._present_stamp()[0]:
            self.forget_unsharded_param()  # it would show the other memory for good
        self._stamp = ()
        for tensor in [*self.all_gather_outputs, *self._unsharded_inner]:
            _resize_storage(tensor, 0)

    def forget_unsharded_param(self) -> None:
        """Lets the next gather make a new object."""
        self._unsharded_param = None
        self.all_gather_outputs = []
        self._placed, self._counted = None, ()

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The full parameter, the same object for good; empty storage unless unsharded.

        Raises:
            ShardedStateError: It was never gathered.
        """
        if self._unsharded_param is None:
            raise ShardedStateError(
                f"{self.fqn}: it has no unsharded parameter before its first unshard"
            )
        return self._unsharded_param

    def to_sharded_post_forward_dtensor(self, tensor: Tensor) -> DTensor:
        """Wraps a slice of the smaller group with the placements that say so.

        Raises:
            PlacementError: The slice has another shape.
        """
        assert self.post_forward is not None
        self._check_shape(tensor, self.post_forward_geometry.local_shape)
        return dtensor_from_local(
            tensor,
            self.post_forward.mesh,
            self.post_forward.placements(self.plan),
            self.plan.shape,
        )

    def _expect(self, what: str, *states: ShardedState) -> None:
        if self.sharded_state not in states:
            names = " or ".join(state.name for state in states)
            raise ShardedStateError(
                f"{self.fqn}: {what} needs state {names}, it is {self.sharded_state.name}"
            )


def _resize_storage(tensor: Tensor, nbytes: int) -> None:
    storage = tensor.untyped_storage()
    if storage.size() != nbytes:
        storage.resize_(nbytes)
