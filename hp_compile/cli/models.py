"""MODEL: from the text of the command line to a module, without weights."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_compile.cli.errors import RequestError
from hp_compile.explain import user_line

_HF = "hf:"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def build_model(spec: str, device: str) -> nn.Module:
    """Builds the model that MODEL names.

    Args:
        spec: ``package.module:factory`` or ``hf:`` and a config.
        device: ``meta`` or ``cpu``.

    Raises:
        RequestError: there is no such thing, or building it failed.
    """
    if spec.startswith(_HF):
        return _hugging_face(spec.removeprefix(_HF), device)
    if ":" not in spec:
        raise RequestError(
            f"MODEL {spec!r}: expected package.module:factory, hf:config.json, hf:name, or the file of a saved plan"
        )
    factory = import_object(spec, "MODEL")
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise RequestError(
            f"MODEL {spec}: expected a class or function that gives an nn.Module, got {type(factory).__name__}"
        )
    _check_no_arguments(factory, spec)
    hint = "" if device == "cpu" else "; if it reads values of tensors, pass --build-on cpu"
    model = _call(factory, {}, device, f"MODEL {spec}", hint)
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"MODEL {spec}: it returned {type(model).__name__}, expected an nn.Module"
        )
    return model


def import_object(spec: str, what: str) -> Any:
    """Imports ``package.module:name``.

    Args:
        spec: the text.
        what: what error messages call it.

    Raises:
        RequestError: the module cannot be imported, or has no such name.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise RequestError(f"{what} {spec!r}: expected package.module:name")
    try:
        found = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise RequestError(
                f"{what} {spec}: there is no module {missing!r}; the directory {Path.cwd()} and the installed packages "
                "were searched"
            ) from error
        raise RequestError(
            f"{what} {spec}: importing {module_name} failed: {_failure(error)}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise RequestError(f"{what} {spec}: {module_name} has no {name!r}{_close(found, part)}")
        found = getattr(found, part)
    return found


def _close(found: object, name: str) -> str:
    """Names that could have been meant: similar ones, else what a module defines itself."""
    own = [
        n
        for n, value in vars(found).items()
        if callable(value) and getattr(value, "__module__", "") == getattr(found, "__name__", "")
    ]
    close = difflib.get_close_matches(name, own, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; it has {', '.join(own[:8])}" if own else ""


def _failure(error: BaseException) -> str:
    """Class and text of an error of somebody else's code, with the line that it came from."""
    where = user_line(error)
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return f"{text} ({where})" if where else text


def _check_no_arguments(factory: Callable[..., Any], spec: str) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise RequestError(
            f"MODEL {spec}: it needs arguments ({', '.join(needed)}); name a function without arguments that returns the "
            "module"
        )


def _call(
    function: Callable[..., Any], kwargs: dict[str, Any], device: str, what: str, hint: str
) -> Any:
    try:
        with torch.device(device):
            return function(**kwargs)
    except Exception as error:
        raise RequestError(f"{what}: it failed: {_failure(error)}{hint}") from error


def call_with(function: Callable[..., Any], options: dict[str, int], device: str, what: str) -> Any:
    """Calls a function of the user with those of ``options`` that it takes.

    Args:
        function: the function.
        options: keyword arguments it may take.
        device: device of the tensors that it makes.
        what: what error messages call it.

    Raises:
        RequestError: it failed.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    taken = {name: value for name, value in options.items() if name in parameters}
    return _call(function, taken, device, what, "")


def _hugging_face(name: str, device: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise RequestError(
            f"MODEL hf:{name}: transformers is not installed; pip install 'hyper-parallel[hf]'"
        ) from error
    local = Path(name)
    if (name.endswith(".json") or name.startswith((".", "/"))) and not local.exists():
        raise RequestError(f"MODEL hf:{name}: there is no such file in {Path.cwd()}")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError(
            f"MODEL hf:{name}: no config could be read: {first}\nA local file is written hf:path/config.json, with its "
            '"model_type"; a name is downloaded from the hub once'
        ) from error
    options: dict[str, Any] = {}
    if any(getattr(config, key, None) for key in _EXPERTS):
        options["experts_implementation"] = "batched_mm"  # what torch.export can trace
    try:
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:
        raise RequestError(
            f"MODEL hf:{name}: transformers cannot build a causal language model from it: {_failure(error)}"
        ) from error


__all__ = ["build_model", "call_with", "import_object"]
