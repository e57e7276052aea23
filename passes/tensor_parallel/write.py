"""The second walk of the tensor-parallel pass: the graph of one rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hyper_parallel.errors import CaptureError
from hyper_parallel.torch_compat import graph as compat
from passes.base import aten, module_path, source_line
from passes.tensor_parallel import functional
from passes.tensor_parallel.follow import Layouts, at_line, attribute
from passes.tensor_parallel.layout import REPLICATED, Layout
from passes.tensor_parallel.rule import Decision, shape_of


@dataclass(frozen=True)
class Gathered:
    """A value that had to be made whole for an operator that cannot run on its parts.

    Attributes:
        module: FQN of the module whose forward calls the operator.
        operator: the operator.
        shape: shape of the whole value.
        where: source line, empty when unknown.
        reason: why.
    """

    module: str
    operator: str
    shape: tuple[Any, ...]
    where: str
    reason: str

    def __str__(self) -> str:
        line = f", {self.where}" if self.where else ""
        shape = ", ".join(map(str, self.shape))
        return f"{self.module or '(root)'}: {self.operator} on [{shape}]{line}: {self.reason}"


@dataclass(frozen=True)
class Claims:
    """What the pass says it has done, for the proof (``passes.verify.parallel``), which believes none of it.

    Attributes:
        single: the graph of one device.
        params: layout of every parameter that is cut.
        size: ranks of the tensor-parallel dim.
        group: alias of their group.
        values: local node of every value of one device.
        reads: local node that an operator reads for a value, by operator and value of one device.
        tensors: values of one device that are tensors, or lists of them.
    """

    single: fx.Graph
    params: Mapping[str, Layout]
    size: int
    group: str
    values: Mapping[fx.Node, fx.Node]
    reads: Mapping[tuple[fx.Node, fx.Node], fx.Node]
    tensors: frozenset[fx.Node]


@dataclass(frozen=True)
class Parallelised:
    """The result of the pass.

    Attributes:
        forward: the local forward.
        partial: names of whole parameters whose gradients are terms of a sum over the ranks.
        gathered: what was gathered for operators that cannot run on parts.
        uncut: modules at which a value was to be cut and is not, with the dim and its length.
        outputs: layout of every flat output of ``forward``; whole unless asked otherwise.
        claims: which local value is which.
        constants: values of constants that became buffers of ``forward``.
    """

    forward: fx.GraphModule
    partial: frozenset[str]
    gathered: tuple[Gathered, ...]
    uncut: Mapping[str, tuple[int, int]]
    outputs: tuple[Layout, ...]
    claims: Claims
    constants: Mapping[str, torch.Tensor]


class Writer:
    """Writes the local graph.

    Args:
        facts: result of the first walk.
        mode: fake mode of the values.
        keep_outputs: see :func:`tensor_parallel`.
    """

    def __init__(self, facts: Layouts, mode: Any, keep_outputs: bool) -> None:
        self.facts = facts
        self.mode = mode
        self.keep_outputs = keep_outputs
        self.graph = compat.empty_graph_like(facts.forward.graph)
        self.local: dict[fx.Node, fx.Node] = {}
        self.converted: dict[tuple[fx.Node, Layout, bool], fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.reads: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

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
                        held = attribute(forward, str(node.target))
                        # A constant of forward is real: nothing may compute with it now.
                        known = compat.is_fake(held) or not isinstance(held, torch.Tensor)
                        self.local[node].meta["val"] = (
                            held if known else self.mode.from_tensor(held)
                        )
            self._hide_constant_ids()
        claims = Claims(
            single=forward.graph,
            params=facts.params,
            size=facts.size,
            group=facts.group,
            values=self.local,
            reads=self.reads,
            tensors=frozenset(facts.values),
        )
        forward.graph = self.graph
        partial = {str(n.target) for n in facts.terms if n.op == "get_attr"}
        notes = [
            Gathered(
                module_path(n), str(n.target), tuple(shape_of(s)), source_line(n), facts.reasons[n]
            )
            for n, sources in facts.gathered.items()
            for s in sources
        ]
        return Parallelised(
            forward,
            frozenset(partial),
            tuple(notes),
            dict(facts.uncut),
            outputs,
            claims,
            self.constants,
        )

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

    def _hide_constant_ids(self) -> None:
        """Hides the numbers of constants that say which row of a cut vocabulary is read.

        A trace computes with constants that it knows, but which rows are this rank's is known when a program runs.
        """
        ids = [n.args[1] for n in self.graph.nodes if n.target in functional.BY_IDS]
        seen: set[fx.Node] = set()
        while ids:
            node: Any = ids.pop()
            if node in seen:
                continue
            seen.add(node)
            ids.extend(node.all_input_nodes)
            if node.op == "get_attr":
                path, _, last = str(node.target).rpartition(".")
                owner = self.facts.forward.get_submodule(path)
                held = getattr(owner, last)
                if not isinstance(held, nn.Parameter) and not compat.is_fake(held):
                    self.constants[str(node.target)] = held
                    if last not in owner._buffers:
                        delattr(owner, last)
                    owner.register_buffer(last, torch.empty_like(node.meta["val"]))

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
        if decision is None and not compat.is_backed(node.meta["val"]):
            # Its sizes depend on values: computed again, they would be other symbols.
            made = self.graph.node_copy(node, lambda source: read(source))
        elif decision is None or decision.emit is None:
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
                    f"parallelism gives it{at_line(node)}: {error}"
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
        varies = (
            facts.varies(source, user) and source in facts.needs_grad and source not in facts.terms
        )
        read = self.convert(source, facts.wanted(source, user), varies, user)
        self.reads[user, source] = read
        return read

    def convert(self, source: fx.Node, wanted: Layout, varies: bool, user: fx.Node) -> fx.Node:
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

    def _converted(self, source: fx.Node, wanted: Layout, varies: bool, user: fx.Node) -> fx.Node:
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
