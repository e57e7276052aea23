"""Runtime state of one sharded parameter: its padded shard, its accumulated gradients, its DTensor border."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.plan import ParamPlan
from hyper_parallel.torch_compat.distributed import local_tensor


@dataclass
class ParamState:
    """Owns what a program reads and writes for one parameter.

    Attributes:
        plan: its plan.
        owner: module that registers it (under its first name).
        name: attribute name in the owner.
        mesh: the user's mesh.
        padded: storage of the shard padded to equal rows, when this rank's shard is shorter.
        unsharded_grad: gradients of micro-batches without synchronisation, full local shape, in reduce dtype.
        partial_grad: reduce-scattered gradients whose all-reduce is deferred, padded shard shape, in reduce dtype.
    """

    plan: ParamPlan
    owner: nn.Module
    name: str
    mesh: DeviceMesh
    padded: torch.Tensor | None = None
    unsharded_grad: torch.Tensor | None = None
    partial_grad: torch.Tensor | None = None
    exact_grad: torch.Tensor | None = field(default=None, repr=False)

    @property
    def param(self) -> nn.Parameter:
        """The parameter object that the module holds now."""
        return self.owner._parameters[self.name]  # type: ignore[return-value]

    def local(self) -> torch.Tensor:
        """This rank's shard without padding (the whole tensor when ignored)."""
        param = self.param
        return local_tensor(param) if isinstance(param, DTensor) else param.detach()

    def program_input(self) -> torch.Tensor:
        """The shard as programs take it: padded to equal rows, contiguous, detached from autograd."""
        local = self.local()
        if self.plan.ignored or tuple(local.shape) == self.plan.padded_shard_shape:
            return local if local.is_contiguous() else local.contiguous()
        if not self._in_padding(local):
            self.padded = None
            self.place(local)
        assert self.padded is not None
        return self.padded

    def place(self, piece: torch.Tensor) -> torch.Tensor:
        """Copies this rank's rows into fresh memory, padded where needed; returns the rows.

        Rows cut on dim 0 stay a view of the padded memory, so an optimizer step needs no copy afterwards.
        """
        rows = tuple(piece.shape)
        if rows == self.plan.padded_shard_shape:
            return piece.clone(memory_format=torch.contiguous_format)
        self.padded = piece.new_zeros(self.plan.padded_shard_shape)
        view = self.padded.narrow(self._dim, 0, rows[self._dim])
        view.copy_(piece)
        return view if self._dim == 0 else view.contiguous()

    def _in_padding(self, local: torch.Tensor) -> bool:
        padded = self.padded
        return (
            padded is not None
            and self._dim == 0
            and local.device == padded.device
            and local.dtype == padded.dtype
            and local.untyped_storage()._cdata == padded.untyped_storage()._cdata
            and local.storage_offset() == padded.storage_offset()
        )

    @property
    def _dim(self) -> int:
        assert self.plan.shard_dim is not None
        return self.plan.shard_dim

    def unpad(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a padded shard."""
        rows = self.plan.shard_shape
        if tuple(shard.shape) == rows:
            return shard
        return shard.narrow(self._dim, 0, rows[self._dim]).contiguous()

    def to_dtensor(self, local: torch.Tensor) -> DTensor:
        """A local shard under the parameter's combined placement."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.plan.placements,
            run_check=False,
            shape=torch.Size(self.plan.shape),
            stride=contiguous_stride(self.plan.shape),
        )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    stride, out = 1, []
    for size in reversed(shape):
        out.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(out))
