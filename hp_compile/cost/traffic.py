"""Bytes of every collective as an expression in the mesh sizes, under the ring algorithm of ``plan.ring_bytes``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from hp_compile.cost.symbols import (
    InputSymbols,
    group_size,
    padded_elements,
    whole_elements,
)
from hyper_parallel.plan import ParamPlan
from passes import base

_WEIGHTS_AND_GRADIENTS = ("unshard", "reduce_grad", "replicate_grad")


@dataclass(frozen=True)
class SymbolicCollective:
    """One collective of a program for any size of the mesh.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        phase: ``forward`` or ``backward``.
        axes: mesh dims it communicates over.
        purpose: what it is for (see ``passes.base.Comm``).
        params: FQNs of the parameters that it carries.
        inner: ranks of the smaller group of an integer reshard; 0 for the whole group.
        dtype: dtype on the wire.
        elements: elements of this rank's input.
        nbytes: bytes this rank sends.
    """

    kind: str
    phase: str
    axes: tuple[str, ...]
    purpose: str
    params: tuple[str, ...]
    inner: int
    dtype: torch.dtype
    elements: sympy.Expr
    nbytes: sympy.Expr


def symbolic_collectives(
    graphs: Mapping[str, fx.GraphModule], symbols: InputSymbols
) -> tuple[SymbolicCollective, ...]:
    """The collectives of programs, in issue order.

    Args:
        graphs: programs by phase, made for a mesh whose data dims are larger than 1 (a group of one has no collective).
        symbols: the programs' dynamic dims.
    """
    return tuple(
        _describe(node, comm, phase, base.info(gm).params, symbols)
        for phase, gm in graphs.items()
        for node, comm in base.collectives(gm)
    )


def _describe(
    node: fx.Node,
    comm: base.Comm,
    phase: str,
    params: Mapping[str, ParamPlan],
    symbols: InputSymbols,
) -> SymbolicCollective:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value: torch.Tensor = source.meta["val"]
    # The data-parallel dims do not change activations.
    of_params = comm.purpose in _WEIGHTS_AND_GRADIENTS
    elements = input_elements(comm, params) if of_params else symbols.elements(value)
    group = sympy.Integer(comm.inner) if comm.inner else group_size(comm.axes)
    return SymbolicCollective(
        kind=comm.kind,
        phase=phase,
        axes=comm.axes,
        purpose=comm.purpose,
        params=comm.params,
        inner=comm.inner,
        dtype=value.dtype,
        elements=elements,
        nbytes=ring_expression(comm.kind, elements * value.element_size(), group),
    )


def input_elements(comm: base.Comm, params: Mapping[str, ParamPlan]) -> sympy.Expr:
    """Elements that one rank puts into a collective of weights or gradients, padding included.

    Args:
        comm: metadata of the collective.
        params: plan of every parameter.
    """
    shards = sum_of_shards(params[fqn] for fqn in comm.params)
    if comm.kind == "reduce_scatter":
        return shards * group_size(comm.axes)
    if comm.inner:
        return shards * group_size(comm.axes) / comm.inner
    return shards


def sum_of_shards(plans: Iterable[ParamPlan]) -> sympy.Expr:
    """Elements of several padded shards; equal numbers of rows share one term."""
    return sympy.Add(*(padded_elements(plan) for plan in plans))


def sum_of_wholes(plans: Iterable[ParamPlan]) -> int:
    """Elements of several parameters after unshard."""
    return sum(whole_elements(plan) for plan in plans)


def ring_expression(kind: str, nbytes: sympy.Expr, group: sympy.Expr) -> sympy.Expr:
    """``plan.ring_bytes`` for a symbolic input and group.

    Args:
        kind: kind of collective.
        nbytes: size of one rank's input.
        group: ranks in the group.
    """
    if kind == "all_gather":
        return nbytes * (group - 1)
    if kind == "all_reduce":
        return sympy.ceiling(2 * nbytes * (group - 1) / group)
    return sympy.ceiling(nbytes * (group - 1) / group)


def totals(
    collectives: Iterable[SymbolicCollective], by: tuple[str, ...] = ("kind",)
) -> dict[tuple[str, ...], sympy.Expr]:
    """Bytes that a rank sends in a step, added up.

    Args:
        collectives: the collectives of a step.
        by: fields that make a row, of ``kind``, ``phase`` and ``purpose``.
    """
    found: dict[tuple[str, ...], list[sympy.Expr]] = {}
    for c in collectives:
        found.setdefault(tuple(getattr(c, name) for name in by), []).append(c.nbytes)
    return {key: sympy.Add(*terms) for key, terms in found.items()}


__all__ = [
    "SymbolicCollective",
    "input_elements",
    "ring_expression",
    "sum_of_shards",
    "sum_of_wholes",
    "symbolic_collectives",
    "totals",
]
