"""Combined placements: one DTensor placement a mesh dim that says FSDP, TP and EP together.

FSDP cuts what TP and EP have left, so in the combined placement the data dims act *last* although
they usually come *first* in the mesh. DTensor reads placements from left to right; where FSDP cuts
the very tensor dim that a mesh dim to its right already cuts, the placement is therefore
``_StridedShard(dim, split_factor)``, with ``split_factor`` the number of slices made to the right.
For a ``[8, …]`` weight on ``(dp_shard=2, tp=2)``, both on dim 0::

    rank  (dp, tp)   rows     placements  (_S(0,2), S(0))
    0     (0, 0)     0 1      tp 0 has rows 0-3, FSDP cuts them in two
    1     (0, 1)     4 5      tp 1 has rows 4-7
    2     (1, 0)     2 3
    3     (1, 1)     6 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hyper_parallel.errors import MeshError, PlacementError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.torch_compat.distributed import (
    is_strided_shard,
    shard_dim_of,
    split_factor_of,
    strided_shard,
)

__all__ = [
    "combine_placements",
    "dtensor_placements",
    "format_placement",
    "format_placements",
    "local_shape",
    "model_parallel_placements",
    "normalise_dim",
    "shard_lengths",
    "shard_offsets",
    "take_model_parallel_part",
    "take_shard",
]


def shard_lengths(size: int, factors: Sequence[int]) -> tuple[int, ...]:
    """Returns how many rows each rank of the shard axis holds, as DTensor cuts them.

    One ``torch.chunk`` a mesh dim, from left to right, each on what the dims before left over. Rows
    are contiguous and in rank order, so gathering the shards in rank order restores the tensor.

    Args:
        size: Rows to cut (after TP and EP).
        factors: Sizes of the shard dims, in mesh order.

    Returns:
        Rows per rank, row-major over ``factors``; ranks at the end may hold fewer or none.

    Example:
        >>> shard_lengths(10, (4,)), shard_lengths(10, (2, 2))
        ((3, 3, 3, 1), (3, 2, 3, 2))
    """
    lengths: tuple[int, ...] = (size,)
    for factor in factors:
        lengths = tuple(part for length in lengths for part in _chunk_lengths(length, factor))
    return lengths


def shard_offsets(size: int, factors: Sequence[int]) -> tuple[int, ...]:
    """Returns each rank's first row; the running sum of :func:`shard_lengths`."""
    offsets, start = [], 0
    for length in shard_lengths(size, factors):
        offsets.append(start)
        start += length
    return tuple(offsets)


