"""Process groups of a mesh: one cache for the process, made once, named the same on every rank.

A program refers to groups by an alias (``MeshLayout.group_name``) that is the same text on every
rank, so the text of a program is the same on every rank too; the alias resolves to the rank's own
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.errors import MeshError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.torch_compat.distributed import flattened_group, register_group_alias

__all__ = [
    "GroupInfo",
    "clear_group_cache",
    "get_group_info",
    "get_inner_group_info",
    "get_second_group_info",
    "inner_group_name",
]

# The only mutable module state: (layout digest, axes) -> the rank's group along these axes, and
# (purpose, ranks) -> another group of the same ranks. An entry is dropped when its group is no
# longer alive, e.g. after destroy_process_group().
_GROUPS: dict[tuple[str, tuple[str, ...]], dist.ProcessGroup] = {}


@dataclass(frozen=True)
class GroupInfo:
    """The ranks that run one collective together.

    Attributes:
        group_name: The alias by which ``_c10d_functional`` ops find the group; equal on all ranks.
        group: The process group, or None for a group of one, which never communicates.
        rank_size: The number of ranks in the group.
    """

    group_name: str
    group: dist.ProcessGroup | None
    rank_size: int


def get_group_info(mesh: DeviceMesh, layout: MeshLayout, axes: str | Iterable[str]) -> GroupInfo:
    """Returns this rank's group along mesh dims, making it at most once.

    A group along several dims has to be made, which is collective: every rank of the group must ask
    for the same axes in the same order. Dims of size 1 never cost a group.

    Args:
        mesh: The mesh that ``layout`` was read from.
        layout: The mesh as a value.
        axes: Mesh dims in any order; the group's ranks are row-major in mesh order.

    Raises:
        MeshError: An axis is not in the mesh, or the group's ranks are not the layout's.
    """
    axes = layout.axes(axes)
    name, size = layout.group_name(axes), layout.size(axes)
    if size == 1:
        return GroupInfo(name, None, 1)
    live = tuple(axis for axis in axes if layout.size(axis) > 1)
    key = (layout.digest, live)
    group = _GROUPS.get(key)
    if group is None or not _is_alive(group):
        _forget_destroyed_groups()
        group = _find_group(mesh, layout, live)
        _GROUPS[key] = group
    register_group_alias(name, group)
    return GroupInfo(name, group, size)


def inner_group_name(layout: MeshLayout, axes: str | Iterable[str], size: int) -> str:
    """The alias of the group of ``size`` consecutive ranks around this rank, inside its group along ``axes``."""
    return f"{layout.group_name(axes)}/{size}"


def get_inner_group_info(
    mesh: DeviceMesh, layout: MeshLayout, axes: str | Iterable[str], size: int
) -> GroupInfo:
    """Returns the group of ``size`` consecutive ranks around this rank, inside its group along mesh dims.

    It is what an integer ``reshard_after_forward`` gathers over in backward. Making it is collective: every rank of the
    group must ask for the same axes and size in the same order.

    Args:
        mesh: The mesh that ``layout`` was read from.
        layout: The mesh as a value.
        axes: Mesh dims in any order.
        size: Ranks of the smaller group; a divisor of the size of the whole.

    Raises:
        MeshError: ``size`` is no divisor.
    """
    axes = layout.axes(axes)
    whole = layout.size(axes)
    if size < 1 or whole % size:
        raise MeshError(f"a group of {size} ranks does not divide the {whole} ranks along {axes}")
    name = inner_group_name(layout, axes, size)
    if size == 1:
        return GroupInfo(name, None, 1)
    key = (layout.digest, (*axes, f"/{size}"))
    group = _GROUPS.get(key)
    if group is None or not _is_alive(group):
        _forget_destroyed_groups()
        ranks = layout.ranks_along(axes)
        start = ranks.index(layout.rank) // size * size
        group = _make_group(ranks[start : start + size])
        _GROUPS[key] = group
    register_group_alias(name, group)
    return GroupInfo(name, group, size)


def get_second_group_info(info: GroupInfo, purpose: str) -> GroupInfo:
    """Returns another group of the same ranks: collectives of one communicator run one by one.

    Making it is collective: every rank of the group must ask for it in the same order.

    Args:
        info: The group; of one rank, it is returned itself.
        purpose: What the other group is for; one is made for each.
    """
    if info.group is None:
        return info
    ranks = dist.get_process_group_ranks(info.group)
    key = (purpose, tuple(str(rank) for rank in ranks))
    group = _GROUPS.get(key)
    if group is None or not _is_alive(group):
        _forget_destroyed_groups()
        group = _make_group(ranks)
        _GROUPS[key] = group
    return GroupInfo(f"{info.group_name}/{purpose}", group, info.rank_size)


def clear_group_cache() -> None:
    """Forgets every cached group; the groups themselves stay until they are destroyed."""
    _GROUPS.clear()


def _forget_destroyed_groups() -> None:
    """Lets go of groups that were destroyed: their threads and buffers end with the last reference."""
    for key in [key for key, group in _GROUPS.items() if not _is_alive(group)]:
        del _GROUPS[key]


def _find_group(mesh: DeviceMesh, layout: MeshLayout, axes: tuple[str, ...]) -> dist.ProcessGroup:
    if len(axes) == 1:
        group = mesh.get_group(layout.dim_names.index(axes[0]))
    else:
        found = flattened_group(mesh, axes)
        group = _make_group(layout.ranks_along(axes)) if found is None else found
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks != layout.ranks_along(axes):
        raise MeshError(
            f"group along {axes} of mesh ({layout.describe()}): the process group has ranks "
            f"{list(ranks)}, the layout of rank {layout.rank} says "
            f"{list(layout.ranks_along(axes))}; pass the mesh that the layout was read from"
        )
    return group


def _make_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Makes a group that only its own ranks have to ask for.

    It is not made by flattening the mesh: a DTensor that finds a flattened mesh gathers over it in one step, which is
    wrong for a tensor cut unevenly over two dims.
    """
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False
