"""Input signatures: what of a call selects a program, and what does not.

Container tree, dtypes, number of dims, devices, ``requires_grad`` and constants do. Sizes do not: a program says which
sizes it accepts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
        return f"{str(self.dtype).removeprefix('torch.')}[{self.ndim}d, {self.device}{grad}]"


@dataclass(frozen=True)
class Signature:
    """Container tree and leaves of one call.

    Attributes:
        tree: pytree structure of ``(args, kwargs)``.
        leaves: a :class:`TensorSpec` for a tensor, the value itself for anything else.
    """

    tree: Any
    leaves: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash((str(self.tree), tuple(map(_hashable, self.leaves))))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with ``tensors`` in place of the tensor leaves."""
        remaining = iter(tensors)
        values = [next(remaining) if isinstance(x, TensorSpec) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(values, self.tree)
        return args, kwargs

    def describe(self) -> list[str]:
        """One stable line for each leaf, sizes left out; equal on ranks that call alike."""
        paths = [
            "".join(str(k) for k in path)
            for path, _ in pytree.tree_flatten_with_path(
                pytree.tree_unflatten(range(len(self.leaves)), self.tree)
            )[0]
        ]
        return [f"input {p}: {x}" for p, x in zip(paths, self.leaves, strict=True)]


def _hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return leaf


_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Signature, list[torch.Tensor]]:
    """Splits a call into its signature and its flat tensors.

    Raises:
        CaptureError: an argument is neither a tensor, a constant nor a container of those.
    """
    while True:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        unknown = {
            type(x) for x in leaves if dataclasses.is_dataclass(x) and not isinstance(x, type)
        }
        if not unknown:
            break
        for cls in unknown:
            torch.export.register_dataclass(cls)
    tensors: list[torch.Tensor] = []
    spec: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            spec.append(TensorSpec(leaf.dtype, leaf.dim(), leaf.device.type, leaf.requires_grad))
        elif isinstance(leaf, _CONSTANTS) or (hasattr(leaf, "__hash__") and callable(leaf)):
            spec.append(leaf)
        else:
            raise CaptureError(
                f"forward got an argument of type {type(leaf).__name__}, which is neither a tensor, a constant (None, "
                "bool, number, str, dtype) nor a known container; pass tensors in tuples, lists, dicts or dataclasses"
            )
    return Signature(tree, tuple(spec)), tensors
