"""Meshes as values: what each mesh dim is for, and which ranks a group of dims joins.

A :class:`MeshLayout` is a value (frozen, hashable, without process groups), so a layout of
thousands of ranks can be planned on a laptop. Roles are found by :func:`infer_roles`, in this
order:

===  =================================================  ===========================================
no.  the first rule that speaks for a dim               its role
===  =================================================  ===========================================
1    ``roles`` is a :class:`MeshRoles`                  exactly what it lists; nothing is inferred
2    ``roles`` is a mapping that names the dim          what the mapping says; a ``cp`` or ``ep``
                                                        dim that only ``shard``/``replicate`` name
                                                        keeps its own role beside it
3    its name is recognised (``RECOGNISED_NAMES``)      the role of that name; a second dim of the
                                                        same role is a ``MeshError``
4    the mesh has no dim names: 1D                      ``(shard,)``
5    the mesh has no dim names: 2D                      ``(replicate, shard)``, as FSDP2 reads it
6    anything else                                      ``MeshError``
===  =================================================  ===========================================

The size of a dim never changes its role: a dim of size 1 keeps its role and its group of one gives
no collective. ``docs/roles.md`` has the boundary cases.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.errors import MeshError

__all__ = ["RECOGNISED_NAMES", "ROLE_NAMES", "MeshLayout", "MeshRoles", "infer_roles"]

ROLE_NAMES: tuple[str, ...] = ("replicate", "shard", "tp", "ep", "cp")

RECOGNISED_NAMES: Mapping[str, tuple[str, ...]] = {
    "replicate": ("dp_replicate", "replicate", "ddp"),
    "shard": ("dp_shard", "fsdp", "shard", "dp", "data"),
    "tp": ("tp", "model"),
    "ep": ("ep", "expert"),
    "cp": ("cp", "context", "sp"),
}

_ROLE_OF_NAME = {name: role for role, names in RECOGNISED_NAMES.items() for name in names}
_DATA_ROLES = frozenset({"replicate", "shard"})
_COMPANION_ROLES = frozenset({"cp", "ep"})
_SINGLE_DIM_ROLES = ("tp", "ep", "cp")


@dataclass(frozen=True, kw_only=True)
class MeshRoles:
    """What each dim of a mesh is for; every role holds the names of its dims.

    ``shard`` and ``replicate`` may name several dims, which then act as one flattened axis. A dim
    may be ``ep`` or ``cp`` and ``shard`` (or ``replicate``) at once: its ranks then see different
    data, and parameters that no expert plan cuts over it are cut (or replicated) over it by the
    data axis.

    Attributes:
        replicate: Dims whose ranks hold the same slice of a parameter and see different data.
        shard: Dims over which FSDP cuts parameters, and whose ranks see different data.
        tp: The tensor-parallel dim.
        ep: The expert-parallel dim.
        cp: The context-parallel dim; its ranks see different parts of a sequence.

    Raises:
        MeshError: A value is neither a name nor a sequence of names, or names a dim twice.

    Example:
        >>> MeshRoles(replicate="dp_replicate", shard=("dp_shard", "cp"), cp="cp").shard
        ('dp_shard', 'cp')
    """

    replicate: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
    tp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()
    cp: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            names = _as_names(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, names)

    def of(self, dim: str) -> tuple[str, ...]:
        """Returns the roles of mesh dim ``dim``, in the order of the fields."""
        return tuple(role for role in ROLE_NAMES if dim in getattr(self, role))

    def __str__(self) -> str:
        named = [(role, getattr(self, role)) for role in ROLE_NAMES if getattr(self, role)]
        return ", ".join(f"{role}={'×'.join(names)}" for role, names in named) or "no roles"


def _as_names(role: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise MeshError(
            f"role {role!r}: expected a mesh dim name or a tuple of names, got {value!r}"
        )
    names = tuple(value)
    if any(not isinstance(name, str) for name in names):
        raise MeshError(f"role {role!r}: mesh dim names are strings, got {names!r}")
    if len(set(names)) != len(names):
        raise MeshError(f"role {role!r} names a mesh dim twice: {names!r}; name each dim once")
    return names


def infer_roles(
    dim_names: Sequence[str] | None,
    shape: Sequence[int],
    roles: MeshRoles | Mapping[str, str | Sequence[str]] | None = None,
) -> tuple[tuple[str, ...], MeshRoles]:
    """Finds the role of every mesh dim (the rules are the table in this module's docstring).

    Args:
        dim_names: The mesh's dim names, or None for an unnamed mesh, whose dims are then called by
            their roles.
        shape: The mesh's sizes, one positive number a dim.
        roles: What the user said, if anything: a complete :class:`MeshRoles`, or a mapping from
            role to dim name(s) that overlays what the names say.

    Returns:
        The dim names (never None) and the roles, each role's dims in mesh order.

    Raises:
        MeshError: No role or more than one legal reading; the message lists the dims, the
            recognised names and how to pass ``roles``.

    Example:
        >>> infer_roles(("dp", "tp"), (4, 2))
        (('dp', 'tp'), MeshRoles(replicate=(), shard=('dp',), tp=('tp',), ep=(), cp=()))
    """
    shape = tuple(int(size) for size in shape)
    names = _dim_names(dim_names, shape)
    if isinstance(roles, MeshRoles):
        given = {role: getattr(roles, role) for role in ROLE_NAMES}
        inferred: dict[str, str] = {}
    else:
        given = _roles_of_mapping(roles)
        inferred = {name: _ROLE_OF_NAME[name] for name in names if name in _ROLE_OF_NAME}
    unknown = sorted({dim for dims in given.values() for dim in dims} - set(names))
    if unknown:
        raise _mesh_error(names, shape, f"roles name {_quote(unknown)}, which this mesh lacks")
    found = {name: _roles_of_dim(name, given, inferred, names, shape) for name in names}
    _check_unique_inference(found, given, names, shape)
    result = MeshRoles(**{role: tuple(n for n in names if role in found[n]) for role in ROLE_NAMES})
    for role in _SINGLE_DIM_ROLES:
        if len(getattr(result, role)) > 1:
            problem = f"role {role!r} takes one dim, got {_quote(getattr(result, role))}"
            raise _mesh_error(names, shape, problem)
    return names, result


def _dim_names(dim_names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    if any(size < 1 for size in shape) or not shape:
        raise MeshError(f"a mesh has at least one dim and positive sizes, got shape {shape}")
    if dim_names is None:
        unnamed = {1: ("shard",), 2: ("replicate", "shard")}.get(len(shape))
        if unnamed is None:
            raise _mesh_error(
                None, shape, f"an unnamed {len(shape)}D mesh has no default roles (1D and 2D have)"
            )
        return unnamed
    names = tuple(dim_names)
    if len(names) != len(shape):
        raise MeshError(f"{len(names)} mesh dim names {names} for {len(shape)} dims {shape}")
    if len(set(names)) != len(names):
        raise _mesh_error(names, shape, "a dim name occurs twice")
    return names


def _roles_of_mapping(
    roles: Mapping[str, str | Sequence[str]] | None,
) -> dict[str, tuple[str, ...]]:
    if roles is None:
        return {}
    if not isinstance(roles, Mapping):
        raise MeshError(
            f"roles: expected a MeshRoles or a mapping from role to dim name(s), got {roles!r}"
        )
    unknown = [role for role in roles if role not in ROLE_NAMES]
    if unknown:
        raise MeshError(
            f"roles: unknown role {_quote(unknown)}; the roles are {', '.join(ROLE_NAMES)}"
        )
    return {role: _as_names(role, value) for role, value in roles.items()}


def _roles_of_dim(
    name: str,
    given: Mapping[str, tuple[str, ...]],
    inferred: Mapping[str, str],
    names: tuple[str, ...],
    shape: tuple[int, ...],
) -> frozenset[str]:
    stated = frozenset(role for role, dims in given.items() if name in dims)
    own = inferred.get(name)
    if (
        own is not None and own in given
    ):  # the user said which dims have this role; the name does not add to it
        if not stated:
            raise _mesh_error(
                names,
                shape,
                f"dim {name!r} has no role: its name means {own!r}, but roles gives {own!r} to "
                f"{_quote(given[own]) or 'no dim'}",
            )
        own = None
    if not stated:
        if own is None:
            raise _mesh_error(names, shape, f"dim {name!r} has no role")
        return frozenset({own})
    if own in _COMPANION_ROLES and stated <= _DATA_ROLES:
        stated |= {own}
    if len(stated & _DATA_ROLES) > 1 or len(stated - _DATA_ROLES) > 1 or len(stated) > 2:
        raise _mesh_error(names, shape, f"dim {name!r} has conflicting roles {_quote(stated)}")
    if "tp" in stated and len(stated) > 1:
        raise _mesh_error(names, shape, f"dim {name!r} has conflicting roles {_quote(stated)}")
    return stated


def _check_unique_inference(
    found: Mapping[str, frozenset[str]],
    given: Mapping[str, tuple[str, ...]],
    names: tuple[str, ...],
    shape: tuple[int, ...],
) -> None:
    for role in ROLE_NAMES:
        dims = [name for name in names if role in found[name]]
        if role not in given and len(dims) > 1:
            hint = ""
            if role == "shard":
                hint = (
                    f"; say {{'replicate': {dims[0]!r}, 'shard': {dims[1]!r}}} for HSDP, or "
                    f"{{'shard': {tuple(dims)!r}}} for one flattened shard axis"
                )
            raise _mesh_error(
                names, shape, f"the names {_quote(dims)} all mean role {role!r}{hint}"
            )


def _quote(names: Iterable[str]) -> str:
    return ", ".join(
        repr(name) for name in (sorted(names) if isinstance(names, set | frozenset) else names)
    )


def _mesh_error(names: tuple[str, ...] | None, shape: tuple[int, ...], problem: str) -> MeshError:
    if names is None:
        mesh = f"unnamed mesh of shape {shape}"
        fix = "Give the mesh names: init_device_mesh(..., mesh_dim_names=(...))"
    else:
        dims = ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
        mesh = f"mesh ({dims})"
        fix = (
            "Pass roles, e.g. Policy(roles={'shard': ('dp_shard', 'cp'), 'tp': 'tp'}), or rename "
            "the dims"
        )
    known = "; ".join(f"{role}: {', '.join(RECOGNISED_NAMES[role])}" for role in ROLE_NAMES)
    return MeshError(f"{mesh}: {problem}. {fix}. Recognised names are {known}.")


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
            tensor = mesh.mesh
        except RuntimeError as error:  # a slice that this process has no part in
            raise MeshError(f"rank {rank} is not in the mesh {mesh.mesh_dim_names}") from error
        shape = tuple(tensor.shape)
        names, found = infer_roles(mesh.mesh_dim_names, shape, roles)
        return cls(names, shape, tuple(tensor.flatten().tolist()), rank, found)

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
            raise MeshError(f"mesh ({self.describe()}) has no dim {_quote(unknown)}")
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
        choices = [
            range(size) if name in wanted else (here,)
            for name, size, here in zip(self.dim_names, self.shape, self.coordinate, strict=True)
        ]
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
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
