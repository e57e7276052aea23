"""What differs between two saved plans, in the words of a reviewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_compile.patterns import compress
from hp_compile.serial import SavedCollective, SavedMesh, SavedParam, SavedPlan


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field that differs; ``None`` on the side where it does not exist.

    Attributes:
        what: the field.
        before: its value on the first side.
        after: its value on the second side.
    """

    what: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class ParamChange:
    """Parameters that change in the same way.

    Attributes:
        names: their names, with ranges in place of numbers.
        count: how many there are.
        changes: what differs; one change called ``"parameter"`` for those on one side only.
    """

    names: tuple[str, ...]
    count: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind on both sides.

    Attributes:
        phase: ``forward`` or ``backward``.
        kind: kind of collective.
        axes: mesh dims.
        purpose: what for.
        dtype: dtype on the wire.
        before: how many, and the bytes that this rank sends.
        after: the same on the second side.
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    purpose: str
    dtype: str
    before: tuple[int, int]
    after: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """All differences of two plans.

    Attributes:
        settings: mesh, policy and inputs.
        params: parameters that exist on one side only, or have another shape, dtype, placement or reduction.
        traffic: groups of collectives whose number or bytes differ.
        order: the collectives are the same in sum, but differ in order or in the parameters they carry.
        fingerprints: of both sides.
    """

    settings: tuple[Change, ...]
    params: tuple[ParamChange, ...]
    traffic: tuple[Traffic, ...]
    order: str
    fingerprints: tuple[str, str]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        parts = (self.settings, self.params, self.traffic, self.order)
        return any(parts) or self.fingerprints[0] != self.fingerprints[1]


def compare(before: SavedPlan, after: SavedPlan) -> PlanDiff:
    """Finds what differs.

    Args:
        before: the first plan.
        after: the second plan.
    """
    traffic = _traffic(before, after)
    return PlanDiff(
        settings=tuple(_settings(before, after)),
        params=tuple(_params(before, after)),
        traffic=tuple(traffic),
        order="" if traffic else _order(before, after),
        fingerprints=(before.fingerprint, after.fingerprint),
    )


def _settings(before: SavedPlan, after: SavedPlan) -> Iterable[Change]:
    pairs = (
        ("mesh", _dims(before.mesh), _dims(after.mesh)),
        ("mesh roles", _roles(before.mesh), _roles(after.mesh)),
        ("seen from rank", str(before.mesh.rank), str(after.mesh.rank)),
        ("inputs", ", ".join(before.inputs), ", ".join(after.inputs)),
    )
    for what, old, new in pairs:
        if old != new:
            yield Change(what=what, before=old or None, after=new or None)
    left, right = _flat(before.policy), _flat(after.policy)
    for key in sorted({*left, *right}):
        if left.get(key) != right.get(key):
            yield Change(
                what=f"policy.{key}",
                before=None if key not in left else _value(left[key]),
                after=None if key not in right else _value(right[key]),
            )


def _dims(mesh: SavedMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.dims)


def _roles(mesh: SavedMesh) -> str:
    return ", ".join(f"{role}={'×'.join(dims)}" for role, dims in mesh.roles.items())


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return str(value)


# ------------------------------------------------------------------ parameters

_ASPECTS = (
    ("shape", lambda p, _: "×".join(map(str, p.shape)) or "scalar"),
    ("dtype", lambda p, _: p.dtype),
    ("placement", lambda p, m: placement_text(p, m)),
    ("reduction", lambda p, _: p.reduction),
    ("trained", lambda p, _: "yes" if p.requires_grad else "frozen"),
    ("unit", lambda p, _: p.unit),
    ("on this rank", lambda p, _: "×".join(map(str, p.local_shape)) or "scalar"),
)


def placement_text(param: SavedParam, mesh: SavedMesh) -> str:
    """Where a parameter lies: the mesh dims that cut it, e.g. ``dim 0 over dp_shard(64)``.

    Args:
        param: the parameter.
        mesh: its mesh.
    """
    if param.ignored:
        return "ignored: plain tensor"
    cuts: dict[str, list[str]] = {}
    for (axis, size), placement in zip(mesh.dims, param.placements, strict=True):
        if placement != "R" and size > 1:
            dim = placement.partition("(")[2].partition(")")[0].partition(",")[0]
            cuts.setdefault(dim, []).append(axis)
    if not cuts:
        return "whole"
    return ", ".join(f"dim {dim} over {mesh.over(axes)}" for dim, axes in cuts.items())


