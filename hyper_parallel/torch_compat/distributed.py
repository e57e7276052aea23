"""Semi-private names of ``torch.distributed``: strided shards, group aliases, mesh reshaping.

Checked on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "flatten_group",
    "is_shard",
    "is_strided_shard",
    "register_group_alias",
    "strided_shard",
    "unflatten_mesh",
]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Returns ``_StridedShard(dim, split_factor)``: cut after the dims to its right."""
    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: object) -> bool:
    """Tells whether ``placement`` is a ``_StridedShard`` (which is no subclass of ``Shard``)."""
    return isinstance(placement, _StridedShard)


def is_shard(placement: object) -> bool:
    """Tells whether ``placement`` cuts a tensor dim: ``Shard`` or ``_StridedShard``."""
    return isinstance(placement, Shard | _StridedShard)


def register_group_alias(alias: str, group: dist.ProcessGroup) -> None:
    """Makes ``alias`` a name of ``group`` for ``_c10d_functional`` ops, replacing a stale one."""
    name = GroupName(alias)
    try:
        current = _resolve_process_group(name)
    except RuntimeError:
        current = None
    if current is not None:
        if current == group:
            return
        _unregister_process_group(name)
    _register_process_group(name, group)


def flatten_group(
    mesh: DeviceMesh, dim_names: Sequence[str], axes: Sequence[str], name: str
) -> dist.ProcessGroup:
    """Returns this rank's group over several dims of ``mesh``; collective over the mesh's root.

    A flattened mesh that exists already (made by the user or by an earlier call) is used again.

    Args:
        mesh: The mesh.
        dim_names: Names of the mesh's dims, for a mesh that has none of its own.
        axes: The dims to flatten, in mesh order.
        name: What to call the flattened dim if it has to be made.
    """
    if mesh.mesh_dim_names is None:
        mesh = DeviceMesh(
            mesh.device_type, mesh.mesh, mesh_dim_names=tuple(dim_names), _init_backend=False
        )
        mesh._dim_group_names = []
    part = mesh[tuple(axes)] if tuple(axes) != mesh.mesh_dim_names else mesh
    ranks = part.mesh.flatten().tolist()
    for flat in part._get_root_mesh()._flatten_mapping.values():
        if flat.mesh.tolist() == ranks:
            return flat.get_group()
    return part._flatten(name).get_group()


def unflatten_mesh(
    mesh: DeviceMesh, dim: int, sizes: Sequence[int], names: Sequence[str]
) -> DeviceMesh:
    """Returns ``mesh`` with dim ``dim`` split into several; keeps the root mesh."""
    return mesh._unflatten(dim, tuple(sizes), tuple(names))
