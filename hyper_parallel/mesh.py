"""Meshes as values, and the meshes of hybrid sharding.

A :class:`MeshLayout` is a value (frozen, hashable, without process groups), so a layout of
thousands of ranks can be planned on a laptop. :func:`build_fsdp_meshes` makes the views that a
trainer passes around: the data-parallel dim for loading data and the fsdp mesh for sharding are
different meshes of the same ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel.errors import MeshError
from hyper_parallel.roles import RECOGNISED_NAMES, ROLE_NAMES, MeshRoles, infer_roles
from hyper_parallel.torch_compat.distributed import flatten_mesh, mesh_ranks, unflatten_mesh

__all__ = [
    "RECOGNISED_NAMES",
    "ROLE_NAMES",
    "MeshLayout",
    "MeshRoles",
    "ParallelState",
    "build_fsdp_meshes",
    "infer_roles",
    "validate_hybrid_shard_args",
]


@dataclass(frozen=True)
class MeshLayout:
    """A mesh as a value: names, sizes, global ranks and roles, seen from one rank.

    No process group is needed or made, so any rank of any mesh can be laid out anywhere.

    Attributes:
        dim_names: Names of the mesh dims; the roles' names on an unnamed mesh.
        shape: Sizes of the mesh dims.
        ranks: Global ranks in row-major order.
        rank: The global rank whose view this is.
        roles: What each dim is for.

    Raises:
        MeshError: Sizes and ranks disagree, a rank occurs twice, or ``rank`` is not in the mesh.

    Example:
        >>> names, roles = infer_roles(("dp_replicate", "dp_shard", "tp"), (2, 2, 2))
        >>> layout = MeshLayout(names, (2, 2, 2), tuple(range(8)), 5, roles)
        >>> layout.ranks_along(("dp_shard",)), layout.ranks_along(("dp_replicate",))
        ((5, 7), (1, 5))
    """

    dim_names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    rank: int
    roles: MeshRoles

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks) or len(self.shape) != len(self.dim_names):
            raise MeshError(
                f"mesh dims {self.dim_names} of shape {self.shape} hold {math.prod(self.shape)} "
                f"ranks, got {len(self.ranks)}"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise MeshError(f"a rank occurs twice in the mesh: {self.ranks}")
        if self.rank not in self.ranks:
            raise MeshError(
                f"rank {self.rank} is not in the mesh ({self.describe()}); only its ranks "
                f"{_short(self.ranks)} may plan, shard or run on it"
            )

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        roles: MeshRoles | Mapping[str, str | Sequence[str]] | None = None,
        rank: int | None = None,
    ) -> MeshLayout:
        """Reads a ``DeviceMesh``.

        Args:
            mesh: The mesh; a slice of a larger mesh works too.
            roles: As in :func:`infer_roles`.
            rank: The global rank whose view is wanted; this process's rank by default.

        Raises:
            MeshError: A dim has no role, or the rank is not in the mesh.
        """
        if not isinstance(mesh, DeviceMesh):
            raise MeshError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__} {mesh!r}")
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            shape, ranks = mesh_ranks(mesh)
        except RuntimeError as error:  # a slice that this process has no part in
            raise MeshError(
                f"rank {rank} is not in the mesh with dims {mesh.mesh_dim_names}; only its ranks "
                f"may plan, shard or run on it"
            ) from error
        names, found = infer_roles(mesh.mesh_dim_names, shape, roles)
        return cls(names, shape, ranks, rank, found)

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """The position of ``rank``, one index a mesh dim."""
        index = self.ranks.index(self.rank)
        return tuple(
            index // math.prod(self.shape[d + 1 :]) % size for d, size in enumerate(self.shape)
        )

    @cached_property
    def digest(self) -> str:
        """Eight hex digits that are equal on all ranks: of names, sizes and ranks."""
        text = repr((self.dim_names, self.shape, self.ranks))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @cached_property
    def batch_dims(self) -> tuple[str, ...]:
        """The dims whose ranks see different data, in mesh order.

        An ``ep`` dim is one of them when ``shard`` or ``replicate`` names it too: that is how a
        mesh says that tokens are split over ep.
        """
        data = {*self.roles.replicate, *self.roles.shard, *self.roles.cp}
        return tuple(name for name in self.dim_names if name in data)

    def axes(self, names: str | Iterable[str]) -> tuple[str, ...]:
        """Puts dim names into mesh order.

        Raises:
            MeshError: A name is not a dim of this mesh.
        """
        wanted = {names} if isinstance(names, str) else set(names)
        unknown = wanted - set(self.dim_names)
        if unknown:
            raise MeshError(
                f"mesh ({self.describe()}) has no dim {', '.join(map(repr, sorted(unknown)))}"
            )
        return tuple(name for name in self.dim_names if name in wanted)

    def size(self, axes: str | Iterable[str]) -> int:
        """Returns the number of ranks along ``axes`` together; 1 for no axes."""
        return math.prod(self.shape[self.dim_names.index(axis)] for axis in self.axes(axes))

    def ranks_along(self, axes: str | Iterable[str]) -> tuple[int, ...]:
        """Returns the global ranks of this rank's group along ``axes``.

        The order is row-major over the axes in mesh order, whatever order they are given in: it is
        the rank order of the flattened process group.
        """
        wanted = self.axes(axes)
        if wanted not in self._known_groups:
            self._known_groups[wanted] = self._enumerate(wanted)
        return self._known_groups[wanted]

    @cached_property
    def _known_groups(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        # Thousands of parameters ask for the same few groups; they share one tuple each.
        return {}

    def _enumerate(self, wanted: tuple[str, ...]) -> tuple[int, ...]:
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        choices = [
            range(size) if name in wanted else (here,)
            for name, size, here in zip(self.dim_names, self.shape, self.coordinate, strict=True)
        ]
        return tuple(
            self.ranks[sum(c * s for c, s in zip(point, strides, strict=True))]
            for point in product(*choices)
        )

    def group_name(self, axes: str | Iterable[str]) -> str:
        """Returns the alias of the group along ``axes``: the same text on every rank."""
        return f"hp:{'.'.join(self.axes(axes))}:{self.digest}"

    def describe(self) -> str:
        """Returns e.g. ``dp_replicate=2, dp_shard=4``."""
        return ", ".join(f"{n}={s}" for n, s in zip(self.dim_names, self.shape, strict=True))


def _short(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 16:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, …, {ranks[-1]}] ({len(ranks)} ranks)"


def build_fsdp_meshes(
    device_type: str, world_size: int, context_parallel_size: int, dp_replicate_size: int
) -> dict[str, DeviceMesh]:
    """Builds the views of one world that a trainer with hybrid sharding and context parallel needs.

    Hybrid sharding makes the groups that shard a parameter smaller; it does not change which ranks
    load different data. So there are two readings of the same ranks. With 8 ranks, context size 2
    and 2 replicas::

        dp_cp  (dp=4, cp=2)                  the world
        dp     (dp=4), cp (cp=2)             its dims: loading data, splitting sequences
        fsdp   (dp_replicate=2, dp_shard=4)  what parameters are sharded on

    The ranks of a cp group see different parts of a sequence, so they are data-parallel ranks to a
    parameter: the shard axis of ``fsdp`` is the part of ``dp`` that is not replicated, times
    ``cp``. With context size 1, ``fsdp`` is ``dp`` itself when there is one replica, else ``dp``
    split in two. It is always a 1D or 2D mesh that ``fully_shard`` takes as it is.

    Args:
        device_type: As for ``init_device_mesh``.
        world_size: The number of ranks.
        context_parallel_size: Ranks that share a sequence.
        dp_replicate_size: Replicas of the sharded parameters; 1 shards over all data ranks.

    Returns:
        The meshes ``dp_cp``, ``dp``, ``cp`` and ``fsdp``.

    Raises:
        MeshError: A size below 1, or one that does not divide; the message has the numbers.

    Example:
        >>> build_fsdp_meshes("cpu", 8, 1, 2)["fsdp"].mesh_dim_names
        ('dp_replicate', 'dp_shard')
    """
    _check_hybrid_sizes(world_size, context_parallel_size, dp_replicate_size)
    dp_size = world_size // context_parallel_size
    root = init_device_mesh(
        device_type, (dp_size, context_parallel_size), mesh_dim_names=("dp", "cp")
    )
    data = root["dp"] if context_parallel_size == 1 else flatten_mesh(root, "dp_cp")
    shard_size = data.size() // dp_replicate_size
    if dp_replicate_size > 1:
        fsdp = unflatten_mesh(
            data, 0, (dp_replicate_size, shard_size), ("dp_replicate", "dp_shard")
        )
    elif context_parallel_size > 1:
        fsdp = unflatten_mesh(data, 0, (shard_size,), ("dp_shard",))
    else:
        fsdp = data
    return {"dp_cp": root, "dp": root["dp"], "cp": root["cp"], "fsdp": fsdp}


def validate_hybrid_shard_args(args: Any) -> None:
    """Checks a training topology before anything is started.

    Args:
        args: Has ``dp_replicate_size``, ``context_parallel_size``, and either ``world_size`` or
            ``actor_num_nodes`` and ``actor_num_gpus_per_node``.

    Raises:
        MeshError: The sizes cannot form a hybrid-shard mesh; the message has the numbers.
    """
    world_size = getattr(args, "world_size", None)
    if world_size is None:
        world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    _check_hybrid_sizes(world_size, args.context_parallel_size, args.dp_replicate_size)


def _check_hybrid_sizes(world: int, context: int, replicate: int) -> None:
    for name, size in (
        ("dp_replicate_size", replicate),
        ("world_size", world),
        ("context_parallel_size", context),
    ):
        if not isinstance(size, int) or isinstance(size, bool):
            raise MeshError(f"{name} must be an int, got {size!r} of type {type(size).__name__}")
        if size < 1:
            raise MeshError(f"{name} must be at least 1, got {size}")
    if world % context:
        raise MeshError(
            f"world_size({world}) must be divisible by context_parallel_size({context})"
        )
    if (world // context) % replicate:
        raise MeshError(
            f"data_parallel_size({world // context}) must be divisible by "
            f"dp_replicate_size({replicate})"
        )


@dataclass(frozen=True)
class ParallelState:
    """The named meshes of a trainer.

    Attributes:
        meshes: Name to mesh, e.g. what :func:`build_fsdp_meshes` returns.
    """

    meshes: Mapping[str, DeviceMesh]

    def get_mesh(self, name: str) -> DeviceMesh:
        """Returns the mesh called ``name``.

        Raises:
            MeshError: There is none; the message lists the names.
        """
        if name not in self.meshes:
            raise MeshError(
                f"no mesh is called {name!r}; the meshes are {', '.join(sorted(self.meshes))}"
            )
        return self.meshes[name]
