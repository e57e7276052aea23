"""HSDPParam: one parameter, its slice, its full copy, and the states between them.

==================== ============================== ===========================================
state                registered on the module       memory held
==================== ============================== ===========================================
SHARDED              ``sharded_param`` (DTensor)    the slice
UNSHARDED            ``unsharded_param`` (tensor)   the slice and the full parameter
SHARDED_POST_FORWARD the slice of a smaller group   both slices
==================== ============================== ===========================================

Autograd may have saved the unsharded parameter or a view of it, so it is one object for good: it is
freed by resizing its storage to zero bytes and filled again in place, unseen by version counters.
A parameter that is not cut (``shard_size`` 1) and not cast is never copied: its unsharded form
shares the storage of the slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hyper_parallel.errors import PlacementError, ShardedStateError
from hyper_parallel.fully_shard.extensions import GatherExtension
from hyper_parallel.fully_shard.geometry import ShardGeometry
from hyper_parallel.fully_shard.post_forward import PostForward
from hyper_parallel.groups import GroupInfo, get_group_info
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import take_model_parallel_part
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.torch_compat.eager import (
    dtensor_from_local,
    dtensor_local,
    set_dtensor_local,
    set_module_parameter,
)

__all__ = ["HSDPParam", "ParamSlot", "ShardedState"]


class ShardedState(Enum):
    """What is registered on the module; see the table of this file."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()


@dataclass(frozen=True)
class ParamSlot:
    """A place where a parameter is registered; a tied or shared parameter has several."""

    module: nn.Module
    name: str


