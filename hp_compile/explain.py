"""Errors that say where: any failure of capture becomes a CaptureError with module, source line and advice."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hyper_parallel.errors import CaptureError


class Refusal(Exception):
    """Something in forward that a program cannot express.

    Args:
        what: what forward does, as the end of "cannot capture module 'x': ".
        advice: what to do instead.
        where: ``file:line``, when it is not the line that is running.
        fqn: the module, when it is not the one that is running.
    """

    def __init__(self, what: str, advice: str, *, where: str = "", fqn: str | None = None) -> None:
        super().__init__(what)
        self.advice = advice
        self.where = where
        self.fqn = fqn


@contextlib.contextmanager
def explained(twin: nn.Module) -> Iterator[None]:
    """Turns any failure inside the block into a CaptureError.

    Args:
        twin: the module that is traced; its names are the ones that the text uses.

    Raises:
        CaptureError: something failed.
    """
    names = {id(m): fqn for fqn, m in twin.named_modules()}
    stack: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            stack.append(module)

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if stack and stack[-1] is module:
            stack.pop()

    pre = nn.modules.module.register_module_forward_pre_hook(enter)
    post = nn.modules.module.register_module_forward_hook(leave)
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(explain(error, names.get(id(stack[-1])) if stack else None)) from error
    finally:
        pre.remove()
        post.remove()


def explain(error: Exception, fqn: str | None) -> str:
    """The text of a CaptureError.

    Args:
        error: what was raised.
        fqn: FQN of the module whose forward was running; empty for the root, ``None`` when unknown.
    """
    refusal = _refusal(error)
    if refusal is not None:
        where = refusal.where or user_line(refusal)
        return f"{_place(fqn if refusal.fqn is None else refusal.fqn, where)}: {refusal}\n{refusal.advice}"
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    return f"{_place(fqn, user_line(error))}: {type(error).__name__}: {first}\n{_advice(error)}"


def _place(fqn: str | None, line: str) -> str:
    where = f"module {fqn!r}" if fqn else "the root module" if fqn == "" else "the model"
    return f"cannot capture {where}{f' ({line})' if line else ''}"


def _refusal(error: BaseException) -> Refusal | None:
    """A refusal that export may have wrapped."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, Refusal):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


_FALLBACK = "or set Policy(fallback='eager')"

_ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"data-dependent|could not guard|guardondatadependent|\.item\(\)|symnode",
        "The forward branches on the value of a tensor (for example `if x.sum() > 0` or `int(x.sum())`). Use torch.where or "
        f"torch.cond, move the decision out of forward, {_FALLBACK}",
    ),
    (
        r"constant's list|functorch tensor|requires_grad_\(\)",
        "The forward reads `.data`, turns requires_grad on inside itself, or differentiates (torch.autograd.grad, "
        f"torch.func). Use detach() to read a value, do the rest outside forward, {_FALLBACK}",
    ),
    (
        r"\.numpy\(\)|numpy",
        f"The forward leaves torch for numpy. Use torch operators, pass the array as an input, {_FALLBACK}",
    ),
    (
        r"higher.?order|torch\.cond|cond operator",
        "An operator that takes functions could not be traced. Pass it plain functions of its tensor operands, {_FALLBACK}",
    ),
)


def _advice(error: Exception) -> str:
    text = f"{type(error).__name__} {error}".lower()
    for pattern, advice in _ADVICE:
        if re.search(pattern, text):
            return advice.replace("{_FALLBACK}", _FALLBACK)
    return f"Change that line so that torch.export can trace it, {_FALLBACK}"


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame that belongs neither to torch nor to this project."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = ""
        trace = current.__traceback__
        while trace is not None:
            module = trace.tb_frame.f_globals.get("__name__", "")
            if not _internal(str(module), trace.tb_frame.f_code.co_filename):
                found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        if found:
            return found
        current = current.__cause__ or current.__context__
    return ""


def _internal(module: str, filename: str) -> bool:
    root = module.partition(".")[0]
    return (
        root in ("torch", "hp_compile", "passes", "hyper_parallel", "contextlib", "functools")
        or filename.startswith("<")
        or filename.startswith(str(torch.__path__[0]))
    )


def attribute_line(module: nn.Module, name: str) -> str:
    """``file:line`` where the user's class assigns an attribute, or of its forward; empty for torch's own classes.

    Args:
        module: the module.
        name: the attribute, or a path that starts with it.
    """
    if type(module).__module__.partition(".")[0] == "torch":
        return ""
    attribute = re.split(r"[\[.]", name)[0]
    assigns = re.compile(rf"\.{re.escape(attribute)}\b.*(=|append|update|add|extend|\[)")
    for source in (type(module).forward, type(module)):
        try:
            file = inspect.getsourcefile(source)
            lines, first = inspect.getsourcelines(source)
        except (TypeError, OSError):
            continue
        hits = [i for i, line in enumerate(lines) if assigns.search(line)]
        if hits or source is type(module):
            return f"{file}:{first + (hits[-1] if hits else 0)}"
    return ""


__all__ = ["Refusal", "attribute_line", "explain", "explained", "user_line"]
