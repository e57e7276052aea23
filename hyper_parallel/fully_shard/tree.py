"""Tensors inside nested inputs and outputs: dicts, lists, tuples, named tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_floating_point", "grad_tensors", "map_tensors"]


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Applies ``fn`` to every tensor; a container in which nothing changes is returned as it is.

    Types are kept, subclasses of dict and frozen dataclasses included. Other objects are not
    looked into.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree)
    if isinstance(tree, Mapping) and isinstance(tree, dict):
        mapped = {key: map_tensors(fn, value) for key, value in tree.items()}
        if all(mapped[key] is value for key, value in tree.items()):
            return tree
        if type(tree) is dict:
            return mapped
        changed = copy.copy(tree)
        changed.update(mapped)
        return changed
    if isinstance(tree, list | tuple):
        items = [map_tensors(fn, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    return tree


def _map_dataclass(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    values = {
        field.name: getattr(tree, field.name)
        for field in dataclasses.fields(tree)
        if hasattr(tree, field.name)
    }
    mapped = {name: map_tensors(fn, value) for name, value in values.items()}
    changes = {name: value for name, value in mapped.items() if value is not values[name]}
    if not changes:
        return tree
    changed = copy.copy(tree)  # not replace(): __init__ and __post_init__ may do other things
    for name, value in changes.items():
        if isinstance(tree, dict):
            setattr(changed, name, value)  # outputs that are dicts too keep both views in step
        else:
            object.__setattr__(changed, name, value)
    return changed


def grad_tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors that require grad, in the order of :func:`map_tensors`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(note, tree)
    yield from found


def cast_floating_point(dtype: torch.dtype, tree: Any) -> Any:
    """Casts every floating-point tensor to ``dtype``; integers and other objects stay."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, tree)