class HSDPParam:
    """One parameter on a mesh.

    It needs no module and no hooks: whoever runs the model decides when to gather. With ``slots``
    it also registers the tensor of its state on the modules.

    Args:
        param: The full parameter: a plain tensor, or a DTensor that TP or EP placed. With
            ``already_sharded`` the DTensor that has ``plan.placements`` on ``mesh``.
        plan: What ``plan_param`` says about it.
        mesh: The mesh of the plan.
        layout: The mesh as a value; read from ``mesh`` by default.
        mp_policy: Dtypes of the gather and of the reduction.
        offload_policy: Whether slices live on the CPU.
        slots: Where to register it.
        post_forward: The smaller group of an integer ``reshard_after_forward``.
        device: Where it is gathered; ``param``'s device by default.
        already_sharded: ``param`` is the slice.

    Attributes:
        rank_size: Ranks of the parameter's data-parallel domain.
        shard_size: Slices; 1 means not cut.
        dp_size: Replicas of a slice.
        sharded_group_info: The ranks that hold the slices: all-gather and reduce-scatter.
        unsharded_group_info: The ranks that hold the same slice: all-reduce.
        sharded_param: The registered slice, a DTensor with ``plan.placements``.
        sharded_state: The state.
        all_gather_outputs: Flat gathered tensors, zero bytes unless unsharded.
        unsharded_accumulated_grad: Gradient of backwards that did not synchronise.

    Raises:
        PlacementError: The parameter is not the one of the plan.
    """

    rank_size: int
    shard_size: int
    dp_size: int

    def __init__(
        self,
        param: nn.Parameter,
        plan: ParamPlan,
        mesh: DeviceMesh,
        layout: MeshLayout | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        *,
        offload_policy: OffloadPolicy | None = None,
        slots: Sequence[ParamSlot] = (),
        post_forward: PostForward | None = None,
        device: torch.device | None = None,
        already_sharded: bool = False,
    ) -> None:
        if tuple(param.shape) != plan.shape:
            raise PlacementError(
                f"{plan.fqn}: the plan is for shape {plan.shape}, got {tuple(param.shape)}"
            )
        self.plan = plan
        self.mesh = mesh
        self.layout = MeshLayout.from_mesh(mesh) if layout is None else layout
        self.mp_policy = mp_policy or MixedPrecisionPolicy()
        self.offload_to_cpu = isinstance(offload_policy, CPUOffloadPolicy)
        self.pin_memory = (
            isinstance(offload_policy, CPUOffloadPolicy)
            and offload_policy.pin_memory
            and torch.accelerator.is_available()
        )
        self.slots = tuple(slots)
        self.post_forward = post_forward
        self.device = device or dtensor_local(param).device
        self.sharded_state = ShardedState.SHARDED
        self.all_gather_outputs: list[Tensor] = []
        self.unsharded_accumulated_grad: Tensor | None = None
        self.grad_offload_event: Any = None
        self._unsharded_param: nn.Parameter | None = None
        self._unsharded_inner: list[Tensor] = []
        self._post_forward_local: Tensor | None = None
        self._init_rank_info()
        self._init_param_shard_size()
        self._init_param(param, already_sharded)
        self.dp_size = self.rank_size // self.shard_size
        self.sharded_group_info: GroupInfo = get_group_info(mesh, self.layout, plan.shard_axes)
        self.unsharded_group_info: GroupInfo = get_group_info(mesh, self.layout, plan.replica_axes)
        if post_forward is not None:
            self._init_sharded_post_forward_param_metadata()

    # Initialisation

    def _init_rank_info(self) -> None:
        """Reads the data-parallel domain of the parameter and this rank's place in it."""
        self.rank = self.layout.rank
        self.rank_size = self.plan.rank_size
        self.shard_index = self.plan.shard_index

    def _init_param_shard_size(self) -> None:
        """Reads into how many slices the parameter is cut; 1 if it is not."""
        self.shard_size = self.plan.shard_size
        self.geometry: ShardGeometry | None = None
        if self.shard_size > 1 and self.plan.shard_dim is not None:
            self.geometry = ShardGeometry(
                self.plan.local_shape, self.plan.shard_dim, self.plan.lengths, self.shard_index
            )

    def _init_param(self, param: nn.Parameter, already_sharded: bool) -> None:
        """Makes the sharded parameter and registers it."""
        self._unsharded_mesh: DeviceMesh | None = None
        self.unsharded_placements: tuple[Placement, ...] = ()
        if already_sharded:
            if not isinstance(param, DTensor) or param.placements != self.plan.placements:
                raise PlacementError(
                    f"{self.plan.fqn}: expected a DTensor with placements {self.plan.placements}, "
                    f"got {getattr(param, 'placements', type(param).__name__)}"
                )
            self.sharded_param: nn.Parameter = param
        else:
            if isinstance(param, DTensor):
                self._unsharded_mesh = param.device_mesh
                self.unsharded_placements = tuple(param.placements)
            self._init_sharded_param(param)
        self.extension = GatherExtension.of(self)

    @torch.no_grad()
    def _init_sharded_param(self, param: nn.Parameter) -> None:
        """Cuts this rank's slice out of the full parameter; the full one is let go."""
        full = dtensor_local(param.detach())
        if self.geometry is None:
            local = full.contiguous()
        else:
            local = self.geometry.take(full).clone(memory_format=torch.contiguous_format)
        if self.offload_to_cpu and not local.is_meta:
            local = self._to_offload_device(local)
        sharded = nn.Parameter(self.to_sharded_dtensor(local), requires_grad=param.requires_grad)
        sharded.__dict__.update(_notes_on(param))
        self.sharded_param = sharded
        self._setattr_on_modules(sharded)

    def _init_sharded_post_forward_param_metadata(self) -> None:
        """Plans the slice that an integer ``reshard_after_forward`` keeps after forward."""
        assert self.post_forward is not None
        self.post_forward_geometry = self.post_forward.geometry(self.plan)

    # Dtypes and shapes

    @property
    def fqn(self) -> str:
        """The parameter's name, from the root of its model once that is known."""
        return self.plan.fqn

    @property
    def orig_dtype(self) -> torch.dtype:
        """The dtype of the stored slice and of its gradient."""
        return self.sharded_param.dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype in which it is gathered and computed with."""
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.orig_dtype.is_floating_point:
            return self.orig_dtype
        return dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which its gradient is reduced."""
        return self.mp_policy.reduce_dtype or self.param_dtype

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
    def local_tensor(self) -> Tensor:
        """The slice as a plain tensor."""
        return dtensor_local(self.sharded_param)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard group as a 1D mesh."""
        assert self.sharded_group_info.group is not None
        return DeviceMesh.from_group(self.sharded_group_info.group, self.mesh.device_type)

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

    # All-gather

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
        self._unsharded_param = nn.Parameter(full, self.sharded_param.requires_grad)
        self._unsharded_param.__dict__.update(_notes_on(self.sharded_param))

    def free_unsharded_param(self) -> None:
        """Frees the memory of the full parameter; its object, and views of it, stay."""
        for tensor in [*self.all_gather_outputs, *self._unsharded_inner]:
            _resize_storage(tensor, 0)

    # States

    def to_sharded(self) -> None:
        """Registers the slice and frees the full parameter."""
        self.adopt_requires_grad()
        self._setattr_on_modules(self.sharded_param)
        self.free_unsharded_param()
        self._post_forward_local = None
        self.sharded_state = ShardedState.SHARDED

    def to_sharded_post_forward(self) -> None:
        """Registers the slice of the smaller group and frees the full parameter.

        Raises:
            ShardedStateError: It is not unsharded, or no smaller group was planned.
        """
        self._expect("to_sharded_post_forward", ShardedState.UNSHARDED)
        if self.post_forward is None:
            raise ShardedStateError(
                f"{self.fqn}: to_sharded_post_forward needs an integer reshard_after_forward; "
                f"pass one to fully_shard"
            )
        with torch.no_grad():
            full = dtensor_local(self.unsharded_param.detach())
            local = self.post_forward_geometry.take(full)
            self._post_forward_local = local.clone(memory_format=torch.contiguous_format)
            param = nn.Parameter(
                self.to_sharded_post_forward_dtensor(self._post_forward_local),
                self.sharded_param.requires_grad,
            )
        self._setattr_on_modules(param)
        self.free_unsharded_param()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD

    def to_unsharded(self) -> None:
        """Registers the unsharded parameter; its data must have been gathered before.

        Raises:
            ShardedStateError: Nothing was gathered.
        """
        unsharded = self._unsharded_param
        if unsharded is None or any(
            t.untyped_storage().size() == 0 and t.numel() for t in self.all_gather_outputs
        ):
            raise ShardedStateError(
                f"{self.fqn}: to_unsharded needs gathered data; fill all_gather_outputs and call "
                f"init_unsharded_param first, or call unshard() of the module"
            )
        if unsharded.requires_grad != self.sharded_param.requires_grad:
            unsharded.requires_grad_(self.sharded_param.requires_grad)
        self._setattr_on_modules(unsharded)
        self._post_forward_local = None
        self.sharded_state = ShardedState.UNSHARDED

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

    def to_sharded_dtensor(self, tensor: Tensor) -> DTensor:
        """Wraps a slice (of the parameter or of its gradient) with the sharded placements.

        Raises:
            PlacementError: The slice has another shape.
        """
        self._check_shape(tensor, self.plan.shard_shape)
        return dtensor_from_local(tensor, self.mesh, self.plan.placements, self.plan.shape)

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

    @torch.no_grad()
    def shard_like(self, full: Tensor) -> DTensor:
        """Cuts this rank's slice out of another full tensor of the parameter's shape.

        Args:
            full: A plain tensor, equal on all ranks, or a DTensor as TP or EP placed it.

        Raises:
            PlacementError: It has another shape.
        """
        if tuple(full.shape) != self.plan.shape:
            raise PlacementError(
                f"{self.fqn}: expected the full shape {self.plan.shape}, got {tuple(full.shape)}"
            )
        if isinstance(full, DTensor):
            local = dtensor_local(full)
        else:
            local = take_model_parallel_part(full, self.layout, self.plan.unsharded_placements)
        if self.geometry is not None:
            local = self.geometry.take(local)
        local = local.to(self.storage_device).clone(memory_format=torch.contiguous_format)
        return self.to_sharded_dtensor(local)

    @property
    def storage_device(self) -> torch.device:
        """Where the slice lives, or will live if it is on the meta device still."""
        if not self.local_tensor.is_meta:
            return self.local_tensor.device
        if self.offload_to_cpu:
            return torch.device("cpu")
        return torch.device("cpu") if self.device.type == "meta" else self.device

    # Gradients

    @property
    def has_gradient(self) -> bool:
        """Whether a backward left a gradient that was not reduced yet."""
        grad = None if self._unsharded_param is None else self._unsharded_param.grad
        return grad is not None or self.unsharded_accumulated_grad is not None

    def to_accumulated_grad_if_needed(self) -> None:
        """Moves an unreduced gradient into ``unsharded_accumulated_grad``, in the reduce dtype."""
        if self._unsharded_param is None or self._unsharded_param.grad is None:
            return
        if self.unsharded_accumulated_grad is not None:
            self.accumulate_unsharded_grad_if_needed()
            return
        grad = self._unsharded_param.grad
        self._unsharded_param.grad = None
        self.unsharded_accumulated_grad = grad.to(self.reduce_dtype)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Adds the new gradient to what earlier backwards accumulated, if they did."""
        if self._unsharded_param is None or self._unsharded_param.grad is None:
            return
        if self.unsharded_accumulated_grad is not None:
            self.unsharded_accumulated_grad += self._unsharded_param.grad
            self._unsharded_param.grad = None

    def adopt_requires_grad(self) -> None:
        """Takes over ``requires_grad`` if it was set on what is registered instead of the slice."""
        if self.sharded_state is ShardedState.SHARDED:
            return
        held = self.registered_param
        if self.sharded_state is ShardedState.UNSHARDED and held is not self._unsharded_param:
            return  # the user put something else there
        if held.requires_grad != self.sharded_param.requires_grad:
            self.sharded_param.requires_grad_(held.requires_grad)

    def take_gradient(self) -> Tensor | None:
        """Hands out the unreduced gradient and forgets it."""
        self.accumulate_unsharded_grad_if_needed()
        grad = self.unsharded_accumulated_grad
        if grad is None and self._unsharded_param is not None:
            grad = self._unsharded_param.grad
            self._unsharded_param.grad = None
        self.unsharded_accumulated_grad = None
        return grad

    # Changes from outside

    @torch.no_grad()
    def reset_sharded_param(self) -> None:
        """Takes over what the module holds now: after ``to()``, ``to_empty()``, an assignment.

        Raises:
            PlacementError: The module holds something that is not a DTensor of this layout.
        """
        if self.slots:
            held = getattr(self.slots[0].module, self.slots[0].name)
            if held is not self.sharded_param:
                self._check_replacement(held)
                self.sharded_param = held
                self._setattr_on_modules(held)
        local = self.local_tensor
        if self.offload_to_cpu and not local.is_meta:
            offloaded = self._to_offload_device(local)
            if offloaded is not local:
                assert isinstance(self.sharded_param, DTensor)
                set_dtensor_local(self.sharded_param, offloaded)
        self.extension = GatherExtension.of(self)
        self._drop_stale_unsharded()

    def refresh_extension(self) -> None:
        """Looks for an all-gather extension again: one may be patched in after init."""
        if self._unsharded_param is None:
            self.extension = GatherExtension.of(self)

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Broadcasts the slice from the first rank of the unsharded group."""
        info = self.unsharded_group_info
        if info.group is not None and not self.local_tensor.is_meta:
            dist.broadcast(self.local_tensor, group=info.group, group_src=0)

    @property
    def registered_param(self) -> Any:
        """What the modules hold in the present state."""
        if self.slots:
            return getattr(self.slots[0].module, self.slots[0].name)
        is_full = self.sharded_state is ShardedState.UNSHARDED
        return self._unsharded_param if is_full else self.sharded_param

    def is_registered(self) -> bool:
        """Tells whether the modules still hold the tensor of the sharded state."""
        return all(getattr(slot.module, slot.name) is self.sharded_param for slot in self.slots[:1])

    def _check_replacement(self, held: nn.Parameter) -> None:
        if (
            not isinstance(held, DTensor)
            or held.placements != self.plan.placements
            or tuple(held.shape) != self.plan.shape
        ):
            raise PlacementError(
                f"{self.fqn}: it was replaced by {type(held).__name__} of shape "
                f"{tuple(held.shape)}, but a sharded parameter is a DTensor of shape "
                f"{self.plan.shape} with placements {self.plan.placements}; use load_state_dict "
                f"or copy into the parameter"
            )

    def _drop_stale_unsharded(self) -> None:
        """Forgets an unsharded parameter that was made for another dtype, device or storage."""
        full = self._unsharded_param
        if full is None or self.sharded_state is not ShardedState.SHARDED:
            return
        local = dtensor_local(full)
        stale = local.dtype != self.param_dtype or local.device.type != self.device.type
        if self._shares_storage or not self.all_gather_outputs:
            ours, theirs = self.local_tensor.untyped_storage(), local.untyped_storage()
            stale = stale or ours.data_ptr() != theirs.data_ptr()
        if stale and self.extension is None:
            self._unsharded_param = None
            self.all_gather_outputs = []

    def _to_offload_device(self, local: Tensor) -> Tensor:
        local = local.cpu()
        return local.pin_memory() if self.pin_memory and not local.is_pinned() else local

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        for slot in self.slots:
            set_module_parameter(slot.module, slot.name, param)

    def _check_shape(self, tensor: Tensor, expected: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != expected:
            raise PlacementError(
                f"{self.fqn}: this rank's slice has shape {expected}, got {tuple(tensor.shape)}"
            )

    def _expect(self, what: str, *states: ShardedState) -> None:
        if self.sharded_state not in states:
            names = " or ".join(state.name for state in states)
            raise ShardedStateError(
                f"{self.fqn}: {what} needs state {names}, it is {self.sharded_state.name}"
            )

    def __repr__(self) -> str:
        return f"HSDPParam(fqn={self.fqn!r}, shape={self.plan.shape}, {self.sharded_state.name})"


def _notes_on(param: nn.Parameter) -> dict[str, Any]:
    """Returns what the user noted on a parameter: not the tensors that a subclass is made of."""
    own = vars(param.detach())
    return {key: value for key, value in vars(param).items() if key not in own}


def _resize_storage(tensor: Tensor, nbytes: int) -> None:
    storage = tensor.untyped_storage()
    if storage.size() != nbytes:
        storage.resize_(nbytes)
