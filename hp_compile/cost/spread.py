"""Which values of a program have a size that depends on the mesh, and how large they are.

Activations of a data-parallel program have the same size on every mesh. What changes is what the passes added: shards, the
buffers of collectives, and what is cut out of them. Their sizes follow from the parameter plans, along the few operators
that the passes emit.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from hp_compile.cost.symbols import InputSymbols, group_size, padded_elements
from hp_compile.cost.traffic import input_elements
from passes import base
from passes.base import GATHER, SCATTER, Comm, ParamInput, SavedInput, aten

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_SLICE = torch.ops.hyper_parallel.shard_slice.default


class Spread:
    """Element counts of all tensor values of a pair of programs.

    Args:
        graphs: programs by phase, forward first.
        symbols: the programs' dynamic dims.
    """

    def __init__(self, graphs: Mapping[str, fx.GraphModule], symbols: InputSymbols) -> None:
        self._symbols = symbols
        self._sizes: dict[fx.Node, sympy.Expr] = {}
        self._comms: dict[fx.Node, Comm] = {}
        self._known: dict[tuple[Any, ...], sympy.Expr] = {}
        saved: dict[int, fx.Node] = {}
        for gm in graphs.values():
            self._read(gm, saved)
            saved = {
                role.index: node
                for _, node, role in base.outputs(gm, base.SavedOutput)
                if node is not None
            }

    def nbytes(self, node: fx.Node, value: torch.Tensor) -> sympy.Expr:
        """Bytes of a value of a node.

        Args:
            node: the node.
            value: its ``meta["val"]``, or one element of it.
        """
        elements = self._sizes.get(node)
        if elements is None:
            shape: tuple[Any, ...] = tuple(value.shape)
            key = tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in shape)
            elements = self._known.get(key)
            if elements is None:
                elements = self._known[key] = self._symbols.elements(value)
        return elements * value.element_size()

    def _read(self, gm: fx.GraphModule, saved: Mapping[int, fx.Node]) -> None:
        params = base.info(gm).params
        sizes, comms = self._sizes, self._comms
        role: Any
        for node, role in base.inputs(gm):
            if isinstance(role, ParamInput):
                plan = params[role.fqn]
                if plan.shard_size > 1 and not plan.ignored:
                    sizes[node] = padded_elements(plan)
            elif isinstance(role, SavedInput) and role.index in saved:
                source = saved[role.index]
                if source in sizes:
                    sizes[node] = sizes[source]
                if source in comms:
                    comms[node] = comms[source]
        for node, comm in base.collectives(gm):
            comms[node] = comm
            if node.target is SCATTER:
                self._mark_packing(node, input_elements(comm, params))
        for node in gm.graph.nodes:
            if node.op == "call_function" and node not in sizes:
                elements = self._result(node, params)
                if elements is not None:
                    sizes[node] = elements

    def _mark_packing(self, start: fx.Node, elements: sympy.Expr) -> None:
        """The buffer that a reduce-scatter reads, and what only casts, scales or renames it."""
        node = start.args[0]
        for _ in range(8):
            if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.users) > 1:
                return
            self._sizes[node] = elements
            if node.target is aten.cat.default:
                return
            node = node.args[0] if node.args else None

    def _result(self, node: fx.Node, params: Mapping[str, Any]) -> sympy.Expr | None:
        """Elements of what a node returns, ``None`` if the mesh does not change it."""
        sizes, comms = self._sizes, self._comms
        sources = [n for n in node.all_input_nodes if n in sizes]
        comm = comms.get(node)
        if node.target is SCATTER:
            assert comm is not None
            return input_elements(comm, params) / group_size(comm.axes)
        if not sources:
            return None
        source = sources[0]
        if node.target is GATHER:
            assert comm is not None
            group = sympy.Integer(comm.inner) if comm.inner else group_size(comm.axes)
            return sizes[source] * group
        if node.target is _SLICE:
            self._follow(node, source)
            return sizes[source] / int(node.args[1])  # type: ignore[arg-type]
        if node.target is aten.cat.default:
            return sympy.Add(
                *(sizes.get(n, self._symbols.elements(n.meta["val"])) for n in node.all_input_nodes)
            )
        if node.target is operator.getitem and source.target in _SPLITS:
            return self._piece(source, int(node.args[1]), params)  # type: ignore[arg-type]
        if node.target in _SPLITS:
            self._follow(node, source)
            return sizes[source]
        value, other = node.meta.get("val"), source.meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            return None
        if len(sources) > 1 or len(node.all_input_nodes) > 1 or not _same_elements(value, other):
            return None
        self._follow(node, source)
        return sizes[source]

    def _follow(self, node: fx.Node, source: fx.Node) -> None:
        """A value carries the parameters of the value that it renames, casts or scales."""
        if source in self._comms and node not in self._comms:
            self._comms[node] = self._comms[source]

    def _piece(self, split: fx.Node, index: int, params: Mapping[str, Any]) -> sympy.Expr:
        """One piece of a buffer: a parameter's part of a bucket, or a rank's part of a parameter."""
        whole, comm = self._sizes[split], self._comms.get(split)
        count = len(split.meta["val"])
        if comm is None or len(comm.params) != count or count == 1:
            return whole / count
        one = padded_elements(params[comm.params[index]])
        if comm.kind != "all_gather":
            return one
        return one * group_size(comm.axes)


def _same_elements(value: torch.Tensor, other: torch.Tensor) -> bool:
    return base.hint(value.numel()) == base.hint(other.numel())


__all__ = ["Spread"]
