"""Gradient norms and clipping that are right for every placement and equal on all ranks.

PyTorch's functions take one norm a tensor and combine these; a DTensor on another mesh, a plain
tensor beside DTensors, or an empty shard under the infinity norm makes them wrong or fail. Here
every rank adds up what it holds, so that each element of the model is counted exactly once over
every mesh axis, and one small all-reduce an axis makes the total known to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from hyper_parallel.torch_compat.distributed import is_shard
from hyper_parallel.torch_compat.eager import foreach_mul, foreach_norm

__all__ = ["clip_grad_norm_", "get_total_norm"]


@dataclass
class _MeshTerms:
    """What the tensors on one mesh add to the total: local terms and the axes to reduce over."""

    mesh: DeviceMesh
    axes: set[int] = field(default_factory=set)
    terms: list[tuple[Tensor, DTensor]] = field(default_factory=list)


@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Returns the norm of all tensors together, as if they were one vector.

    Collective over the meshes of the DTensors: their ranks must call it with the same tensors in
    the same order. A plain tensor counts as it is on this rank; beside DTensors its term is the
    mean over the ranks of their mesh, so that the result is equal on all of them even where a
    plain gradient is local to its rank.

    Args:
        tensors: DTensors with any placements on any meshes, and plain tensors; an iterable or one.
        norm_type: The p of the p-norm; may be ``inf``.
        error_if_nonfinite: Raise if the total is nan or infinite.
        foreach: Use the fused implementation; None uses it where the device has it.

    Returns:
        A plain 0-dim tensor, float32 or wider, equal on all ranks.

    Raises:
        RuntimeError: The total is not finite and ``error_if_nonfinite`` is set.

    Example:
        >>> get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return _total_norm(found, found, float(norm_type), error_if_nonfinite, foreach)


@torch.no_grad()
def _listed(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    wrong = next((p for p in found if not isinstance(p, Tensor)), None)
    if wrong is not None:
        raise TypeError(
            f"parameters: expected an iterable of parameters, such as model.parameters(); got {type(wrong).__name__}"
        )
    return found


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place so that their total norm is at most ``max_norm``.

    Collective over the meshes of the parameters; a rank on which some parameters have no gradient
    takes part like any other.

    Args:
        parameters: The parameters whose ``.grad`` is clipped; an iterable or one.
        max_norm: The largest norm allowed.
        norm_type: The p of the p-norm; may be ``inf``.
        error_if_nonfinite: Raise if the total is nan or infinite.
        foreach: Use the fused implementation; None uses it where the device has it.

    Returns:
        The norm before clipping, as :func:`get_total_norm` gives it.

    Raises:
        RuntimeError: The total is not finite and ``error_if_nonfinite`` is set.
        TypeError: ``parameters`` is no iterable of tensors.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> weight.grad = torch.tensor([4.0])
        >>> clip_grad_norm_([weight], 2.0), weight.grad
        (tensor(4.), tensor([2.0000]))
    """
    params = [parameters] if isinstance(parameters, Tensor) else _listed(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    total = _total_norm(grads, params, float(norm_type), error_if_nonfinite, foreach)
    # Multiplying by a factor clamped to 1 needs no synchronisation with the device, an if would.
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for (device, dtype), local in _by_device_and_dtype([_local(grad) for grad in grads]).items():
        scale = factor.to(device=device, dtype=dtype if dtype.is_floating_point else None)
        if foreach is not False:
            foreach_mul(local, scale)
        else:
            for tensor in local:
                tensor.mul_(scale)
    return total


def _total_norm(
    tensors: Sequence[Tensor],
    templates: Sequence[Tensor],
    p: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Adds up ``tensors``; ``templates`` say, equally on all ranks, over which axes to reduce."""
    if not templates:
        return torch.tensor(0.0)
    tensors = [_without_partial(tensor) for tensor in tensors]
    meshes = _meshes(templates)
    locals_ = [_local(tensor) for tensor in tensors]
    powers = _local_powers(locals_, p, foreach)
    plain: list[Tensor] = []
    for tensor, power in zip(tensors, powers, strict=True):
        if isinstance(tensor, DTensor):
            meshes[tensor.device_mesh].terms.append((power, tensor))
        else:
            plain.append(power)
    # A plain tensor is averaged over the largest mesh there is.
    host = max(meshes.values(), key=lambda m: m.mesh.size(), default=None)
    has_plain = any(not isinstance(template, DTensor) for template in templates)
    totals: list[Tensor] = []
    for terms in meshes.values():
        totals.append(_reduce_mesh(terms, plain if terms is host else [], has_plain, host, p))
    if host is None:
        totals.append(_combine(plain, p, _result_device(templates)))
    total = _combine(totals, p, totals[0].device)
    if not math.isinf(p) and p != 0.0:
        total = total.pow(1.0 / p)
    wide = any(template.dtype == torch.float64 for template in templates)
    total = total.to(torch.float64 if wide else torch.float32)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {p} for gradients from `parameters` is non-finite "
            f"({total.item()}), so it cannot be clipped. To disable this error and scale the "
            "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


def _meshes(templates: Sequence[Tensor]) -> dict[DeviceMesh, _MeshTerms]:
    meshes: dict[DeviceMesh, _MeshTerms] = {}
    for template in templates:
        if isinstance(template, DTensor):
            terms = meshes.setdefault(template.device_mesh, _MeshTerms(template.device_mesh))
            terms.axes |= {i for i, p in enumerate(template.placements) if is_shard(p)}
    return meshes


def _reduce_mesh(
    terms: _MeshTerms, plain: list[Tensor], has_plain: bool, host: _MeshTerms | None, p: float
) -> Tensor:
    """Returns the sum (or maximum) over one mesh, equal on all its ranks."""
    mesh = terms.mesh
    device = _mesh_device(mesh)
    axes = set(range(mesh.ndim)) if has_plain and terms is host else terms.axes
    axes = {axis for axis in axes if mesh.size(axis) > 1}
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    counted = []
    for power, tensor in terms.terms:
        # Of the replicas along an axis that is reduced over, the first one counts.
        first = all(coordinate[axis] == 0 for axis in axes if not is_shard(tensor.placements[axis]))
        if first or math.isinf(p):
            counted.append(power)
    share = math.prod(mesh.size(axis) for axis in axes)
    averaged = plain if math.isinf(p) else [power / share for power in plain]
    total = _combine(counted + averaged, p, device)
    for axis in sorted(axes):
        dist.all_reduce(total, op=_reduce_op(p), group=mesh.get_group(axis))
    return total


def _local_powers(locals_: Sequence[Tensor], p: float, foreach: bool | None) -> list[Tensor]:
    """Returns the sum of |x|^p of each tensor (its norm if p is infinite), in float64."""
    powers: dict[int, Tensor] = {}
    filled: list[tuple[int, Tensor]] = []
    for index, local in enumerate(locals_):
        if local.numel() == 0:
            neutral = math.inf if p == -math.inf else 0.0
            powers[index] = torch.full((), neutral, dtype=torch.float64, device=local.device)
        else:
            filled.append((index, local))
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, local in filled:
        groups.setdefault((local.device, local.dtype), []).append((index, local))
    for (_, dtype), members in groups.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        values = [local for _, local in members]
        if foreach is not False:
            norms = foreach_norm(values, p, wide)
        else:
            norms = [torch.linalg.vector_norm(value, p, dtype=wide) for value in values]
        for (index, _), norm in zip(members, norms, strict=True):
            norm = norm.to(torch.float64)
            powers[index] = norm if math.isinf(p) or p == 0.0 else norm.pow(p)
    return [powers[index] for index in range(len(locals_))]


def _combine(values: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    neutral = math.inf if p == -math.inf else 0.0
    if not values:
        return torch.full((), neutral, dtype=torch.float64, device=device)
    stacked = torch.stack([value.to(device) for value in values])
    if p == math.inf:
        return stacked.amax()
    if p == -math.inf:
        return stacked.amin()
    return stacked.sum()


def _reduce_op(p: float) -> Any:
    if p == math.inf:
        return dist.ReduceOp.MAX
    return dist.ReduceOp.MIN if p == -math.inf else dist.ReduceOp.SUM


def _without_partial(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        return tensor.redistribute(
            placements=[Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        )
    return tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _result_device(templates: Sequence[Tensor]) -> torch.device:
    return _local(templates[0]).device


def _by_device_and_dtype(
    tensors: Sequence[Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
