"""What forward does besides computing: found while it is captured, and refused where a program could not do it.

A program runs no Python. A tensor kept on ``self``, a replaced parameter, a draw from Python's random numbers or a gradient
hook would be lost or frozen without a word, so each is an error. A buffer that is replaced (``self.b = self.b + 1``) becomes
an update of that buffer. A counter stays as it is, with a warning.
"""

from __future__ import annotations

import collections
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hp_compile.explain import Refusal, attribute_line
from hyper_parallel.torch_compat.graph import is_fake

log = logging.getLogger("hp_compile")

#: Attributes that every module has; none of them is the user's own state.
MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) | {"_hp_runtime"}
_MAX_DEPTH = 8
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_OPAQUE = ("torch", "builtins", "threading", "_thread", "logging", "types", "numpy", "functools")


def walk(
    value: object, path: str, seen: set[int] | None = None, depth: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested containers and plain objects, with the path that leads to each.

    Modules are followed too, so the caller must not hand in registered ones (put their ids into ``seen``).

    Args:
        value: where to start.
        path: its name.
        seen: ids that are not followed; grows.
        depth: how deep ``value`` lies.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    seen = set() if seen is None else seen
    if id(value) in seen or depth > _MAX_DEPTH or isinstance(value, str | bytes | int | float):
        return
    children: Iterator[tuple[str, Any]] | None = None
    if isinstance(value, dict):
        children = ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, _CONTAINERS):
        children = ((f"{path}[{i}]", item) for i, item in enumerate(list(value)))
    elif isinstance(value, nn.Module):
        children = iter([(f"{path}.{n}", p) for n, p in value.named_parameters()])
    elif is_plain_object(value):
        children = ((f"{path}.{name}", item) for name, item in list(vars(value).items()))
    if children is not None:
        seen.add(id(value))
        for where, item in children:
            yield from walk(item, where, seen, depth + 1)


def is_plain_object(value: object) -> bool:
    """True for an instance of the user's own class that is neither a function nor a library's machinery."""
    kind = type(value)
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return kind.__module__.partition(".")[0] not in _OPAQUE


