"""What a layout rule is: one operator call of the single-device forward in, a decision out.

A rule looks at one call of the exported forward, whose shapes are those of one device, and answers with a
:class:`Decision`, or with None where the operator cannot run on parts. Then its inputs are gathered, it runs as on one
device, and the plan says so: a missing rule costs a collective and is never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.base import hint
from passes.tensor_parallel.layout import Layout

#: Emits a call in the local program and returns its node.
Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class Call:
    """One operator call of the single-device forward.

    Attributes:
        node: the call.
        layouts: layout of every tensor that it reads.
        size: ranks of the tensor-parallel dim.
        group: alias of their group.
        is_param: whether a node is a parameter, or a view or cast of one.
        reasons: why its rule says that it cannot run on parts, if it says so.
    """

    node: fx.Node
    layouts: Mapping[fx.Node, Layout]
    size: int
    group: str
    is_param: Callable[[fx.Node], bool]
    reasons: list[str] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        """Notes why the operator cannot run on these parts, for a reader of the plan."""
        self.reasons.append(reason)

    def argument(self, name: str) -> Any:
        """An argument by its name in the operator's schema."""
        schema = self.node.target._schema  # type: ignore[union-attr]
        for position, argument in enumerate(schema.arguments):
            if argument.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                return self.node.kwargs.get(name, argument.default_value)
        raise KeyError(f"{self.node.target} has no argument {name!r}")

    def layout(self, node: fx.Node) -> Layout:
        """Layout of an input."""
        return self.layouts[node]

    @property
    def out_shape(self) -> tuple[Any, ...]:
        """Shape of the output on one device."""
        return shape_of(self.node)

    def divides(self, length: Any, blocks: int = 1) -> bool:
        """Whether the ranks can hold equal parts of so many rows."""
        return hint(length) % (self.size * blocks) == 0


@dataclass(frozen=True)
class Decision:
    """How an operator runs on parts.

    Attributes:
        output: layout of its output, or one a tensor of a list.
        inputs: layout that it needs of each input; replicated where nothing is said.
        partial: its output is a term of a sum.
        emit: makes the local call from the local arguments, when it is not the same call: ``emit(add, args, kwargs)``,
            where ``add(target, *args, **kwargs)`` makes a node.
        alike: all ranks compute the same: of inputs that are cut only dtype or sizes are read.
        after: what is added to the sum of a partial output: the arguments of ``aten.add.Tensor`` after the first.
    """

    output: Layout | tuple[Layout, ...]
    inputs: Mapping[fx.Node, Layout] = field(default_factory=dict)
    partial: bool = False
    emit: Callable[..., fx.Node] | None = None
    alike: bool = False
    after: tuple[fx.Node, ...] = ()


Rule = Callable[[Call], Decision | None]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return add


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Shape of a tensor on one device."""
    return tuple(node.meta["val"].shape)


def listed(value: Any) -> list[int]:
    """One dim, or several, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def decide(call: Call) -> Decision | None:
    """How a call whose inputs are not all replicated runs on parts; None if it cannot."""
    found = RULES.get(call.node.target)
    if found is None and torch.Tag.pointwise in getattr(call.node.target, "tags", ()):
        found = RULES[torch.Tag.pointwise]
    if found is None:
        call.refuse("it has no rule for parts")
        return None
    decision = found(call)
    if decision is None and not call.reasons:
        call.refuse("it mixes what the ranks hold apart")
    return decision
