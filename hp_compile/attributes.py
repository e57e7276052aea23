"""What forward may read besides parameters, buffers and inputs: plain attributes of modules, by value.

A program has the Python values of its capture baked in, so a change of one selects another program, as a guard of
``torch.compile`` would. Numbers, strings and switches are compared by value, also inside lists, dicts, dataclasses and
configuration objects; functions, hooks and other objects by identity; tensors that are no parameter and no buffer by
identity and version. Module-level globals are not looked at.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hp_compile.effects import MODULE_ATTRIBUTES, is_plain_object
from hyper_parallel.torch_compat.distributed import versions

_SIMPLE = frozenset({bool, int, float, str, type(None)})
_SEQUENCES = (list, tuple, collections.deque)
#: Containers with more entries are compared by identity and length: looking at them would cost time in every call.
_MAX_ENTRIES = 128
_MAX_DEPTH = 5


class _Same:
    """An object that equals itself only, and lives as long as it is compared with."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def module_state(modules: Sequence[nn.Module]) -> tuple[Hashable, ...]:
    """Attributes and forward hooks of every module, as one value that can be compared and hashed.

    Args:
        modules: all modules of a model.
    """
    seen = {id(b) for m in modules for b in m._buffers.values() if b is not None}
    return tuple(tuple(_of_module(module, seen)) for module in modules)


def _of_module(module: nn.Module, seen: set[int]) -> Iterator[Hashable]:
    yield module.training
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        if hooks:
            yield tuple(_Same(hook) for hook in hooks.values())
    for name, value in module.__dict__.items():
        if type(value) in _SIMPLE:
            yield type(value), value
        elif name not in MODULE_ATTRIBUTES:
            yield _frozen(value, seen, 0)


def _frozen(value: Any, seen: set[int], depth: int) -> Hashable:
    kind = type(value)
    if kind in _SIMPLE:
        return kind, value
    if isinstance(value, torch.Tensor):
        registered = isinstance(value, nn.Parameter) or id(value) in seen
        by_identity = registered or value.is_inference()
        return _Same(value) if by_identity else (_Same(value), versions(value))
    if id(value) in seen:
        return "seen"
    entries = _entries(value)
    if entries is None or depth == _MAX_DEPTH:
        return _Same(value)
    if len(entries) > _MAX_ENTRIES:
        return _Same(value), len(entries)
    seen.add(id(value))
    return kind, tuple((key, _frozen(item, seen, depth + 1)) for key, item in entries)


def _entries(value: Any) -> list[tuple[Hashable, Any]] | None:
    """What is in a container or plain object; ``None`` for anything else."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _SEQUENCES):
        return list(enumerate(value))
    if isinstance(value, types.SimpleNamespace) or (
        not isinstance(value, nn.Module) and is_plain_object(value)
    ):
        return list(vars(value).items())
    return None


__all__ = ["module_state"]
