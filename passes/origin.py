"""Origin: what capture computed, as one digest an output, so that later programs can be compared with it.

A digest names a value by how it is computed: operator, constants, and the digests of the inputs. Two nodes with the same
digest hold the same numbers, in one program or in two; duplicates, recomputation and views that change nothing do not
matter. ``annotate`` records the digest of every output before any collective exists; ``passes.verify`` computes the digests
of a finished forward and backward pair, in which a gathered parameter counts as the parameter, and compares.

A pass that changes *what is computed* (not where, when or by whom) has to call :func:`record` again when it is done.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.base import (
    NoGrad,
    OutputRole,
    ParamInput,
    aten,
    info,
    inputs,
    outputs,
    set_info,
)

#: Operators whose result is, number by number and shape by shape, their first argument.
COPIES = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten.clone.default,
    }
)
_MAY_BE_IDENTITY = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.permute.default,
    }
)


@dataclass(frozen=True)
class Origin:
    """What capture said about a program.

    Attributes:
        outputs: digest of every output by role; ``None`` for an output that is ``None``.
        params: dtype in which each parameter that the program takes is used.
    """

    outputs: Mapping[OutputRole, str | None]
    params: Mapping[str, torch.dtype]


def record(gm: fx.GraphModule) -> fx.GraphModule:
    """Records the :class:`Origin` of a program that has roles and no collective for parameters yet.

    Args:
        gm: program; its ``ProgramInfo`` gets the fact ``"origin"``, random operators get a number.

    Returns:
        ``gm``.
    """
    numbers = itertools.count()
    known: dict[fx.Node, str] = {}
    for node in gm.graph.nodes:
        if is_random(node):
            node.meta["random"] = next(numbers)
        if node.op != "output":
            known[node] = digest(node, known.__getitem__)
    found: dict[OutputRole, str | None] = {}
    role: Any
    for _, node, role in outputs(gm):
        if not isinstance(role, NoGrad):
            found[role] = None if node is None else known[node]
    params = {role.fqn: node.meta["val"].dtype for node, role in inputs(gm, ParamInput)}
    program = info(gm)
    return set_info(gm, program.with_facts(origin=Origin(found, params)))


def digest(node: fx.Node, of: Callable[[fx.Node], str]) -> str:
    """The digest of a node.

    Args:
        node: any node but the output.
        of: digests of its inputs.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return _hash(f"symbol {value.node.expr}")
    if node.op == "placeholder":
        if isinstance(value, torch.Tensor) and any(
            isinstance(size, int) and size == 0 for size in value.shape
        ):
            return empty_digest(value.shape, value.dtype)
        return input_digest(node.meta.get("role"))
    if node.op == "get_attr":
        return _hash(f"attribute {node.target}")
    source = same_as(node)
    if source is not None:
        return of(source)
    text = f"{node.target}({_text(node.args, of)}, {_text(node.kwargs, of)})"
    return _hash(f"{text} random {node.meta.get('random', '?')}" if is_random(node) else text)


def input_digest(role: object) -> str:
    """The digest of an input with this role."""
    return _hash(repr(role))


def empty_digest(shape: Iterable[int], dtype: torch.dtype) -> str:
    """The digest of an input without elements: nothing tells two of the same shape and dtype apart."""
    return _hash(f"empty {dtype} {list(shape)}")


def same_as(node: fx.Node) -> fx.Node | None:
    """The node whose value ``node`` repeats: the input of a copy, or of a view that changes neither shape nor order."""
    if node.target in COPIES:
        return node.args[0]  # type: ignore[return-value]
    if node.target not in _MAY_BE_IDENTITY:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    old, new = source.meta["val"], node.meta["val"]
    if old.dim() != new.dim() or any(
        str(a) != str(b) for a, b in zip(old.shape, new.shape, strict=True)
    ):
        return None
    if node.target is aten.permute.default:
        axes: Any = node.args[1]
        return source if list(axes) == list(range(old.dim())) else None
    return source


def is_random(node: fx.Node) -> bool:
    """True for an operator that draws random numbers; not for one whose dropout probability is zero."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in ("dropout_p", "p"):
            given = node.kwargs.get(argument.name, argument.default_value)
            given = node.args[position] if position < len(node.args) else given
            return bool(given != 0.0)
    return True


def _text(value: Any, of: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return of(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(item, of) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_text(value[k], of)}" for k in sorted(value)) + "}"
    if isinstance(value, str) and value.startswith("hp:"):
        return value.rpartition(":")[
            0
        ]  # mesh dims: which mesh is checked where the group is looked up
    if isinstance(value, slice):
        return f"slice({_text((value.start, value.stop, value.step), of)})"
    return repr(value)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
