"""Policies as text: a TOML file for the command line and the training script alike, and plain values for saved plans.

::

    reshard_after_forward = true
    bucket_mb = 25
    units = ["model.layers.*"]
    ignored_params = ["*.inv_freq"]
    tp_plan = "auto"                     # or a table: globs of module FQNs to styles
    shard_placement_fn = "train.layout:shard_dim"

    [mp_policy]
    param_dtype = "bfloat16"
    reduce_dtype = "float32"

    [roles]
    shard = ["dp_shard", "cp"]

    [offload_policy]
    kind = "cpu"
    pin_memory = true

``zero = 3`` stands for ``Policy.zero(3)``. A field that is left out has its default.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Placement

from hyper_parallel.errors import PolicyError
from hyper_parallel.mesh import MeshRoles
from hyper_parallel.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Policy,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_SHORT_DTYPES |= {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)}


def load_policy(path: str | Path) -> Policy:
    """Reads a policy from a TOML file.

    Args:
        path: the file.

    Raises:
        PolicyError: no such file, no TOML, an unknown key, or a value that the field does not take; the text names the
            file and the key.

    Example:
        >>> policy = load_policy("policy.toml")  # doctest: +SKIP
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: cannot read the policy: {error}") from error
    return parse_policy(text, name=str(path))


def parse_policy(text: str, *, name: str = "policy") -> Policy:
    """Reads a policy from the text of a TOML file.

    Args:
        text: the TOML.
        name: what error messages call it.

    Raises:
        PolicyError: as for :func:`load_policy`.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{name}: no valid TOML: {error}") from error
    try:
        return _policy(table)
    except PolicyError as error:
        raise PolicyError(f"{name}: {error}") from error


def _policy(table: Mapping[str, Any]) -> Policy:
    names = [spec.name for spec in fields(Policy) if spec.name != "zero_level"]
    _check_keys(table, (*names, "zero"), "")
    values = {key: value for key, value in table.items() if key != "zero"}
    for key, read in _READERS.items():
        if key in values:
            values[key] = read(values[key])
    if "zero" in table:
        return Policy.zero(table["zero"], **values)
    return Policy(**values)


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            hint = (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else f"the keys are {', '.join(sorted(known))}"
            )
            raise PolicyError(f"unknown key {where + key!r}; {hint}")


def _table(key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PolicyError(f"{key}: expected a table ([{key}]), got {value!r}")
    return value


def _read_precision(value: object) -> MixedPrecisionPolicy:
    table = dict(_table("mp_policy", value))
    names = ("param_dtype", "reduce_dtype", "output_dtype")
    _check_keys(table, (*names, "cast_forward_inputs"), "mp_policy.")
    for name in names:
        if name in table:
            table[name] = _read_dtype(f"mp_policy.{name}", table[name])
    return MixedPrecisionPolicy(**table)


def _read_dtype(key: str, value: object) -> torch.dtype:
    if isinstance(value, str):
        text = value.removeprefix("torch.")
        found = getattr(torch, _SHORT_DTYPES.get(text, text), None)
        if isinstance(found, torch.dtype):
            return found
    raise PolicyError(f"{key}: expected the name of a dtype such as 'bfloat16', got {value!r}")


def _read_offload(value: object) -> OffloadPolicy:
    table = dict(_table("offload_policy", value))
    _check_keys(table, ("kind", "pin_memory"), "offload_policy.")
    kind = table.pop("kind", None)
    if kind not in ("none", "cpu"):
        raise PolicyError(f"offload_policy.kind: expected 'none' or 'cpu', got {kind!r}")
    if kind == "none" and table:
        raise PolicyError("offload_policy.pin_memory: only kind 'cpu' has it")
    if kind == "none":
        return OffloadPolicy()
    if not isinstance(table.get("pin_memory", True), bool):
        raise PolicyError(
            f"offload_policy.pin_memory: expected true or false, got {table['pin_memory']!r}"
        )
    return CPUOffloadPolicy(**table)


def _read_roles(value: object) -> dict[str, Any]:
    table = _table("roles", value)
    return {role: tuple(v) if isinstance(v, list) else v for role, v in table.items()}


def _read_function(value: object) -> Callable[..., Any]:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not colon:
        raise PolicyError(f"shard_placement_fn: expected 'package.module:function', got {value!r}")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"shard_placement_fn: cannot import {value!r}: {error}") from error
    return found  # type: ignore[return-value]


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "mp_policy": _read_precision,
    "offload_policy": _read_offload,
    "roles": _read_roles,
    "shard_placement_fn": _read_function,
}


# ------------------------------------------------------------------ as plain values


def policy_values(policy: Policy) -> dict[str, Any]:
    """Every field of a policy as numbers, text, lists and mappings: equal policies give equal values.

    Args:
        policy: the policy.
    """
    return {spec.name: _plain(getattr(policy, spec.name)) for spec in fields(policy)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, MeshRoles):
        return {role: list(dims) for role, dims in vars(value).items() if dims}
    if isinstance(value, CPUOffloadPolicy):
        return {"kind": "cpu", "pin_memory": value.pin_memory}
    if isinstance(value, OffloadPolicy):
        return {"kind": "none"}
    if isinstance(value, MixedPrecisionPolicy):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, frozenset | set):
        globs = sorted(item for item in value if isinstance(item, str))
        objects = len(value) - len(globs)
        return globs + ([f"({objects} parameter objects)"] if objects else [])
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if inspect.isroutine(value):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, Placement):
        return repr(value)
    state = vars(value) if hasattr(value, "__dict__") else {}
    return {"style": type(value).__name__, **{k: _plain(v) for k, v in sorted(state.items())}}


__all__ = ["load_policy", "parse_policy", "policy_values"]
