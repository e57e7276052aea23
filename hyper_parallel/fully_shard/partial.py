"""Gradients that tensor parallelism left as partial sums: summed once, in the reduce dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from hyper_parallel.fully_shard.param import HSDPParam
from hyper_parallel.torch_compat.eager import dtensor_from_local, dtensor_local

__all__ = ["sum_partial_gradients"]


def sum_partial_gradients(
    entries: Sequence[tuple[HSDPParam, Tensor]], dtype: torch.dtype
) -> list[Tensor]:
    """Returns local gradients whose placements on the tp and ep dims are the parameters' own.

    Terms of replicated parameters (e.g. norm weights under sequence parallelism) are summed in one
    all-reduce for all parameters with the same dims. Batch dims are left to the reduction.

    Args:
        entries: Parameters with their unsharded gradients.
        dtype: The reduce dtype; a partial sum is cast to it before it is summed.
    """
    locals_: list[Tensor] = []
    sums: dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype], list[int]] = {}
    for index, (param, grad) in enumerate(entries):
        if not isinstance(grad, DTensor):
            locals_.append(grad)
            continue
        mesh = grad.device_mesh
        wanted = _wanted(param, grad)
        if wanted == tuple(grad.placements):
            locals_.append(dtensor_local(grad))
            continue
        local = dtensor_local(grad)
        local = local if local.is_complex() else local.to(dtype)
        changed = tuple(
            d
            for d, (old, new) in enumerate(zip(grad.placements, wanted, strict=True))
            if old != new
        )
        if all(_is_sum_to_replicate(grad.placements[d], wanted[d]) for d in changed):
            sums.setdefault((mesh, changed, local.dtype), []).append(index)
            locals_.append(local)
        else:
            cast = dtensor_from_local(local, mesh, grad.placements, grad.shape)
            locals_.append(dtensor_local(cast.redistribute(placements=wanted)))
    for (mesh, dims, _), indices in sums.items():
        flat = torch.cat([locals_[i].reshape(-1) for i in indices])
        for dim in dims:
            if mesh.size(dim) > 1:
                dist.all_reduce(flat, group=mesh.get_group(dim))
        for i, part in zip(indices, flat.split([locals_[i].numel() for i in indices]), strict=True):
            locals_[i] = part.view(locals_[i].shape)
    return locals_


def _wanted(param: HSDPParam, grad: DTensor) -> tuple[Placement, ...]:
    names = grad.device_mesh.mesh_dim_names or ("",) * grad.device_mesh.ndim
    batch = param.layout.batch_dims
    return tuple(
        have if name in batch else own
        for name, have, own in zip(names, grad.placements, param.unsharded_placements, strict=True)
    )


def _is_sum_to_replicate(old: Placement, new: Placement) -> bool:
    return isinstance(old, Partial) and old.reduce_op == "sum" and new.is_replicate()
