"""What each mesh dim is for: the names that mean a role, and the rules that find it.

:func:`infer_roles` decides by the first rule that speaks for a dim:

===  =================================================  ===========================================
no.  rule                                               the dim's role
===  =================================================  ===========================================
1    ``roles`` is a :class:`MeshRoles`                  exactly what it lists; nothing is inferred
2    ``roles`` is a mapping that names the dim          what the mapping says; a ``cp`` or ``ep``
                                                        dim that only ``shard``/``replicate`` name
                                                        keeps its own role beside it
3    its name is recognised (``RECOGNISED_NAMES``)      the role of that name; two dims whose names
                                                        mean the same role are a ``MeshError``
4    the mesh has no dim names: 1D                      ``(shard,)``
5    the mesh has no dim names: 2D                      ``(replicate, shard)``, as FSDP2 reads it
6    anything else                                      ``MeshError``
===  =================================================  ===========================================

The size of a dim never changes its role: a dim of size 1 keeps its role, and a group of one rank
gives no collective. ``docs/roles.md`` shows every boundary case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from hyper_parallel.errors import MeshError

__all__ = ["RECOGNISED_NAMES", "ROLE_NAMES", "MeshRoles", "infer_roles"]

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
    may be ``ep`` or ``cp`` and also ``shard`` or ``replicate``: its ranks then see different data,
    and FSDP cuts (or replicates) over it what the expert plan does not cut.

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
            role to dim name(s) that goes before what the names say.

    Returns:
        The dim names (never None) and the roles, each role's dims in mesh order.

    Raises:
        MeshError: A dim has no role, or more than one reading is possible; the message lists the
            dims, the recognised names and how to pass ``roles``.

    Example:
        >>> infer_roles(("dp", "tp"), (4, 2))
        (('dp', 'tp'), MeshRoles(replicate=(), shard=('dp',), tp=('tp',), ep=(), cp=()))
    """
    shape = tuple(int(size) for size in shape)
    names = _dim_names(dim_names, shape)
    inferred: dict[str, str] = {}
    if isinstance(roles, MeshRoles):
        given = {role: getattr(roles, role) for role in ROLE_NAMES}
    else:
        given = _roles_of_mapping(roles)
        inferred = {name: _ROLE_OF_NAME[name] for name in names if name in _ROLE_OF_NAME}
    unknown = {dim for dims in given.values() for dim in dims} - set(names)
    if unknown:
        raise _mesh_error(names, shape, f"roles names {_quote(unknown)}, which this mesh lacks")
    found: dict[str, frozenset[str]] = {}
    for name in names:
        answer = _roles_of_dim(name, given, inferred)
        if isinstance(answer, str):
            raise _mesh_error(names, shape, answer)
        found[name] = answer
    problem = _repeated_role(found, given, names)
    if problem:
        raise _mesh_error(names, shape, problem)
    return names, MeshRoles(
        **{role: tuple(name for name in names if role in found[name]) for role in ROLE_NAMES}
    )


def _as_names(role: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise MeshError(
            f"role {role!r}: expected a mesh dim name or a tuple of names, got {value!r}"
        )
    names = tuple(value)
    if any(not isinstance(name, str) for name in names):
        raise MeshError(f"role {role!r}: expected mesh dim names (strings), got {names!r}")
    if len(set(names)) != len(names):
        raise MeshError(f"role {role!r} names a mesh dim twice: {names!r}; name each dim once")
    return names


def _dim_names(dim_names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    if not shape or any(size < 1 for size in shape):
        raise MeshError(f"a mesh has at least one dim and positive sizes, got shape {shape}")
    if dim_names is None:
        unnamed = {1: ("shard",), 2: ("replicate", "shard")}.get(len(shape))
        if unnamed is None:
            raise _mesh_error(None, shape, "only 1D and 2D meshes have roles without names")
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
    name: str, given: Mapping[str, tuple[str, ...]], inferred: Mapping[str, str]
) -> frozenset[str] | str:
    """Returns the roles of one dim, or what is wrong."""
    stated = frozenset(role for role, dims in given.items() if name in dims)
    own = inferred.get(name)
    if own is not None and own in given:
        # The user said which dims have this role, so a name alone does not add another one.
        if not stated:
            owners = _quote(given[own]) or "no dim"
            return (
                f"dim {name!r} has no role: its name means {own}, but roles gives {own} to {owners}"
            )
        own = None
    if not stated:
        return frozenset({own}) if own is not None else f"dim {name!r} has no role"
    if own in _COMPANION_ROLES and stated <= _DATA_ROLES:
        stated |= {own}
    legal = len(stated) == 1 or (
        len(stated) == 2 and len(stated & _DATA_ROLES) == 1 and len(stated & _COMPANION_ROLES) == 1
    )
    if not legal:
        return (
            f"dim {name!r} cannot be {' and '.join(sorted(stated))} at once; only shard or "
            f"replicate combine with cp or ep"
        )
    return stated


def _repeated_role(
    found: Mapping[str, frozenset[str]],
    given: Mapping[str, tuple[str, ...]],
    names: tuple[str, ...],
) -> str:
    """Returns what is wrong with dims that share a role, or an empty text."""
    for role in ROLE_NAMES:
        dims = [name for name in names if role in found[name]]
        if len(dims) < 2:
            continue
        if role in _SINGLE_DIM_ROLES:
            return f"role {role} takes one dim, got {_quote(dims)}"
        if role in given:
            continue
        hint = f"{{{role!r}: {tuple(dims)!r}}} makes them one flattened axis"
        if role == "shard":
            hint += f", {{'replicate': {dims[0]!r}, 'shard': {dims[1]!r}}} makes them HSDP"
        return f"the names {_quote(dims)} all mean {role}, so say which it is: roles={hint}"
    return ""


def _quote(names: Iterable[str]) -> str:
    ordered = sorted(names) if isinstance(names, set | frozenset) else names
    return ", ".join(repr(name) for name in ordered)


def _mesh_error(names: tuple[str, ...] | None, shape: tuple[int, ...], problem: str) -> MeshError:
    if names is None:
        mesh = f"unnamed {len(shape)}D mesh of shape {shape}"
        fix = "Name the dims: init_device_mesh(..., mesh_dim_names=(...))"
    else:
        dims = ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
        mesh = f"mesh ({dims})"
        fix = (
            "Rename the dims or pass roles, e.g. "
            "Policy(roles={'shard': ('dp_shard', 'cp'), 'tp': 'tp'})"
        )
    known = "; ".join(f"{role}: {', '.join(RECOGNISED_NAMES[role])}" for role in ROLE_NAMES)
    return MeshError(f"{mesh}: {problem}. {fix}. Recognised names are {known}.")
