"""Input signatures: what of a call selects a program, and what does not.

Container tree, dtypes, number of dims, devices, ``requires_grad`` and constants do. Sizes do not: a program says which
sizes it accepts.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import CaptureError
from hyper_parallel.torch_compat.graph import pytree


@dataclass(frozen=True)
class TensorSpec:
    """One tensor input without its sizes."""

    dtype: torch.dtype
    ndim: int
    device: str
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}[{self.ndim}d{grad}]"


@dataclass(frozen=True, eq=False)
class Signature:
    """Container tree and leaves of one call.

    Attributes:
        tree: pytree structure of ``(args, kwargs)``; keywords are in alphabetical order.
        leaves: a :class:`TensorSpec` for a tensor, the value itself for anything else.
    """

    tree: Any
    leaves: tuple[Any, ...]

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return tuple(map(_identity, self.leaves))

    @cached_property
    def _hash(self) -> int:
        return hash((str(self.tree), self._key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature):
            return NotImplemented
        return self._key == other._key and bool(self.tree == other.tree)

    def __hash__(self) -> int:
        return self._hash

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The leaves without the values of numbers: calls that differ in a changing number only agree here."""
        return tuple(x if isinstance(x, TensorSpec) else type(x) for x in self.leaves)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with ``tensors`` in place of the tensor leaves."""
        remaining = iter(tensors)
        values = [next(remaining) if isinstance(x, TensorSpec) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(values, self.tree)
        return args, kwargs

    def describe(self) -> list[str]:
        """One stable line for each leaf, sizes left out; equal on ranks that call alike."""
        paths = ["".join(map(str, path)) for path in self._paths]
        return [f"input {p}: {x}" for p, x in zip(paths, self.leaves, strict=True)]

    def describe_sizes(self, sizes: Sequence[Sequence[int]]) -> list[str]:
        """One line for each leaf, for people: its argument, then dtype and sizes, or the constant.

        Args:
            sizes: sizes of the flat tensors.
        """
        remaining = iter(sizes)
        lines = []
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            # the first key is 0 for a positional argument and 1 for a keyword
            name = "".join(map(str, path[1:])).removeprefix("['").replace("']", "", 1)
            value = repr(leaf)
            if isinstance(leaf, TensorSpec):
                dtype = str(leaf.dtype).removeprefix("torch.")
                value = f"{dtype}{list(next(remaining))}"
            lines.append(f"{name}: {value}")
        return lines

    @property
    def _paths(self) -> list[Any]:
        tree = pytree.tree_unflatten(range(len(self.leaves)), self.tree)
        return [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def _identity(leaf: Any) -> Any:
    """A hashable value that is equal for equal leaves only: 1, 1.0 and True differ, NaN equals itself."""
    if isinstance(leaf, TensorSpec):
        return leaf
    if isinstance(leaf, float | complex):
        return type(leaf), repr(leaf)
    return type(leaf), leaf


_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
    range,
    type,
    type(Ellipsis),
    types.FunctionType,
    types.BuiltinFunctionType,
)


def flatten_tree(value: object) -> tuple[list[Any], Any]:
    """Flattens nested containers; dataclasses that nobody registered are registered on the way.

    Args:
        value: tensors and constants in containers.

    Returns:
        ``(leaves, tree)``.
    """
    while True:
        leaves, tree = pytree.tree_flatten(value)
        unknown = {
            type(x) for x in leaves if dataclasses.is_dataclass(x) and not isinstance(x, type)
        }
        if not unknown:
            return leaves, tree
        for cls in unknown:
            torch.export.register_dataclass(cls)


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Signature, list[torch.Tensor]]:
    """Splits a call into its signature and its flat tensors; the order of keywords does not matter.

    Raises:
        CaptureError: an argument is neither a plain tensor, a constant nor a container of those.
    """
    leaves, tree = flatten_tree((args, dict(sorted(kwargs.items()))))
    grad = torch.is_grad_enabled()
    tensors: list[torch.Tensor] = []
    spec: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, DTensor):
            raise CaptureError(
                "forward got a DTensor; inputs are this rank's own plain tensors: pass to_local() of a batch that is sharded "
                "over the batch dims, or full_tensor()"
            )
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            wants_grad = leaf.requires_grad and grad
            spec.append(TensorSpec(leaf.dtype, leaf.dim(), leaf.device.type, wants_grad))
        elif isinstance(leaf, _CONSTANTS):
            spec.append(leaf)
        else:
            raise CaptureError(
                f"forward got an argument of type {type(leaf).__name__}, which is neither a tensor, a constant (None, "
                "bool, number, str, dtype, function) nor a known container; pass tensors in tuples, lists, dicts, named "
                "tuples or dataclasses"
            )
    return Signature(tree, tuple(spec)), tensors
