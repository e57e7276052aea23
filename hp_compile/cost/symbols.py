"""Sizes as sympy expressions: one symbol a mesh dim, one a dynamic dim of the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from hyper_parallel.errors import HPCompileError
from hyper_parallel.plan import ParamPlan

#: What a program's sizes are in terms of.
Sizes = Mapping[str, int]


def mesh_symbol(axis: str) -> sympy.Symbol:
    """The size of one mesh dim.

    Args:
        axis: name of the dim.
    """
    return sympy.Symbol(axis, integer=True, positive=True)


def group_size(axes: Iterable[str]) -> sympy.Expr:
    """The number of ranks along mesh dims together; 1 for none."""
    return sympy.prod([mesh_symbol(axis) for axis in axes])


@dataclass(frozen=True)
class InputSymbols:
    """The dynamic dims of a program's inputs, under names that people read.

    Attributes:
        names: the program's own symbols and the names used here: ``batch``, then ``size1`` and so on.
        traced: the size of each name in the example that was captured.
    """

    names: Mapping[Any, sympy.Symbol]
    traced: Mapping[str, int]

    @classmethod
    def of(cls, shapes: Iterable[Iterable[Any]]) -> InputSymbols:
        """Reads the shapes of a program's inputs.

        Args:
            shapes: shape of every tensor input, ints and symbols.
        """
        names: dict[Any, sympy.Symbol] = {}
        traced: dict[str, int] = {}
        for size in (size for shape in shapes for size in shape):
            if not isinstance(size, torch.SymInt):
                continue
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                if symbol in names:
                    continue
                name = "batch" if not names else f"size{len(names)}"
                names[symbol] = mesh_symbol(name)
                traced[name] = _hint(size, symbol)
        return cls(names, traced)

    def expression(self, size: int | torch.SymInt | sympy.Expr) -> sympy.Expr:
        """A size of a traced value as an expression.

        Args:
            size: a number, or a symbolic one.
        """
        if isinstance(size, torch.SymInt):
            return size.node.expr.xreplace(dict(self.names))
        return sympy.sympify(size)

    def elements(self, value: Any) -> sympy.Expr:
        """The number of elements of a traced tensor."""
        return sympy.prod([self.expression(size) for size in value.shape])


def _hint(size: torch.SymInt, symbol: Any) -> int:
    """The traced value of a symbol that a size is made of."""
    expression, value = size.node.expr, int(size.node.hint)
    if expression == symbol:
        return value
    solved = sympy.solve(expression - value, symbol)
    return int(solved[0]) if solved else value


def padded_elements(plan: ParamPlan) -> sympy.Expr:
    """Elements of a parameter's shard, padded to the longest one, in the sizes of the shard dims.

    Chunks of chunks are as long as chunks over all the ranks at once, so several shard dims need no nested rounding.

    Args:
        plan: plan of the parameter.
    """
    if plan.shard_dim is None:
        return sympy.Integer(_product(plan.local_shape))
    rows = plan.local_shape[plan.shard_dim]
    others = _product(s for d, s in enumerate(plan.local_shape) if d != plan.shard_dim)
    return others * sympy.ceiling(sympy.Integer(rows) / group_size(plan.shard_axes))


def whole_elements(plan: ParamPlan) -> int:
    """Elements of a parameter after unshard."""
    return _product(plan.local_shape)


def evaluate(expression: sympy.Expr | int, sizes: Mapping[str, int]) -> int:
    """The value of an expression; a part of a byte counts as one.

    Args:
        expression: in the symbols of this module.
        sizes: value of every symbol, by name.

    Raises:
        HPCompileError: a symbol has no value.
    """
    expression = sympy.sympify(expression)
    missing = sorted({str(s) for s in expression.free_symbols} - set(sizes))
    if missing:
        raise HPCompileError(
            f"no size given for {', '.join(missing)}; the expression is in the mesh dims and the dynamic input dims, and "
            f"got {dict(sizes)}"
        )
    value = expression.xreplace({s: sympy.Integer(sizes[str(s)]) for s in expression.free_symbols})
    return int(sympy.ceiling(value.doit()))


def _product(numbers: Iterable[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


__all__ = [
    "InputSymbols",
    "Sizes",
    "evaluate",
    "group_size",
    "mesh_symbol",
    "padded_elements",
    "whole_elements",
]
