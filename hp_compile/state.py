"""Runtime state of one sharded parameter: where it is registered, its shard, its accumulated gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_compile.exact import ExactGrad
from hyper_parallel.errors import PlacementError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import take_model_parallel_part, take_shard
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import CPUOffloadPolicy, OffloadPolicy
from hyper_parallel.torch_compat.distributed import local_tensor
from hyper_parallel.torch_compat.eager import (
    dtensor_from_local,
    set_dtensor_local,
    set_module_parameter,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Home:
    """Where the shards of a model live between steps, and where its programs run.

    Attributes:
        device: device of this rank on the mesh; programs run there.
        offload: shards and gradients live on the CPU.
        pin_memory: they live in pinned memory.
    """

    device: torch.device
    offload: bool = False
    pin_memory: bool = False

    @classmethod
    def of(cls, device: torch.device, policy: OffloadPolicy) -> Home:
        """Reads an offload policy; memory is pinned for an accelerator only.

        Args:
            device: device of this rank on the mesh.
            policy: the offload policy.
        """
        offload = isinstance(policy, CPUOffloadPolicy)
        pin = offload and bool(policy.pin_memory) and device.type != "cpu"  # type: ignore[attr-defined]
        return cls(device, offload, pin)

    @property
    def storage(self) -> torch.device:
        """Device of a shard between steps."""
        return CPU if self.offload else self.device

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Fresh zeros for a shard: on ``storage``, or on meta for a meta tensor.

        Args:
            like: tensor with the dtype.
            shape: shape.
        """
        device = like.device if like.is_meta else self.storage
        pinned = self.pin_memory and device.type == "cpu"
        return torch.zeros(shape, dtype=like.dtype, device=device, pin_memory=pinned)