def attribute_tensors(
    root: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """``(FQN, module, attribute path, tensor)`` of tensors outside parameters and buffers."""
    seen = {id(m) for m in root.modules()}
    for fqn, module in root.named_modules():
        for name, value in list(module.__dict__.items()):
            mirror = name == "_flat_weights" and isinstance(module, nn.RNNBase)
            if name not in MODULE_ATTRIBUTES and not mirror:  # torch keeps parameters there too
                for where, tensor in walk(value, name, seen):
                    yield fqn, module, where, tensor


def joined(fqn: str, name: str) -> str:
    """``fqn.name``, or the name alone at the root."""
    return f"{fqn}.{name}" if fqn else name


class StateWatch:
    """Compares the state of a module before and after its forward.

    Args:
        root: the fake twin.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.named_modules())
        self._root = root
        self._parameters = {fqn: dict(m._parameters) for fqn, m in self._modules}
        self._buffers = {fqn: dict(m._buffers) for fqn, m in self._modules}
        self._tensors = {(f, w): t for f, _, w, t in attribute_tensors(root)}
        self._plain = self._plain_state()
        self._random = _random_states()

    def finish(self) -> dict[str, torch.Tensor]:
        """Refuses what a program cannot do; reports lost side effects.

        Returns:
            New values of the buffers that forward replaced, by FQN; the module has the old ones again.

        Raises:
            Refusal: forward keeps a tensor, replaces a parameter, or draws from Python's random numbers.
        """
        drawn = [n for n, state in _random_states().items() if state != self._random[n]]
        _restore_random(self._random)
        if drawn:
            raise Refusal(
                f"forward draws random numbers from {' and '.join(drawn)}, and a program would repeat the same ones forever",
                "Draw them with torch (torch.rand), or outside forward and pass them in",
                fqn="",
            )
        replaced: dict[str, torch.Tensor] = {}
        for fqn, module in self._modules:
            self._check_parameters(fqn, module)
            replaced.update(self._take_back_buffers(fqn, module))
        for fqn, module, where, tensor in attribute_tensors(self._root):
            if self._tensors.get((fqn, where)) is not tensor:
                raise Refusal(
                    f"forward stores a tensor in self.{joined(fqn, where)}, which a captured program cannot do: it would be "
                    "stale after the first call",
                    "Return it from forward, or register_buffer it and update it in place",
                    where=self._line(module, where),
                    fqn=fqn,
                )
        self._report_side_effects()
        return replaced

    def _check_parameters(self, fqn: str, module: nn.Module) -> None:
        before = self._parameters[fqn]
        for name in {**before, **module._parameters}:
            if module._parameters.get(name) is not before.get(name):
                raise Refusal(
                    f"forward replaces parameter {joined(fqn, name)!r}; the optimizer and the shards know the old one",
                    "Compute a new value without assigning it to the parameter, or update it outside forward",
                    where=self._line(module, name),
                    fqn=fqn,
                )

    def _take_back_buffers(self, fqn: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        before = self._buffers[fqn]
        for name in {**before, **module._buffers}:
            old, new = before.get(name), module._buffers.get(name)
            if new is old:
                continue
            if old is None or new is None or not _same_kind(old, new):
                raise Refusal(
                    f"forward replaces buffer {joined(fqn, name)!r} by one of another shape, dtype or kind "
                    f"({_kind(old)} -> {_kind(new)})",
                    "Register the buffer in its final shape in __init__ and update it in place",
                    where=self._line(module, name),
                    fqn=fqn,
                )
            module._buffers[name] = old
            yield joined(fqn, name), new.detach()

    def _line(self, module: nn.Module, name: str) -> str:
        return attribute_line(module, name) or attribute_line(self._root, name)

    def _plain_state(self) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], Any] = {}
        for fqn, module in self._modules:
            for name, value in module.__dict__.items():
                if name in MODULE_ATTRIBUTES:
                    continue
                if value is None or isinstance(value, bool | int | float | str):
                    found[fqn, name] = value
                elif isinstance(value, list | dict | set):
                    found[fqn, name] = len(value)
        return found

    def _report_side_effects(self) -> None:
        after = self._plain_state()
        changed = [joined(*k) for k in {**self._plain, **after} if _changed(self._plain, after, k)]
        if changed:
            log.warning(
                "forward changes self.%s; a program runs no Python, so the module's own attributes stay as they are",
                ", self.".join(changed),
            )


def _changed(before: dict[Any, Any], after: dict[Any, Any], key: Any) -> bool:
    old, new = before.get(key), after.get(key)
    return type(old) is not type(new) or (old != new and (old == old or new == new))


def _same_kind(old: torch.Tensor, new: torch.Tensor) -> bool:
    sizes = (*old.shape, *new.shape)
    if old.dim() != new.dim() or any(isinstance(s, torch.SymInt) for s in sizes):
        return False
    return old.shape == new.shape and old.dtype == new.dtype


def _kind(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')}{[str(s) for s in tensor.shape]}"


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tolist(), *rest)
    return states


def _restore_random(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random module"])
    if "numpy.random" in states:
        sys.modules["numpy"].random.set_state(states["numpy.random"])


_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})


class CallWatch(TorchFunctionMode):
    """Looks at every call of a torch function in forward: gradient hooks, and parameters that no module owns."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuses the call, or makes it."""
        kwargs = kwargs or {}
        if func in _HOOKS:
            raise Refusal(
                f"forward calls {func.__name__} on a tensor, and a program has no gradient hooks",
                "Scale or change gradients with an operator in forward, or hook the parameter itself outside forward",
            )
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if type(item) in (nn.Parameter, torch.Tensor) and _is_foreign(item):
                    raise Refusal(
                        "forward uses a tensor that requires grad but is no parameter of the module "
                        f"(shape {tuple(item.shape)}), so it would become a constant that is never trained",
                        "Register it: assign it as an nn.Parameter attribute of a module, or pass it as an input",
                    )
        return func(*args, **kwargs)


def _is_foreign(tensor: torch.Tensor) -> bool:
    return not is_fake(tensor) and tensor.requires_grad and torch.is_grad_enabled()


__all__ = ["CallWatch", "StateWatch", "attribute_tensors", "joined", "walk"]
