"""Semi-private names of ``torch.distributed``: strided shards, group aliases, mesh reshaping.

Checked on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "flatten_mesh",
    "flattened_group",
    "is_shard",
    "is_strided_shard",
    "mesh_ranks",
    "register_group_alias",
    "shard_dim_of",
    "split_factor_of",
    "strided_shard",
    "unflatten_mesh",
    "versions",
]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Returns ``_StridedShard(dim, split_factor)``: cut after the mesh dims to its right."""
    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: object) -> bool:
    """Tells whether ``placement`` is a ``_StridedShard`` (which is no subclass of ``Shard``)."""
    return isinstance(placement, _StridedShard)


def is_shard(placement: object) -> bool:
    """Tells whether ``placement`` cuts a tensor dim: ``Shard`` or ``_StridedShard``."""
    return isinstance(placement, Shard | _StridedShard)


def shard_dim_of(placement: object) -> int | None:
    """Returns the tensor dim that a placement cuts, or None."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def split_factor_of(placement: object) -> int:
    """Returns the split factor of a ``_StridedShard``; 1 for any other placement."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def register_group_alias(alias: str, group: dist.ProcessGroup) -> None:
    """Makes ``alias`` a name of ``group`` for ``_c10d_functional`` ops, replacing a stale one."""
    try:
        current = _resolve_process_group(alias)  # type: ignore[arg-type]
    except RuntimeError:
        current = None
    if current is not None:
        if current == group:
            return
        _unregister_process_group(alias)  # type: ignore[arg-type]
    _register_process_group(alias, group)  # type: ignore[arg-type]


def mesh_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a mesh's shape and its global ranks, row-major; works inside a fake tensor mode.

    Raises:
        RuntimeError: The mesh is a slice of a larger one that does not hold this process's rank.
    """
    with unset_fake_temporarily():
        tensor = mesh.mesh
        return tuple(tensor.shape), tuple(tensor.flatten().tolist())


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns ``mesh`` as one dim; collective over the root mesh, made once per name."""
    return mesh._flatten(name)


def unflatten_mesh(
    mesh: DeviceMesh, dim: int, sizes: Sequence[int], names: Sequence[str]
) -> DeviceMesh:
    """Returns ``mesh`` with dim ``dim`` split into several; keeps the root mesh."""
    return mesh._unflatten(dim, tuple(sizes), tuple(names))


def flattened_group(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup | None:
    """Returns this rank's group over several dims if the user has flattened them, else None.

    Args:
        mesh: The mesh.
        axes: The dims, in mesh order.
    """
    if mesh.mesh_dim_names is None:
        return None
    with unset_fake_temporarily():
        part = mesh[tuple(axes)]
        _, ranks = mesh_ranks(part)
        for flat in part._get_root_mesh()._flatten_mapping.values():
            if mesh_ranks(flat) == ((len(ranks),), ranks):
                return flat.get_group()
    return None


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without autograd and without waiting."""
    return value._local_tensor  # type: ignore[attr-defined,no-any-return]


def versions(value: torch.Tensor) -> tuple[int, int]:
    """Counts of the changes in place of a tensor: through itself, and through its local tensor if it is a DTensor."""
    local = local_tensor(value) if isinstance(value, DTensor) else value
    return value._version, local._version


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group that a name or alias stands for on this rank."""
    return _resolve_process_group(name)  # type: ignore[arg-type]
