"""The two walks of the tensor-parallel pass: decide layouts, then write the local graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from hyper_parallel.errors import CaptureError
from hyper_parallel.torch_compat import graph as compat
from passes.base import aten, module_path, source_line
from passes.tensor_parallel import functional
from passes.tensor_parallel.layout import REPLICATED, Layout
from passes.tensor_parallel.rules import Call, Decision, decide, shape_of


@dataclass(frozen=True)
class Boundary:
    """Layouts that a plan asks for where values enter and leave a module.

    Attributes:
        enters: layout of activations that enter, if ``given`` is their layout or None; None leaves them.
        given: the layout that an entering value must have for ``enters`` to apply; None for any.
        leaves: layout of activations that leave; None leaves them.
    """

    enters: Layout | None = None
    given: Layout | None = None
    leaves: Layout | None = None


@dataclass(frozen=True)
class Gathered:
    """A value that had to be made whole for an operator without a rule.

    Attributes:
        module: FQN of the module whose forward calls the operator.
        operator: the operator.
        shape: shape of the whole value.
        where: source line, empty when unknown.
    """

    module: str
    operator: str
    shape: tuple[Any, ...]
    where: str

    def __str__(self) -> str:
        line = f", {self.where}" if self.where else ""
        return f"{self.module or '(root)'}: {self.operator} on [{', '.join(map(str, self.shape))}]{line}"


@dataclass(frozen=True)
class Parallelised:
    """The result of the pass.

    Attributes:
        forward: the local forward.
        partial: names of whole parameters whose gradients are terms of a sum over the ranks.
        gathered: what was gathered for operators without a rule.
        outputs: layout of every flat output of ``forward``; whole unless asked otherwise.
    """

    forward: fx.GraphModule
    partial: frozenset[str]
    gathered: tuple[Gathered, ...]
    outputs: tuple[Layout, ...]


def tensor_parallel(
    forward: fx.GraphModule,
    *,
    params: Mapping[str, Layout],
    boundaries: Mapping[str, Boundary],
    size: int,
    group: str,
    mode: Any,
    keep_outputs: bool = False,
) -> Parallelised:
    """Makes the forward of one tensor-parallel rank.

    Args:
        forward: exported forward with fake parameters; consumed.
        params: layout of every parameter that is cut, by name in ``forward``.
        boundaries: what the plan asks for at modules, by FQN in ``forward``.
        size: ranks of the tensor-parallel dim.
        group: alias of their group.
        mode: the fake mode of ``forward``'s values.
        keep_outputs: leave outputs cut that are cut on their last dim; else all are gathered.

    Raises:
        CaptureError: forward changes in place a value that cannot be changed part by part.
    """
    facts = _Layouts(forward, params, boundaries, size, group).decide()
    return _Writer(facts, mode, keep_outputs).write()


# ------------------------------------------------------------------ first walk: layouts


@dataclass
class _Layouts:
    """Layouts of all values, and decisions about all calls.

    Attributes:
        values: layout of every tensor, or of every tensor of a list.
        decisions: for calls that run on parts.
        needs_grad: values that a gradient reaches.
        terms: parameters, and views and casts of them, whose gradients are terms: every reader is a call on parts.
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
    _weights: set[fx.Node] = field(default_factory=set)
    _copies: set[fx.Node] = field(default_factory=set)

    def decide(self) -> _Layouts:
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
            found = _attribute(self.forward, str(node.target))
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
            return whole
        if decision.partial:
            leaves = self._fitted(self._leaves(node), value)
            if leaves is not None:
                decision = replace(decision, output=leaves)
        self.decisions[node] = decision
        return decision.output

    def _leaves(self, node: fx.Node) -> Layout | None:
        for name in reversed(_modules(node)):
            if name in self.boundaries:
                return self.boundaries[name].leaves
        return None

    def seen_at(self, source: fx.Node, user: fx.Node) -> Layout:
        """Layout in which ``user`` sees a value, after the module boundaries between them."""
        layout: Layout = self.values[source]
        if not self.boundaries or not isinstance(layout, Layout) or source in self._weights:
            return layout
        value = source.meta.get("val")
        if not _floating(value) or source.op == "get_attr":
            return layout
        inside, outside = _modules(source), _modules(user)
        for name in reversed(inside):
            asked = self.boundaries.get(name)
            if asked is not None and name not in outside:
                layout = self._fitted(asked.leaves, value) or layout
        for name in outside:
            asked = self.boundaries.get(name)
            if asked is None or name in inside:
                continue
            if asked.given is None or self._fitted(asked.given, value) == layout:
                layout = self._fitted(asked.enters, value) or layout
        return layout

    def _fitted(self, layout: Layout | None, value: Any) -> Layout | None:
        """A layout for a value, its dim counted from the front; None where the value cannot have it."""
        if layout is None or layout.dim is None:
            return layout
        rank = len(value.shape)
        if not -rank <= layout.dim < rank:
            return None
        dim = layout.dim % rank
        length = value.shape[dim]
        whole = isinstance(length, torch.SymInt) or length % (self.size * layout.blocks) == 0
        return layout.at(dim) if whole else None

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
                f"tensor-parallel plan cuts{_at(node)}; write the result to a new tensor, or leave this module out of tp_plan"
            )
        if any(r.alias_info is not None for r in schema.returns):
            self._copies.add(node)

    def on_parts(self, node: fx.Node) -> bool:
        """Whether a call computes something else on every rank."""
        return node in self.decisions

    def wanted(self, source: fx.Node, user: fx.Node) -> Layout:
        """Layout in which ``user`` reads a value."""
        decision = self.decisions.get(user)
        if decision is None:
            return REPLICATED
        return decision.inputs.get(source, REPLICATED)

    def varies(self, source: fx.Node, user: fx.Node) -> bool:
        """Whether the gradient that ``user`` gives a whole value is a term of a sum."""
        decision = self.decisions.get(user)
        if decision is None:
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


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def _at(node: fx.Node) -> str:
    line = source_line(node)
    return f" ({line})" if line else ""