def _params(before: SavedPlan, after: SavedPlan) -> Iterable[ParamChange]:
    left = {p.fqn: p for p in before.params}
    right = {p.fqn: p for p in after.params}
    alike: dict[tuple[Change, ...], list[str]] = {}
    for fqn in dict.fromkeys([*left, *right]):
        changes = _param_changes(left.get(fqn), right.get(fqn), before.mesh, after.mesh)
        if changes:
            alike.setdefault(changes, []).append(fqn)
    for changes, fqns in alike.items():
        yield ParamChange(names=tuple(compress(fqns)), count=len(fqns), changes=changes)


def _param_changes(
    old: SavedParam | None, new: SavedParam | None, old_mesh: SavedMesh, new_mesh: SavedMesh
) -> tuple[Change, ...]:
    if old is None or new is None:
        left = None if old is None else _summary(old, old_mesh)
        right = None if new is None else _summary(new, new_mesh)
        return (Change(what="parameter", before=left, after=right),)
    pairs = [(name, read(old, old_mesh), read(new, new_mesh)) for name, read in _ASPECTS]
    changes = [
        Change(what=name, before=a, after=b)
        for name, a, b in pairs
        if a != b and (name != "unit" or (a and b))  # without a program there are no units
    ]
    if len(changes) > 1 and changes[-1].what == "on this rank":
        changes.pop()  # follows from the others
    return tuple(changes)


def _summary(param: SavedParam, mesh: SavedMesh) -> str:
    shape = "×".join(map(str, param.shape)) or "scalar"
    return f"{param.dtype} {shape}, {placement_text(param, mesh)}, {param.reduction}"


# ------------------------------------------------------------------ collectives

_Key = tuple[str, str, tuple[str, ...], str, str]


def count(collectives: Iterable[SavedCollective]) -> dict[_Key, tuple[int, int]]:
    """Number and bytes of the collectives of every (phase, kind, axes, purpose, dtype), in issue order.

    Args:
        collectives: the collectives.
    """
    found: dict[_Key, tuple[int, int]] = {}
    for c in collectives:
        of_gradients = c.purpose == "tp" and bool(c.params)
        key = (c.phase, c.kind, c.axes, "tp gradients" if of_gradients else c.purpose, c.dtype)
        number, nbytes = found.get(key, (0, 0))
        found[key] = (number + 1, nbytes + c.nbytes)
    return found


def _traffic(before: SavedPlan, after: SavedPlan) -> list[Traffic]:
    left, right = count(before.collectives or ()), count(after.collectives or ())
    return [
        Traffic(
            phase=key[0],
            kind=key[1],
            axes=key[2],
            purpose=key[3],
            dtype=key[4],
            before=left.get(key, (0, 0)),
            after=right.get(key, (0, 0)),
        )
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]


def _order(before: SavedPlan, after: SavedPlan) -> str:
    if before.collectives is None or after.collectives is None:
        if before.collectives is after.collectives:
            return ""
        side = "first" if before.collectives is None else "second"
        return f"the {side} plan was made without a program, so it has no collectives to compare"
    for index, (old, new) in enumerate(zip(before.collectives, after.collectives, strict=True)):
        if (old.kind, old.axes, old.params) != (new.kind, new.axes, new.params):
            return (
                f"the same collectives in sum, but number {index} was {_short(old.kind, old.params)} and is "
                f"{_short(new.kind, new.params)}"
            )
        if old != new:
            return f"collective number {index} ({_short(old.kind, old.params)}) differs in ranks or bytes"
    return ""


def _short(kind: str, params: tuple[str, ...]) -> str:
    first = params[0] if params else "no parameter"
    more = f" and {len(params) - 1} more" if len(params) > 1 else ""
    return f"{kind} of {first}{more}"


__all__ = ["Change", "ParamChange", "PlanDiff", "Traffic", "compare", "count", "placement_text"]
