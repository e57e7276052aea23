"""Saved plans: what a plan says, as a value and as a JSON document with a stable schema.

The document, version 1 (``docs/cli.md`` describes every key)::

    {
      "format": "hp_compile.plan", "version": 1,
      "fingerprint": "9f6ff67edec28b0c",
      "made_with": {"hyper_parallel": "0.1.0", "torch": "2.13.0"},
      "request": {...} or null,             what the plan was made from, so that it can be made again
      "mesh": {"dims": [["dp_shard", 4]], "roles": {"shard": ["dp_shard"]}, "rank": 0},
      "policy": {...},                      every field in a textual form
      "inputs": ["tokens: int64[2, 8]"],
      "groups": {"dp_shard": [0, 1, 2, 3]}, ranks that parameters and collectives refer to by name
      "params": [{...}],                    one a line, in registration order
      "collectives": [{...}] or null        one a line, in issue order
    }

Bytes are exact. Two saved plans are the same plan if :meth:`SavedPlan.content` is equal. A reader
refuses a version that it does not know, and ignores keys that it does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hp_compile.policy_file import policy_values
from hyper_parallel.errors import HPCompileError
from hyper_parallel.mesh import ROLE_NAMES
from hyper_parallel.placement import format_placement
from hyper_parallel.plan import ParamPlan
from passes import base

if TYPE_CHECKING:
    from hp_compile.plan import Plan

FORMAT = "hp_compile.plan"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SavedMesh:
    """The mesh of a saved plan.

    Attributes:
        dims: name and size of every mesh dim.
        roles: names of the dims of every role that has any.
        rank: the global rank that the plan is seen from.
    """

    dims: tuple[tuple[str, int], ...]
    roles: Mapping[str, tuple[str, ...]]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.dims)

    def over(self, axes: Iterable[str]) -> str:
        """Mesh dims with their sizes, e.g. ``dp_shard(4)×cp(2)``."""
        sizes = dict(self.dims)
        return "×".join(f"{axis}({sizes[axis]})" for axis in axes) or "-"


@dataclass(frozen=True, kw_only=True)
class SavedParam:
    """One parameter; fields as in ``ParamPlan``, dtypes and placements as text.

    Attributes:
        unit: the unit it is gathered with; empty in a plan without a program.
        local_shape: shape of this rank's shard, without padding.
        padded_shape: the same with padding.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    unit: str
    rank_size: int
    shard_size: int
    dp_size: int
    local_shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    shard_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    sharded_ranks: tuple[int, ...]
    unsharded_ranks: tuple[int, ...]
    reduction: str
    requires_grad: bool
    ignored: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class SavedCollective:
    """One collective; fields as in ``Collective``.

    Attributes:
        unit: the unit that it serves, several joined by ``+``; empty when it is nobody's.
        module: FQN of the module in whose computation it stands (tp, ep, cp); empty for the others.
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    dtype: str
    nbytes: int
    purpose: str
    unit: str
    module: str
    params: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """What a plan says.

    Attributes:
        fingerprint: ``Plan.fingerprint``.
        mesh: the mesh.
        policy: every field of the policy as plain values.
        inputs: one line for each input.
        params: parameters in registration order.
        collectives: collectives in issue order; ``None`` for a plan without a program.
        notes: what was decided differently from the tensor-parallel plan, or gathered for want of a rule.
        request: what the plan was made from, as plain values; ``None`` when unknown.
        made_with: versions of what made it.
    """

    fingerprint: str
    mesh: SavedMesh
    policy: Mapping[str, Any]
    inputs: tuple[str, ...]
    params: tuple[SavedParam, ...]
    collectives: tuple[SavedCollective, ...] | None
    notes: tuple[str, ...] = ()
    request: Mapping[str, Any] | None = None
    made_with: Mapping[str, str] = field(default_factory=dict)

    def content(self) -> SavedPlan:
        """The plan without what it was made from and with: equal for equal plans."""
        return replace(self, request=None, made_with={})


def save(plan: Plan, *, request: Mapping[str, Any] | None = None) -> SavedPlan:
    """Everything that a plan says, as a value.

    Args:
        plan: the plan.
        request: what it was made from, as plain values.
    """
    layout = plan.layout
    units: Mapping[str, str] = {}
    collectives = None
    if plan.has_program:
        units = base.info(plan.graphs["forward"]).units
        collectives = _collectives(plan)
    roles = {name: getattr(layout.roles, name) for name in ROLE_NAMES}
    return SavedPlan(
        fingerprint=plan.fingerprint,
        mesh=SavedMesh(
            dims=tuple(zip(layout.dim_names, layout.shape, strict=True)),
            roles={name: dims for name, dims in roles.items() if dims},
            rank=layout.rank,
        ),
        policy=policy_values(plan.policy),
        inputs=plan.inputs,
        params=tuple(_param(p, units.get(p.fqn, "")) for p in plan.params.values()),
        collectives=collectives,
        notes=plan.notes,
        request=request,
        made_with={"hyper_parallel": _version(), "torch": torch.__version__.partition("+")[0]},
    )


def _param(plan: ParamPlan, unit: str) -> SavedParam:
    return SavedParam(
        fqn=plan.fqn,
        shape=plan.shape,
        dtype=_dtype(plan.dtype),
        placements=tuple(format_placement(p) for p in plan.placements),
        unit=unit,
        rank_size=plan.rank_size,
        shard_size=plan.shard_size,
        dp_size=plan.dp_size,
        local_shape=plan.shard_shape,
        padded_shape=plan.padded_shard_shape,
        shard_axes=plan.shard_axes,
        replica_axes=plan.replica_axes,
        sharded_ranks=plan.sharded_ranks,
        unsharded_ranks=plan.unsharded_ranks,
        reduction=plan.reduction,
        requires_grad=plan.requires_grad,
        ignored=plan.ignored,
        reason=plan.reason,
    )


def _collectives(plan: Plan) -> tuple[SavedCollective, ...]:
    units = base.info(plan.graphs["forward"]).units
    nodes = [pair for gm in plan.graphs.values() for pair in base.collectives(gm)]
    return tuple(
        SavedCollective(
            phase=c.phase,
            kind=c.kind,
            axes=c.axes,
            ranks=c.ranks,
            dtype=_dtype(c.dtype),
            nbytes=c.nbytes,
            purpose=c.purpose,
            unit=comm.unit or _unit_of(base.module_path(node), units.values()),
            module="" if c.params else base.module_path(node),
            params=c.params,
        )
        for c, (node, comm) in zip(plan.collectives, nodes, strict=True)
    )


def _unit_of(module: str, units: Iterable[str]) -> str:
    """The unit that a module lies in; empty outside of all."""
    owners = [u for u in set(units) if module == u or module.startswith(u + ".")]
    return max(owners, key=len, default="")


def _version() -> str:
    try:
        return metadata.version("hyper-parallel")
    except metadata.PackageNotFoundError:  # run from a clone that is not installed
        return "source"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------ as text


def dumps(saved: SavedPlan) -> str:
    """The JSON document of a saved plan: stable text, one parameter or collective a line."""
    groups = _name_groups(saved)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": saved.fingerprint,
        "made_with": dict(saved.made_with),
        "request": saved.request,
        "mesh": {
            "dims": [list(dim) for dim in saved.mesh.dims],
            "roles": {name: list(dims) for name, dims in saved.mesh.roles.items()},
            "rank": saved.mesh.rank,
        },
        "policy": dict(saved.policy),
        "inputs": list(saved.inputs),
        **({"notes": list(saved.notes)} if saved.notes else {}),
    }
    lines = [f"  {_json(key)}: {_json(value)}" for key, value in head.items()]
    named = {name: list(ranks) for ranks, name in groups.items()}
    lines.append(f'  "groups": {{\n{_block(f"{_json(n)}: {_json(r)}" for n, r in named.items())}}}')
    lines.append(f'  "params": [\n{_block(_row(p, groups) for p in saved.params)}]')
    if saved.collectives is None:
        lines.append('  "collectives": null')
    else:
        lines.append(f'  "collectives": [\n{_block(_row(c, groups) for c in saved.collectives)}]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _block(rows: Iterable[str]) -> str:
    return "".join(f"    {row},\n" for row in rows).removesuffix(",\n") + "\n  "


def _row(item: SavedParam | SavedCollective, groups: Mapping[tuple[int, ...], str]) -> str:
    values = {}
    for spec in fields(item):
        value = getattr(item, spec.name)
        if spec.name in _RANK_FIELDS:
            values[_RANK_FIELDS[spec.name]] = groups[value]
        else:
            values[spec.name] = value
    return _json(values)


#: Fields that hold ranks, and the keys under which the document refers to them.
_RANK_FIELDS = {
    "sharded_ranks": "shard_group",
    "unsharded_ranks": "replica_group",
    "ranks": "group",
}


def _name_groups(saved: SavedPlan) -> dict[tuple[int, ...], str]:
    """A name for every group of ranks: its mesh dims, ``self`` for none; ``/n`` is an inner group of n ranks."""
    names: dict[tuple[int, ...], str] = {}
    sizes = dict(saved.mesh.dims)
    for p in saved.params:
        names.setdefault(p.sharded_ranks, ".".join(p.shard_axes) or "self")
        names.setdefault(p.unsharded_ranks, ".".join(p.replica_axes) or "self")
    for c in saved.collectives or ():
        whole = math.prod(sizes[axis] for axis in c.axes)
        inner = f"/{len(c.ranks)}" if len(c.ranks) != whole else ""
        names.setdefault(c.ranks, ".".join(c.axes) + inner)
    return names


# ------------------------------------------------------------------ and back


def load(path: str | Path) -> SavedPlan:
    """Reads a saved plan.

    Args:
        path: a file that :func:`dumps` made.

    Raises:
        HPCompileError: no such file, or no saved plan of a known version; the text says which.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HPCompileError(f"{path}: cannot read the saved plan: {error}") from error
    return loads(text, name=str(path))