# ------------------------------------------------------------------ second walk: the local graph


class _Writer:
    """Writes the local graph.

    Args:
        facts: result of the first walk.
        mode: fake mode of the values.
        keep_outputs: see :func:`tensor_parallel`.
    """

    def __init__(self, facts: _Layouts, mode: Any, keep_outputs: bool) -> None:
        self.facts = facts
        self.mode = mode
        self.keep_outputs = keep_outputs
        self.graph = compat.empty_graph_like(facts.forward.graph)
        self.local: dict[fx.Node, fx.Node] = {}
        self.converted: dict[tuple[fx.Node, Layout, bool], fx.Node] = {}

    def write(self) -> Parallelised:
        """Writes everything and puts it into the forward."""
        facts, forward = self.facts, self.facts.forward
        outputs: tuple[Layout, ...] = ()
        with self.mode, torch.no_grad():
            self._cut_parameters()
            for node in forward.graph.nodes:
                if node.op == "output":
                    outputs = self._output(node)
                elif node.op == "call_function":
                    self._call(node)
                else:
                    self.local[node] = self.graph.node_copy(node)
                    if node.op == "get_attr":
                        self.local[node].meta["val"] = _attribute(forward, str(node.target))
        forward.graph = self.graph
        partial = {str(n.target) for n in facts.terms if n.op == "get_attr"}
        notes = [
            Gathered(module_path(n), str(n.target), tuple(shape_of(s)), source_line(n))
            for n, sources in facts.gathered.items()
            for s in sources
        ]
        return Parallelised(forward, frozenset(partial), tuple(notes), outputs)

    def _cut_parameters(self) -> None:
        """Gives every parameter that is cut its local shape."""
        made: dict[int, nn.Parameter] = {}
        for name, layout in self.facts.params.items():
            path, _, last = name.rpartition(".")
            owner = self.facts.forward.get_submodule(path)
            whole = owner._parameters[last]
            assert whole is not None and layout.dim is not None
            if id(whole) not in made:
                shape = list(whole.shape)
                shape[layout.dim] //= self.facts.size
                local = torch.empty(shape, dtype=whole.dtype, device=whole.device)
                made[id(whole)] = nn.Parameter(local, requires_grad=whole.requires_grad)
            owner._parameters[last] = made[id(whole)]

    # -------------------------------------------------------------- calls

    def _call(self, node: fx.Node) -> None:
        facts = self.facts
        add = self._adder(node)
        if node.target is aten.sym_size.int:
            self.local[node] = self._size(node, add)
            return
        if node.target is aten._assert_tensor_metadata.default:
            return  # a check of what export saw; nobody reads it

        def read(source: fx.Node) -> fx.Node:
            if source not in facts.values or node.target is operator.getitem:
                return self.local[source]
            return self._read(source, node)

        if node.meta.get("val") is None:  # a check without a result
            self.local[node] = self.graph.node_copy(node, self.local.__getitem__)
            return
        args: Any = fx.node.map_arg(node.args, read)
        kwargs: Any = fx.node.map_arg(node.kwargs, read)
        decision = facts.decisions.get(node)
        if decision is None or decision.emit is None:
            made = add(node.target, *args, **kwargs)
        else:
            made = decision.emit(add, args, kwargs)
        if decision is not None and decision.partial:
            made = self._summed(node, decision, made, add)
        self.local[node] = made

    def _summed(
        self, node: fx.Node, decision: Decision, term: fx.Node, add: Callable[..., fx.Node]
    ) -> fx.Node:
        facts = self.facts
        output = decision.output
        assert isinstance(output, Layout)
        if output.dim is None:
            made = add(functional.total, term, facts.group)
        else:
            where = (output.dim, output.blocks, facts.size, facts.group)
            made = add(functional.scatter_total, term, *where)
        for source in decision.after:
            made = add(aten.add.Tensor, made, self._read(source, node))
        return made

    def _adder(self, node: fx.Node) -> Callable[..., fx.Node]:
        """A function that emits calls which belong to ``node``."""

        def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            made = self.graph.call_function(target, args, kwargs)
            made.meta = {k: v for k, v in node.meta.items() if k != "val"}
            values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            try:
                made.meta["val"] = target(*values[0], **values[1])
            except Exception as error:
                raise CaptureError(
                    f"{module_path(node) or 'the root module'}: {node.target} does not run on the parts that tensor "
                    f"parallelism gives it{_at(node)}: {error}"
                ) from error
            return made

        return add

    def _size(self, node: fx.Node, add: Callable[..., fx.Node]) -> fx.Node:
        """A size on one device: that of a part, times the number of parts."""
        source, dim = node.args
        assert isinstance(source, fx.Node) and isinstance(dim, int)
        local = add(node.target, self.local[source], dim)
        layout = self.facts.values[source]
        if layout.dim is None or dim % len(shape_of(source)) != layout.dim:
            return local
        return add(operator.mul, local, self.facts.size)

    # -------------------------------------------------------------- conversions

    def _read(self, source: fx.Node, user: fx.Node) -> fx.Node:
        facts = self.facts
        layout = facts.values[source]
        if not isinstance(layout, Layout):
            return self.local[source]
        varies = facts.varies(source, user) and source in facts.needs_grad and source not in facts.terms
        return self.convert(source, facts.wanted(source, user), varies, user)

    def convert(
        self, source: fx.Node, wanted: Layout, varies: bool, user: fx.Node
    ) -> fx.Node:
        """A value in another layout; made once.

        Args:
            source: value on one device.
            wanted: layout.
            varies: its reader's gradient is a term (of a whole value that a gradient reaches).
            user: the first reader.
        """
        layout = self.facts.values[source]
        varies = varies and wanted.replicated
        if layout == wanted and not varies:
            return self.local[source]
        key = (source, wanted, varies)
        if key not in self.converted:
            self.converted[key] = self._converted(source, wanted, varies, user)
        return self.converted[key]

    def _converted(
        self, source: fx.Node, wanted: Layout, varies: bool, user: fx.Node
    ) -> fx.Node:
        layout, local = self.facts.values[source], self.local[source]
        add, group = self._adder(user), self.facts.group
        where = (layout.dim, layout.blocks, self.facts.size, group)
        if wanted.replicated:
            if layout.replicated:
                return add(functional.vary, local, group)
            if not varies:
                return add(functional.gather, local, *where)
            whole = self.converted.get((source, REPLICATED, False))
            if whole is not None:
                return add(functional.vary, whole, group)
            return add(functional.gather_vary, local, *where)
        whole = local if layout.replicated else self.convert(source, REPLICATED, False, user)
        return add(functional.part, whole, wanted.dim, wanted.blocks, self.facts.size, group)

    def _output(self, node: fx.Node) -> tuple[Layout, ...]:
        layouts: list[Layout] = []

        def read(source: fx.Node) -> fx.Node:
            layout = self.facts.values.get(source)
            layouts.append(REPLICATED)
            if not isinstance(layout, Layout):
                return self.local[source]
            last = source.meta["val"].dim() - 1
            if self.keep_outputs and layout.dim == last and layout.blocks == 1:
                layouts[-1] = layout
            return self.convert(source, layouts[-1], False, node)

        self.graph.output(fx.node.map_arg(node.args[0], read)).meta = dict(node.meta)
        return tuple(layouts)


__all__ = ["Boundary", "Gathered", "Parallelised", "tensor_parallel"]
