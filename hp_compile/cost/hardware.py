"""What a machine can do, as a value read from a TOML file: one file a machine in ``profiles/``, or the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.errors import HPCompileError

#: Names that :func:`load_profile` takes without a path.
BUILT_IN = ("h100", "h200", "mi300x", "ascend910b")


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a group.

    Attributes:
        bandwidth: bytes a second that one rank sends, while it receives as many.
        latency: seconds from issuing a collective to its first byte.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Profile:
    """A machine, as the estimates see it.

    Attributes:
        name: what it is called.
        flops: peak operations a second of dense matrix products, by dtype name.
        achievable: part of the peak that a training step reaches in a matrix product.
        launch: seconds that any operator takes at least.
        memory_bytes: memory of one device.
        memory_bandwidth: bytes a second that one device reads and writes.
        ranks_per_node: ranks that ``intra`` connects.
        intra: the link between ranks of one node.
        inter: the link between nodes.
    """

    name: str
    flops: Mapping[str, float]
    achievable: float
    launch: float
    memory_bytes: float
    memory_bandwidth: float
    ranks_per_node: int
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        numbers = [("achievable", self.achievable), ("memory_bytes", self.memory_bytes)]
        numbers += [("memory_bandwidth", self.memory_bandwidth)]
        numbers += [("ranks_per_node", float(self.ranks_per_node))]
        numbers += [(f"flops.{name}", value) for name, value in self.flops.items()]
        numbers += [("intra.bandwidth", self.intra.bandwidth)]
        numbers += [("inter.bandwidth", self.inter.bandwidth)]
        for name, value in numbers:
            if not value > 0:
                raise HPCompileError(f"profile {self.name!r}: {name} must be above 0, got {value}")
        if self.achievable > 1:
            raise HPCompileError(
                f"profile {self.name!r}: achievable is a part of the peak, at most 1, got {self.achievable}"
            )

    def flop_rate(self, dtype: torch.dtype) -> float:
        """Operations a second that a matrix product of a dtype reaches.

        Args:
            dtype: dtype of its operands; one that the file lacks counts as float32.
        """
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name, self.flops["float32"]) * self.achievable

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link that a group crosses; global ranks fill one node after another."""
        one = len({rank // self.ranks_per_node for rank in ranks}) <= 1
        return self.intra if one else self.inter


def load_profile(source: str | Path | Profile) -> Profile:
    """Reads a profile.

    Args:
        source: one of :data:`BUILT_IN`, the path of a TOML file of the same form, or a profile.

    Raises:
        HPCompileError: no such profile, or a key is missing, unknown or of the wrong type.

    Example:
        >>> load_profile("h100").ranks_per_node
        8
    """
    if isinstance(source, Profile):
        return source
    if str(source) in BUILT_IN:
        text = resources.files("hp_compile.cost").joinpath(f"profiles/{source}.toml").read_text()
    elif Path(source).is_file():
        text = Path(source).read_text()
    else:
        raise HPCompileError(
            f"profile: {str(source)!r} is neither one of {', '.join(BUILT_IN)} nor a TOML file"
        )
    return _profile(_parse(text, str(source)), str(source))


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        toml = importlib.import_module("tomli")
    try:
        return dict(toml.loads(text))
    except toml.TOMLDecodeError as error:
        raise HPCompileError(f"profile {where}: {error}") from error


def _profile(table: dict[str, Any], where: str) -> Profile:
    expected = {field.name for field in fields(Profile)}
    if set(table) != expected:
        raise HPCompileError(
            f"profile {where}: missing keys {sorted(expected - set(table))}, unknown keys {sorted(set(table) - expected)}"
        )
    try:
        for name in ("intra", "inter"):
            table[name] = Link(**{k: float(v) for k, v in table[name].items()})
        table["flops"] = {str(k): float(v) for k, v in table["flops"].items()}
        profile = Profile(**table)
    except (TypeError, ValueError, AttributeError) as error:
        raise HPCompileError(f"profile {where}: {error}") from error
    if "float32" not in profile.flops:
        raise HPCompileError(f"profile {where}: flops needs float32, for dtypes that it lacks")
    return profile


__all__ = ["BUILT_IN", "Link", "Profile", "load_profile"]