def loads(text: str, *, name: str = "plan") -> SavedPlan:
    """Reads the text of a saved plan.

    Args:
        text: the document.
        name: what error messages call it.

    Raises:
        HPCompileError: it is no saved plan of a known version.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise HPCompileError(
            f"{name}: not a saved plan: line {error.lineno} is no JSON ({error.msg}); make one with hp-compile plan "
            "--format json"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise HPCompileError(
            f'{name}: not a saved plan: expected a JSON object with "format": "{FORMAT}"; make one with hp-compile '
            "plan --format json"
        )
    if document.get("version") != VERSION:
        raise HPCompileError(
            f"{name}: the saved plan has version {document.get('version')!r}, this program reads version {VERSION}; "
            "make it again with hp-compile plan"
        )
    try:
        return _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HPCompileError(
            f"{name}: the saved plan is damaged ({type(error).__name__}: {error}); make it again with hp-compile plan"
        ) from error


def _from_document(document: Mapping[str, Any]) -> SavedPlan:
    groups = {name: tuple(ranks) for name, ranks in document["groups"].items()}
    mesh = document["mesh"]
    rows = document["collectives"]
    return SavedPlan(
        fingerprint=str(document["fingerprint"]),
        mesh=SavedMesh(
            dims=tuple((str(name), int(size)) for name, size in mesh["dims"]),
            roles={role: tuple(dims) for role, dims in mesh["roles"].items()},
            rank=int(mesh["rank"]),
        ),
        policy=dict(document["policy"]),
        inputs=tuple(document["inputs"]),
        params=tuple(_read(SavedParam, row, groups) for row in document["params"]),
        notes=tuple(document.get("notes", ())),
        collectives=None
        if rows is None
        else tuple(_read(SavedCollective, row, groups) for row in rows),
        request=document.get("request"),
        made_with=dict(document.get("made_with", {})),
    )


_Item = TypeVar("_Item", SavedParam, SavedCollective)


def _read(cls: type[_Item], row: Mapping[str, Any], groups: Mapping[str, Sequence[int]]) -> _Item:
    values: dict[str, Any] = {}
    for spec in fields(cls):
        if spec.name in _RANK_FIELDS:
            values[spec.name] = groups[row[_RANK_FIELDS[spec.name]]]
        else:
            value = row[spec.name]
            values[spec.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


__all__ = [
    "FORMAT",
    "VERSION",
    "SavedCollective",
    "SavedMesh",
    "SavedParam",
    "SavedPlan",
    "dumps",
    "load",
    "loads",
    "save",
]
