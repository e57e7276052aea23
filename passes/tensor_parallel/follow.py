"""The first walk of the tensor-parallel pass: the layout of every value."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from hyper_parallel.errors import CaptureError
from passes.base import hint, module_path, source_line
from passes.tensor_parallel.layout import REPLICATED, Layout
from passes.tensor_parallel.rule import Call, Decision, decide


@dataclass(frozen=True)
class Boundary:
    """Layouts that a plan asks for where values enter and leave a module.

    Attributes:
        enters: layout of activations that enter, if ``given`` is their layout or None; None leaves them.
        given: the layout that an entering value must have for ``enters`` to apply; None for any.
        leaves: layout of activations that leave; None leaves them.
        least_rank: values with fewer dims are left alone.
    """

    enters: Layout | None = None
    given: Layout | None = None
    leaves: Layout | None = None
    least_rank: int = 0


@dataclass
class Layouts:
    """Layouts of all values, and decisions about all calls.

    Attributes:
        values: layout of every tensor, or of every tensor of a list.
        decisions: for calls that run on parts.
        needs_grad: values that a gradient reaches.
        terms: parameters, and views and casts of them, whose gradients are terms: every reader is a call on parts.
        gathered: for calls that do not run on parts, the inputs that are cut.
        reasons: why they do not.
        uncut: modules whose boundary asks for a cut that the value cannot have, with the dim and its length.
    """

    forward: fx.GraphModule
    params: Mapping[str, Layout]
    boundaries: Mapping[str, Boundary]
    size: int
    group: str
    values: dict[fx.Node, Any] = field(default_factory=dict)
    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    needs_grad: set[fx.Node] = field(default_factory=set)
    terms: set[fx.Node] = field(default_factory=set)
    gathered: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    uncut: dict[str, tuple[int, int]] = field(default_factory=dict)
    _weights: set[fx.Node] = field(default_factory=set)
    _copies: set[fx.Node] = field(default_factory=set)

    def decide(self) -> Layouts:
        """Walks forward through the graph, then back to find the parameters whose gradients are terms."""
        for node in self.forward.graph.nodes:
            self._visit(node)
        for node in reversed(self.forward.graph.nodes):
            if node in self._weights and self._only_terms(node):
                self.terms.add(node)
        return self

    def _visit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op == "get_attr":
            self.values[node] = self.params.get(str(node.target), REPLICATED)
            found = attribute(self.forward, str(node.target))
            if isinstance(found, nn.Parameter):
                self._weights.add(node)
            if isinstance(found, torch.Tensor) and found.requires_grad:
                self.needs_grad.add(node)
            return
        if node.op != "call_function":
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                self.values[node] = REPLICATED
                if value.requires_grad or value.is_floating_point():
                    self.needs_grad.add(node)
            return
        tensors = [n for n in node.all_input_nodes if n in self.values]
        if _floating(value) and any(n in self.needs_grad for n in tensors):
            self.needs_grad.add(node)
        if len(tensors) == 1 and tensors[0] in self._weights and _floating(value):
            self._weights.add(node)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if source in self.values:
                self.values[node] = self.values[source][node.args[1]]
            if source in self._copies:
                self._copies.add(node)
            return
        if not isinstance(value, torch.Tensor | list | tuple):
            return  # a size, or a check
        self.values[node] = self._decided(node, tensors, value)
        self._follow_memory(node)

    def _decided(self, node: fx.Node, tensors: list[fx.Node], value: Any) -> Any:
        many = isinstance(value, list | tuple)
        whole = (REPLICATED,) * len(value) if many else REPLICATED
        seen = {n: self.seen_at(n, node) for n in tensors}
        if all(layout.replicated for layout in seen.values()):
            return whole
        call = Call(node, seen, self.size, self.group, self._weights.__contains__)
        decision = decide(call)
        if decision is None:
            self.gathered[node] = [n for n in tensors if not seen[n].replicated]
            self.reasons[node] = call.reasons[-1]
            return whole
        if decision.partial:
            leaves = self._leaves(node, value)
            if leaves is not None:
                decision = replace(decision, output=leaves)
        self.decisions[node] = decision
        return decision.output

    def _leaves(self, node: fx.Node, value: Any) -> Layout | None:
        for name in reversed(_modules(node)):
            if name in self.boundaries:
                asked = self.boundaries[name]
                small = asked.leaves is None or len(value.shape) < asked.least_rank
                return None if small else self._fitted(asked.leaves, value, name)
        return None

    def seen_at(self, source: fx.Node, user: fx.Node) -> Layout:
        """Layout in which ``user`` sees a value, after the module boundaries between them."""
        layout: Layout = self.values[source]
        if not self.boundaries or not isinstance(layout, Layout) or source in self._weights:
            return layout
        value: Any = source.meta.get("val")
        if not _floating(value) or source.op == "get_attr":
            return layout
        inside, outside = _modules(source), _modules(user)
        for name in reversed(inside):
            asked = self.boundaries.get(name)
            if asked is not None and name not in outside and len(value.shape) >= asked.least_rank:
                layout = self._fitted(asked.leaves, value, name) or layout
        for name in outside:
            asked = self.boundaries.get(name)
            if asked is None or name in inside:
                continue
            if asked.given is None or self._fitted(asked.given, value, name) == layout:
                layout = self._fitted(asked.enters, value, name) or layout
        return layout

    def _fitted(self, layout: Layout | None, value: Any, module: str) -> Layout | None:
        """A layout for a value, its dim counted from the front; None where the value cannot have it."""
        if layout is None or layout.dim is None:
            return layout
        rank = len(value.shape)
        if not -rank <= layout.dim < rank:
            return None
        dim = layout.dim % rank
        length = hint(value.shape[dim])
        if length % (self.size * layout.blocks) == 0:
            return layout.at(dim)
        self.uncut.setdefault(module, (dim, length))
        return None

    def _follow_memory(self, node: fx.Node) -> None:
        """Notes views of a converted value, which is a copy, and refuses to write into one: the original would not change."""
        schema = getattr(node.target, "_schema", None)
        first = node.args[0] if node.args else None
        if schema is None or not isinstance(first, fx.Node) or first not in self.values:
            return
        copied = first in self._copies or self.wanted(first, node) != self.values[first]
        if not copied:
            return
        if schema.is_mutable:
            raise CaptureError(
                f"{module_path(node) or 'the root module'}: {node.target} writes into a part of a value that the "
                f"tensor-parallel plan cuts{at_line(node)}; write to a new tensor, or leave this module out of tp_plan"
            )
        if any(r.alias_info is not None for r in schema.returns):
            self._copies.add(node)

    def wanted(self, source: fx.Node, user: fx.Node) -> Layout:
        """Layout in which ``user`` reads a value."""
        decision = self.decisions.get(user)
        if decision is None:
            return REPLICATED
        return decision.inputs.get(source, REPLICATED)

    def varies(self, source: fx.Node, user: fx.Node) -> bool:
        """Whether the gradient that ``user`` gives a whole value is a term of a sum."""
        decision = self.decisions.get(user)
        if decision is None or decision.alike:
            return user in self.terms
        if source in decision.after:  # added to the sum
            return decision.output != REPLICATED
        return True

    def _only_terms(self, node: fx.Node) -> bool:
        if node not in self.needs_grad or self.values[node] != REPLICATED or not node.users:
            return False
        return all(
            user.op != "output" and self.wanted(node, user).replicated and self.varies(node, user)
            for user in node.users
            if user.op == "output" or user in self.values  # not a check of its dtype
        )


def _floating(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_floating, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _modules(node: fx.Node) -> list[str]:
    """FQNs of the modules around a node, outermost first."""
    return [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]


def attribute(module: nn.Module, name: str) -> Any:
    """A parameter or buffer by its FQN."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def at_line(node: fx.Node) -> str:
    """`` (file:line)`` of a call, empty when unknown."""
    line = source_line(node)
    return f" ({line})" if line else ""
