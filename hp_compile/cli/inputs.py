"""Example inputs of a model: given by a function, written as text, or tokens where the model takes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hp_compile.cli.errors import RequestError
from hp_compile.cli.models import call_with, import_object

Call = tuple[tuple[Any, ...], dict[str, Any]]

_TENSOR = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]+\d*)\[(?P<sizes>[^\]]*)\]")
_LABELS = ("labels", "targets", "target")
DEFAULT_SEQ = 2048


def example_inputs(model: nn.Module, specs: Sequence[str], batch: int, seq: int | None) -> Call:
    """Arguments and keywords to capture the model with; tensors are on meta.

    Args:
        model: the model.
        specs: what ``--inputs`` says.
        batch: sequences.
        seq: tokens in a sequence; ``None`` for the model's limit, at most 2048.

    Raises:
        RequestError: a text names no inputs, or none are given and the model does not take tokens alone.
    """
    sizes = {"batch": batch, "seq": seq if seq is not None else _sequence_length(model)}
    args, kwargs = _made(model, specs, sizes)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise RequestError(
            f"--inputs: {type(model).__name__}.forward does not take them: {error}"
        ) from error
    return args, kwargs


def _made(model: nn.Module, specs: Sequence[str], sizes: Mapping[str, int]) -> Call:
    if not specs:
        return _tokens(model, sizes)
    if len(specs) == 1 and not _TENSOR.fullmatch(specs[0]) and ":" in specs[0]:
        return _from_function(specs[0], sizes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        name, tensor = _tensor(spec, sizes)
        if name:
            kwargs[name] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs


def _sequence_length(model: nn.Module) -> int:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(DEFAULT_SEQ, limit) if isinstance(limit, int) and limit > 0 else DEFAULT_SEQ


def _tensor(spec: str, sizes: Mapping[str, int]) -> tuple[str, torch.Tensor]:
    match = _TENSOR.fullmatch(spec.strip())
    dtype = getattr(torch, match["dtype"], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise RequestError(
            f"--inputs {spec!r}: expected package.module:function, or a tensor as [NAME=]DTYPE[SIZES], such as "
            "float32[batch,128] or labels=int64[batch,seq]"
        )
    shape = []
    for part in filter(None, (p.strip() for p in match["sizes"].split(","))):
        if part not in sizes and not part.isdigit():
            raise RequestError(
                f"--inputs {spec!r}: the size {part!r} is no number, and neither batch nor seq"
            )
        shape.append(sizes.get(part) if part in sizes else int(part))
    return match["name"] or "", torch.empty(shape, dtype=dtype, device="meta")  # type: ignore[arg-type]


def _from_function(spec: str, sizes: Mapping[str, int]) -> Call:
    given = import_object(spec, "--inputs")
    if callable(given):
        given = call_with(given, dict(sizes), "meta", f"--inputs {spec}")
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple | list):
        pair = len(given) == 2 and isinstance(given[0], tuple | list)
        if pair and isinstance(given[1], Mapping):
            return tuple(given[0]), dict(given[1])
        return tuple(given), {}
    raise RequestError(
        f"--inputs {spec}: expected a tensor, a tuple of arguments, a dict of keywords, or (arguments, keywords), got "
        f"{type(given).__name__}"
    )


def _tokens(model: nn.Module, sizes: Mapping[str, int]) -> Call:
    """Tokens for the first parameter of forward, and for labels, if the model embeds something and needs no more."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    name = type(model).__name__
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    embeds = any(isinstance(m, nn.Embedding) for m in model.modules())
    needed = [p.name for p in plain[1:] if p.default is p.empty and p.name not in _LABELS]
    if not embeds or not plain or needed:
        signature = ", ".join(p.name for p in plain)
        why = f"it also needs {', '.join(needed)}" if needed else "it has no embedding"
        raise RequestError(
            f"--inputs: cannot guess the inputs of {name}.forward({signature}): {why}. Write them down, for example "
            f"--inputs {plain[0].name if plain else 'x'}=float32[batch,128], or name a function that returns them"
        )
    tokens = torch.empty(sizes["batch"], sizes["seq"], dtype=torch.int64, device="meta")
    kwargs: dict[str, Any] = {plain[0].name: tokens}
    kwargs |= {p.name: tokens for p in plain[1:] if p.name in _LABELS}
    if "use_cache" in (p.name for p in plain) or hasattr(model, "prepare_inputs_for_generation"):
        kwargs["use_cache"] = False
    return (), kwargs


__all__ = ["Call", "example_inputs"]