@dataclass
class ParamState:
    """Owns what a program reads and writes for one parameter.

    A shard that is shorter than the longest one is the first rows of memory that has room for the longest, so programs
    read it padded without a copy, and an optimizer or ``load_state_dict`` writes the very memory that programs read.

    Attributes:
        plan: its plan.
        sites: every module and attribute that registers it; a tied parameter has several.
        mesh: the user's mesh.
        layout: the mesh as a value.
        home: where shards live.
        unsharded_grad: gradients of micro-batches without synchronisation, full local shape, in reduce dtype.
        partial_grad: reduce-scattered gradients whose all-reduce is deferred, padded shard shape, in reduce dtype.
        exact: keeps the sum of micro-batches when gradients are reduced in a wider dtype than they are stored in.
    """

    plan: ParamPlan
    sites: tuple[tuple[nn.Module, str], ...]
    mesh: DeviceMesh
    layout: MeshLayout
    home: Home
    unsharded_grad: torch.Tensor | None = None
    partial_grad: torch.Tensor | None = None
    exact: ExactGrad | None = field(default=None, repr=False)
    _checked: nn.Parameter | None = field(default=None, repr=False)

    # -------------------------------------------------------------- what the module holds

    @property
    def param(self) -> nn.Parameter:
        """The parameter object that the module holds now."""
        owner, name = self.sites[0]
        return owner._parameters[name]  # type: ignore[return-value]

    def register(self, param: nn.Parameter) -> None:
        """Registers ``param`` under all names.

        Args:
            param: the new parameter.
        """
        for owner, name in self.sites:
            if owner._parameters.get(name) is not param:
                set_module_parameter(owner, name, param)

    def local(self) -> torch.Tensor:
        """This rank's shard without padding (the whole tensor when ignored).

        Raises:
            PlacementError: something else was assigned to the parameter's name.
        """
        param = self.param
        if self.plan.ignored:
            return local_tensor(param) if isinstance(param, DTensor) else param.detach()
        if param is not self._checked:
            self.check_held(param)
            self._checked = param
        return local_tensor(param)

    def check_held(self, param: Any) -> None:
        """Checks that ``param`` can stand for this parameter.

        Raises:
            PlacementError: it is no DTensor with the planned shape and placement.
        """
        plan = self.plan
        if isinstance(param, DTensor):
            if param.placements == plan.placements and tuple(param.shape) == plan.shape:
                return
            what = f"a DTensor of shape {tuple(param.shape)} with placements {param.placements}"
        else:
            what = f"{type(param).__name__} of shape {tuple(getattr(param, 'shape', ()))}"
        raise PlacementError(
            f"{plan.fqn}: the module now holds {what}, expected a DTensor of shape {plan.shape} with placements "
            f"{plan.placements}; change the values of a sharded parameter with load_state_dict or in place, not by "
            "assigning another parameter"
        )

    def settle(self) -> None:
        """Puts the shard where ``place`` would have put it, after ``to``, ``to_empty`` or an assigning load."""
        self._checked = None
        param = self.param
        if self.plan.ignored or param.is_meta or not isinstance(param, DTensor):
            return
        local = local_tensor(param)
        if self.home.offload and (local.device != CPU or local.is_pinned() < self.home.pin_memory):
            with torch.no_grad():
                moved = nn.Parameter(self.to_dtensor(self.place(local)), param.requires_grad)
            torch.utils.swap_tensors(param, moved)
        elif self._dim == 0 and self._padded_view(local) is None:
            set_dtensor_local(param, self.place(local, local.device))

    # -------------------------------------------------------------- shards

    def program_input(self) -> torch.Tensor:
        """The shard as programs take it: on the mesh's device, padded to equal rows, contiguous, without autograd."""
        local = self.local()
        if local.device != self.home.device:
            local = local.to(self.home.device, non_blocking=True)
        if self.plan.ignored or tuple(local.shape) == self.plan.padded_shard_shape:
            return local if local.is_contiguous() else local.contiguous()
        padded = self._padded_view(local)
        return padded if padded is not None else self._pad(local)

    def place(self, piece: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Copies this rank's rows into fresh memory with room for padding; returns the rows.

        Args:
            piece: this rank's rows, on any device.
            device: where to; ``home.storage`` by default.
        """
        rows = tuple(piece.shape)
        fits = self._dim != 0 or rows == self.plan.padded_shard_shape
        shape = rows if fits else self.plan.padded_shard_shape
        if device is None or device == self.home.storage:
            memory = self.home.empty(piece, shape)
        else:
            memory = torch.zeros(shape, dtype=piece.dtype, device=device)
        view = memory if fits else memory.narrow(0, 0, rows[0])
        return view.copy_(piece)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a full tensor: a view where it can be one.

        Args:
            full: plain tensor of the parameter's full shape.
        """
        plan = self.plan
        local = take_model_parallel_part(full, self.layout, plan.unsharded_placements)
        if plan.shard_dim is None:
            return local
        return take_shard(local, plan.shard_dim, plan.lengths, plan.shard_index)

    def _pad(self, local: torch.Tensor) -> torch.Tensor:
        memory = local.new_zeros(self.plan.padded_shard_shape)
        assert self._dim is not None
        memory.narrow(self._dim, 0, local.size(self._dim)).copy_(local)
        return memory

    def _padded_view(self, local: torch.Tensor) -> torch.Tensor | None:
        """The memory behind ``local`` in padded shape, if ``local`` is its first rows."""
        shape = self.plan.padded_shard_shape
        nbytes = math.prod(shape) * local.element_size()
        if self._dim != 0 or local.storage_offset() or not local.is_contiguous():
            return None
        if local.untyped_storage().nbytes() != nbytes:
            return None
        return local.as_strided(shape, contiguous_stride(shape))

    @property
    def _dim(self) -> int | None:
        return self.plan.shard_dim

    def unpad(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a padded shard."""
        rows = self.plan.shard_shape
        if tuple(shard.shape) == rows:
            return shard
        assert self._dim is not None
        return shard.narrow(self._dim, 0, rows[self._dim]).contiguous()

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """A local shard under the parameter's combined placement; it stays on its device."""
        return dtensor_from_local(local, self.mesh, self.plan.placements, self.plan.shape)

    def to_grad(self, shard: torch.Tensor) -> torch.Tensor:
        """A reduced gradient as autograd hands it out: a DTensor where the parameter lives.

        Args:
            shard: padded shard of the gradient, on the mesh's device (the whole gradient of an ignored parameter).
        """
        if self.plan.ignored:
            return shard.to(self.param.device)
        local = self.unpad(shard)
        if self.home.offload and local.device != CPU:
            local = local.to(CPU)
        if local.dtype == self.plan.dtype:
            return self.to_dtensor(local)
        if self.exact is None:
            self.exact = ExactGrad(self)
        return self.exact.hand_out(local)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    stride, out = 1, []
    for size in reversed(shape):
        out.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(out))