def _chunk_lengths(size: int, chunks: int) -> tuple[int, ...]:
    full = -(-size // chunks)
    return tuple(max(0, min(full, size - i * full)) for i in range(chunks))


def model_parallel_placements(
    fqn: str,
    shape: Sequence[int],
    layout: MeshLayout,
    placements: Mapping[str, Placement] | None,
) -> dict[str, Placement]:
    """Checks what a TP or EP plan says about a parameter.

    Args:
        fqn: The parameter's name, for messages.
        shape: Its full shape.
        layout: The mesh.
        placements: Mesh dim to ``Shard`` or ``Replicate``; dims left out are replicated.

    Returns:
        The dims that cut the parameter, in mesh order, tensor dims made non-negative.

    Raises:
        PlacementError: A dim without a tp or ep role, a placement of another kind, a tensor dim
            that does not exist or that the mesh dims do not divide.
        MeshError: A mesh dim that does not exist.
    """
    placements = dict(placements or {})
    missing = [axis for axis in placements if axis not in layout.dim_names]
    if missing:
        raise MeshError(
            f"{fqn}: a TP/EP plan names mesh dim {missing[0]!r}, but the mesh has "
            f"({layout.describe()}); add the dim to the mesh or drop the plan"
        )
    cut: dict[str, Placement] = {}
    left = list(shape)
    for axis in layout.axes(placements):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        stated = shard_dim_of(placement)
        if stated is None:
            raise PlacementError(
                f"{fqn}: a TP/EP plan places a parameter as Shard or Replicate, got {placement} on "
                f"mesh dim {axis!r}"
            )
        if axis not in layout.roles.tp + layout.roles.ep:
            raise PlacementError(
                f"{fqn}: mesh dim {axis!r} has role {'/'.join(layout.roles.of(axis))}, but only tp "
                f"and ep dims take a TP/EP placement, got {placement}"
            )
        dim = normalise_dim(fqn, shape, stated)
        size = layout.size(axis)
        if left[dim] % size:
            raise PlacementError(
                f"{fqn}: dim {dim} of shape {tuple(shape)} has {left[dim]} rows to cut over mesh "
                f"dim {axis!r} of size {size}, which does not divide; change the plan or the mesh"
            )
        left[dim] //= size
        cut[axis] = placement if is_strided_shard(placement) else Shard(dim)
    return cut


def normalise_dim(fqn: str, shape: Sequence[int], dim: int) -> int:
    """Returns ``dim`` as a non-negative index into ``shape``.

    Raises:
        PlacementError: The tensor has no such dim.
    """
    if not -len(shape) <= dim < len(shape):
        raise PlacementError(
            f"{fqn}: Shard({dim}) names no dim of shape {tuple(shape)}; legal dims are "
            f"0 to {len(shape) - 1}"
        )
    return dim % len(shape)


def dtensor_placements(
    fqn: str, param: torch.Tensor, layout: MeshLayout
) -> Mapping[str, Placement]:
    """Reads what TP and EP did to a parameter that is a DTensor already; nothing if it is not.

    Raises:
        PlacementError: Its mesh has no dim names, or another dim than tp or ep cuts it already.
    """
    if not isinstance(param, DTensor):
        return {}
    names = param.device_mesh.mesh_dim_names
    if names is None:
        raise PlacementError(
            f"{fqn}: it is a DTensor on a mesh without dim names, so its tp or ep dims are "
            f"unknown; parallelize it on a slice of the named mesh, e.g. mesh['tp']"
        )
    for axis, placement in zip(names, param.placements, strict=True):
        if axis not in layout.roles.tp + layout.roles.ep and not placement.is_replicate():
            raise PlacementError(
                f"{fqn}: it is a DTensor that is {placement} on mesh dim {axis!r} already; shard a "
                f"model once, and pass one that only tp or ep dims have placed"
            )
    return {
        axis: placement
        for axis, placement in zip(names, param.placements, strict=True)
        if not placement.is_replicate()
    }


def combine_placements(
    layout: MeshLayout,
    model_parallel: Mapping[str, Placement],
    shard_axes: Sequence[str],
    shard_dim: int | None,
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Builds the combined placement of a parameter, sharded and unsharded.

    Args:
        layout: The mesh.
        model_parallel: What TP and EP cut (:func:`model_parallel_placements`).
        shard_axes: Mesh dims over which FSDP cuts.
        shard_dim: The tensor dim that FSDP cuts, or None if it does not.

    Returns:
        ``(placements, unsharded_placements)``, one entry a mesh dim each; they differ on
        ``shard_axes`` only.
    """
    unsharded = tuple(model_parallel.get(name, Replicate()) for name in layout.dim_names)
    if shard_dim is None:
        return unsharded, unsharded
    sharded = list(unsharded)
    for index, name in enumerate(layout.dim_names):
        if name not in shard_axes:
            continue
        split = 1
        for right in range(index + 1, len(layout.dim_names)):
            if shard_dim_of(unsharded[right]) == shard_dim:
                split *= layout.shape[right]
        sharded[index] = strided_shard(shard_dim, split) if split > 1 else Shard(shard_dim)
    return tuple(sharded), unsharded


def local_shape(
    shape: Sequence[int], layout: MeshLayout, placements: Mapping[str, Placement]
) -> tuple[int, ...]:
    """Returns the shape that TP and EP leave on a rank (they divide evenly)."""
    left = list(shape)
    for axis, placement in placements.items():
        dim = shard_dim_of(placement)
        if dim is not None:
            left[dim] //= layout.size(axis)
    return tuple(left)


def take_model_parallel_part(
    tensor: torch.Tensor, layout: MeshLayout, placements: Sequence[Placement]
) -> torch.Tensor:
    """Returns this rank's TP/EP slice of a full tensor, as DTensor would cut it.

    Args:
        tensor: The full tensor.
        layout: The mesh, seen from one rank.
        placements: ``unsharded_placements``: one entry a mesh dim; they divide evenly.

    Returns:
        A view where the slice is contiguous, else a copy.
    """
    for placement, size, index in zip(placements, layout.shape, layout.coordinate, strict=True):
        dim = shard_dim_of(placement)
        if dim is None or size == 1:
            continue
        # A strided shard takes the index-th of `size` parts of each of `split` slices.
        split = split_factor_of(placement)
        rows = tensor.shape[dim] // (split * size)
        parts = tensor.unflatten(dim, (split, size, rows)).select(dim + 1, index)
        tensor = parts.flatten(dim, dim + 1)
    return tensor


def take_shard(
    tensor: torch.Tensor, shard_dim: int, lengths: Sequence[int], index: int
) -> torch.Tensor:
    """Returns one rank's shard of an unsharded local tensor, as a view.

    Args:
        tensor: What TP and EP left.
        shard_dim: The dim that FSDP cuts.
        lengths: Rows per rank of the shard group.
        index: The rank's place in the shard group.
    """
    return tensor.narrow(shard_dim, sum(lengths[:index]), lengths[index])


def format_placement(placement: Placement) -> str:
    """Returns a short, stable text: ``R``, ``S(0)``, ``_S(0,2)``."""
    if isinstance(placement, Replicate):
        return "R"
    dim = shard_dim_of(placement)
    if is_strided_shard(placement):
        return f"_S({dim},{split_factor_of(placement)})"
    return str(placement) if dim is None else f"S({dim})"


def format_placements(placements: Sequence[Placement]) -> str:
    """Returns e.g. ``[R, _S(0,2), S(0)]``, in mesh order."""
    return f"[{', '.join(format_placement(placement) for placement in placements)}]"
