"""HSDPParam: one parameter, its slice, its full copy, and the states between them.

==================== ============================== ===========================================
state                registered on the module       memory held
==================== ============================== ===========================================
SHARDED              ``sharded_param`` (DTensor)    the slice
UNSHARDED            ``unsharded_param`` (tensor)   the slice and the full parameter
SHARDED_POST_FORWARD the slice of a smaller group   both slices
==================== ============================== ===========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import ShardedStateError
from hyper_parallel.fully_shard.extensions import GatherExtension
from hyper_parallel.fully_shard.full import FullParam, ShardedState
from hyper_parallel.fully_shard.post_forward import PostForward
from hyper_parallel.fully_shard.slice import ParamSlot
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.torch_compat.eager import dtensor_local, set_dtensor_local

__all__ = ["HSDPParam", "ShardedState"]


class HSDPParam(FullParam):
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
        reduce_scatter_group_info: The same, or another group of the same ranks.
        unsharded_group_info: The ranks that hold the same slice: all-reduce.
        sharded_param: The registered slice, a DTensor with ``plan.placements``.
        sharded_state: The state.
        all_gather_outputs: Flat gathered tensors, zero bytes unless unsharded.
        unsharded_accumulated_grad: Gradient of backwards that did not synchronise.

    Raises:
        PlacementError: The parameter is not the one of the plan.
    """

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
        super().__init__(
            param,
            plan,
            mesh,
            layout,
            mp_policy,
            offload_policy=offload_policy,
            slots=slots,
            post_forward=post_forward,
            device=device,
            already_sharded=already_sharded,
        )
        self.unsharded_accumulated_grad: Tensor | None = None
        self.grad_offload_event: Any = None

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
        self.stamp_unsharded_param()
        self._post_forward_local = None
        self.sharded_state = ShardedState.UNSHARDED

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
        grad = _dense(self._unsharded_param.grad)
        self._unsharded_param.grad = None
        dtype = grad.dtype if grad.is_complex() else self.reduce_dtype
        self.unsharded_accumulated_grad = grad.to(dtype)

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
        return None if grad is None else _dense(grad)

    # Changes from outside

    @torch.no_grad()
    def reset_sharded_param(self) -> None:
        """Takes over what the module holds now: after ``to()``, ``to_empty()``, an assignment.

        Raises:
            PlacementError: The module holds something that is not a DTensor of this layout.
        """
        if self.slots:
            held = getattr(self.slots[0].module, self.slots[0].name)
            if held is self._unsharded_param:  # put back by who had swapped it out
                self._setattr_on_modules(self.sharded_param)
            elif held is not self.sharded_param:
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

    @property
    def registered_param(self) -> Any:
        """What the modules hold in the present state."""
        if self.slots:
            return getattr(self.slots[0].module, self.slots[0].name)
        is_full = self.sharded_state is ShardedState.UNSHARDED
        return self._unsharded_param if is_full else self.sharded_param

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
            self.forget_unsharded_param()

    def __repr__(self) -> str:
        return f"HSDPParam(fqn={self.fqn!r}, shape={self.plan.shape}, {self.sharded_state.name})"


def _dense(grad: Tensor) -> Tensor:
    """Returns a gradient as collectives need it: that of a sparse embedding has no rows to cut."""
    return grad.to_dense() if grad.is_sparse else grad
