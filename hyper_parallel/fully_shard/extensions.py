"""All-gather extensions: tensor subclasses that say what is gathered and what comes of it.

A slice whose local tensor has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (PyTorch's
protocol, e.g. for fp8 weights) is asked for the tensors to send and for the parameter to compute
with. Upstream's two signatures of ``fsdp_pre_all_gather`` are both understood.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyper_parallel.errors import PlacementError

if TYPE_CHECKING:
    from hyper_parallel.fully_shard.slice import ParamSlice

__all__ = ["GatherExtension"]

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class GatherExtension:
    """The extension of one parameter, with what its pre-hook left for its post-hook."""

    def __init__(self, param: ParamSlice) -> None:
        self._param = param
        self._metadata: Any = None
        self._sizes: list[torch.Size] = []

    @classmethod
    def of(cls, param: ParamSlice) -> GatherExtension | None:
        """Returns the extension of a parameter's local tensor, or None.

        Raises:
            PlacementError: Only one of the two methods is there, or the parameter is not cut
                evenly on dim 0.
        """
        local = param.local_tensor
        has = [hasattr(local, name) for name in (PRE, POST)]
        if not any(has):
            return None
        if not all(has):
            raise PlacementError(
                f"{param.fqn}: {type(local).__name__} defines only one of {PRE} and {POST}; an "
                f"all-gather extension needs both"
            )
        if param.geometry is None:
            return None
        return cls(param)

    def pre_all_gather(self) -> list[Tensor]:
        """Returns the flat tensors to send.

        Raises:
            PlacementError: The signature is not known, or uneven slices were not padded.
        """
        param = self._param
        local: Any = param.local_tensor
        if param.offload_to_cpu:
            local = local.to(param.device, non_blocking=True)
        group_mesh = param.shard_mesh
        count = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if count == 1:
            inputs, self._metadata = local.fsdp_pre_all_gather(group_mesh)
        elif count == 5:
            full = torch.Size(param.plan.local_shape)
            stride = torch.empty(full, device="meta").stride()
            module = param.slots[0].module if param.slots else None
            inputs, self._metadata = local.fsdp_pre_all_gather(
                group_mesh, full, stride, module, param.mp_policy
            )
        else:
            raise PlacementError(
                f"{param.fqn}: {PRE} takes (mesh) or (mesh, outer_size, outer_stride, module, "
                f"mp_policy), {type(local).__name__} has {count} arguments"
            )
        self._check_padding(inputs)
        self._sizes = [tensor.size() for tensor in inputs]
        return [tensor.contiguous().view(-1) for tensor in inputs]

    def post_all_gather(
        self, outputs: list[Tensor], out: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the full parameter and the inner tensors that are freed with it.

        Args:
            outputs: Flat gathered tensors.
            out: The parameter of an earlier gather, to be filled again.
        """
        gathered = tuple(
            tensor.view(-1, *size[1:]) for tensor, size in zip(outputs, self._sizes, strict=True)
        )
        local: Any = self._param.local_tensor
        dtype = self._param.param_dtype
        metadata, self._metadata = self._metadata, None
        if out is not None:
            local.fsdp_post_all_gather(gathered, metadata, dtype, out=out)
            return out, []
        full, inner = local.fsdp_post_all_gather(gathered, metadata, dtype)
        return full.as_strided(self._param.plan.local_shape, full.stride()), list(inner)

    def _check_padding(self, inputs: tuple[Tensor, ...]) -> None:
        padded = torch.Size(self._param.plan.padded_shard_shape)
        even = len(set(self._param.plan.lengths)) == 1
        if not even and any(tensor.size() != padded for tensor in inputs):
            raise PlacementError(
                f"{self._param.fqn}: its slices are uneven, so {PRE} must return tensors of the "
                f"padded shape {tuple(padded)}, got {[tuple(t.size()) for t in inputs]}"
            )
