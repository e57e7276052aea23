"""What the elements of a packed buffer can be elements of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from passes.verify.packing import Pack


@dataclass(frozen=True)
class Shard:
    """This rank's padded shard of a parameter."""

    fqn: str


@dataclass(frozen=True)
class ShardAt:
    """The padded shard of a parameter that rank ``index`` of its shard group holds."""

    fqn: str
    index: int


@dataclass(frozen=True)
class Whole:
    """A parameter that is not cut, in storage dtype."""

    fqn: str


@dataclass(frozen=True)
class Term:
    """A computed value, by digest (see ``passes.origin``)."""

    digest: str


@dataclass(frozen=True)
class Cast:
    """Another source in another dtype."""

    dtype: Any
    of: Any


@dataclass(frozen=True)
class Scale:
    """Another source divided by a constant."""

    divisor: float
    of: Any


@dataclass(frozen=True)
class Reduced:
    """Another source, all-reduced over mesh dims."""

    axes: tuple[str, ...]
    op: str
    of: Any
    node: Any = None


@dataclass(frozen=True, eq=False)
class Slice:
    """One of ``parts`` slices of a gathered buffer: which one depends on the rank."""

    whole: Pack
    parts: int
    group: str

    def __deepcopy__(self, memo: Any) -> Slice:
        return self


@dataclass(frozen=True, eq=False)
class Scattered:
    """The result of a reduce-scatter: on rank ``r`` the sum of chunk ``r`` of ``buffer``."""

    buffer: Pack
    axes: tuple[str, ...]
    world: int
    op: str
    node: Any


WRAPPERS = (Cast, Scale, Reduced)


def bottom_of(source: Any) -> Any:
    """The source under all casts, scales and all-reduces."""
    while isinstance(source, WRAPPERS):
        source = source.of
    return source


def shard_fqn(source: Any) -> str | None:
    """The parameter of a shard, a gathered shard, or a slice of a gathered buffer (its first)."""
    bottom = bottom_of(source)
    if isinstance(bottom, Slice):
        return next((f for s in bottom.whole.sources() if (f := shard_fqn(s))), None)
    return getattr(bottom, "fqn", None)


def source_name(source: Any) -> str:
    """A source in words."""
    bottom = bottom_of(source)
    if isinstance(bottom, Shard):
        return f"the shard of {bottom.fqn}"
    if isinstance(bottom, ShardAt):
        return f"{bottom.fqn} of rank {bottom.index}"
    if isinstance(bottom, Whole):
        return f"{bottom.fqn} in storage dtype"
    if isinstance(bottom, Slice):
        return f"a slice of {shard_fqn(bottom)}"
    if isinstance(bottom, Scattered):
        return f"the result of {bottom.node.name}"
    return "a computed value"
