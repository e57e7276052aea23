"""ParamSlice: one parameter on a mesh as this rank keeps it, whether or not the full one exists.

What is decided here is fixed by the plan: the ranks, the cut, the DTensor that optimizers and
checkpoints see, and where it is registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hyper_parallel.errors import PlacementError
from hyper_parallel.fully_shard.dtypes import reals_per_element
from hyper_parallel.fully_shard.extensions import GatherExtension
from hyper_parallel.fully_shard.geometry import ShardGeometry
from hyper_parallel.groups import GroupInfo, get_group_info
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import take_model_parallel_part
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.torch_compat.eager import (
    dtensor_from_local,
    dtensor_local,
    set_module_parameter,
)

__all__ = ["ParamSlice", "ParamSlot", "notes_on"]


@dataclass(frozen=True)
class ParamSlot:
    """A place where a parameter is registered; a tied or shared parameter has several."""

    module: nn.Module
    name: str


class ParamSlice:
    """The slice of one parameter; :class:`HSDPParam` adds the full parameter and the states.

    Args:
        param: The full parameter, or with ``already_sharded`` the slice.
        plan: What ``plan_param`` says about it.
        mesh: The mesh of the plan.
        layout: The mesh as a value; read from ``mesh`` by default.
        mp_policy: Dtypes of the gather and of the reduction.
        offload_policy: Whether slices live on the CPU.
        slots: Where to register it.
        device: Where it is gathered; ``param``'s device by default.
        already_sharded: ``param`` is the slice.

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
        self.device = device or dtensor_local(param).device
        self._init_rank_info()
        self._init_param_shard_size()
        self._init_param(param, already_sharded)
        self.dp_size = self.rank_size // self.shard_size
        self.sharded_group_info: GroupInfo = get_group_info(mesh, self.layout, plan.shard_axes)
        self.reduce_scatter_group_info = self.sharded_group_info
        self.unsharded_group_info: GroupInfo = get_group_info(mesh, self.layout, plan.replica_axes)

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

    @torch.inference_mode(False)
    @torch.no_grad()
    def _init_sharded_param(self, param: nn.Parameter) -> None:
        """Cuts this rank's slice out of the full parameter; the full one is let go."""
        full = dtensor_local(param.detach())
        if self.geometry is None:
            local = full.clone() if full.is_inference() else full.contiguous()
        else:
            local = self.geometry.take(full).clone(memory_format=torch.contiguous_format)
        if self.offload_to_cpu and not local.is_meta:
            local = self._to_offload_device(local)
        sharded = nn.Parameter(self.to_sharded_dtensor(local), requires_grad=param.requires_grad)
        sharded.__dict__.update(notes_on(param))
        self.sharded_param = sharded
        self._setattr_on_modules(sharded)

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
        """The dtype in which its gradient is reduced; for a complex one, that of its parts."""
        return self.mp_policy.reduce_dtype or self.param_dtype.to_real()

    @property
    def reals_per_element(self) -> int:
        """How many numbers of a reduction one element of its gradient takes."""
        return reals_per_element(self.orig_dtype)

    @property
    def local_tensor(self) -> Tensor:
        """The slice as a plain tensor."""
        return dtensor_local(self.sharded_param)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard group as a 1D mesh."""
        assert self.sharded_group_info.group is not None
        return DeviceMesh.from_group(self.sharded_group_info.group, self.mesh.device_type)

    # Tensors of its layout

    def to_sharded_dtensor(self, tensor: Tensor) -> DTensor:
        """Wraps a slice (of the parameter or of its gradient) with the sharded placements.

        Raises:
            PlacementError: The slice has another shape.
        """
        self._check_shape(tensor, self.plan.shard_shape)
        return dtensor_from_local(tensor, self.mesh, self.plan.placements, self.plan.shape)

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

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Broadcasts the slice from the first rank of the unsharded group."""
        info = self.unsharded_group_info
        if info.group is not None and not self.local_tensor.is_meta:
            dist.broadcast(self.local_tensor, group=info.group, group_src=0)

    # On the modules

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


def notes_on(param: nn.Parameter) -> dict[str, Any]:
    """Returns what the user noted on a parameter: not the tensors that a subclass is made of."""
    own = vars(param.detach())
    return {key: value for key, value in vars(param).items() if key not in own}
