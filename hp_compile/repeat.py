"""Reuse: trace one of many equal units and write the graph of the others from it.

A model of 80 equal blocks is 80 times the same trace. The exported forward says what every block does, so it also says
which blocks are equal; the joint trace then needs to see only a few of them:

    exported    a  b  c  d  e  f  g  h       b..g equal: same operators, constants, sizes and wiring
    traced      a  b  c           g  h       d, e, f are dropped; g reads what c returns
    expanded    a  b  c  c' c''c''' g  h     forward, and the same backwards in the backward

``c`` is the pattern and is copied only after it is *proved* that the trace repeats itself: node by node, ``b``, ``c`` and
``g`` have the same operators, constants, values and module paths, and every operand is the same node outside, or the node
at the same place of the same, the previous or the next unit. That is the induction step: what enters a block decides what
its trace looks like, and what ``c`` enters ``g`` with is what ``b`` entered ``c`` with.

Whatever is unusual is traced in full, and the log says why at debug level: see :class:`hp_compile.equal.Unequal`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from hp_compile.equal import (
    Run,
    Unequal,
    find_runs,
    paths,
    reduced,
    region_of,
    text_of,
    value_text,
)
from hyper_parallel.torch_compat import graph as compat
from passes.base import is_backward

log = logging.getLogger("hp_compile")


def joint_trace(
    forward: fx.GraphModule,
    values: Sequence[Any],
    mode: Any,
    decompositions: Mapping[Any, Callable[..., Any]],
    units: Sequence[str],
    *,
    reuse: bool = True,
) -> fx.GraphModule:
    """The joint graph of an exported forward (forward only when grad mode is off).

    Args:
        forward: exported forward with fake parameters; its graph may be consumed, its modules are not changed.
        values: fake positional inputs.
        mode: the fake mode that owns them.
        decompositions: operator decompositions.
        units: FQNs in ``forward`` of modules that may repeat.
        reuse: ``False`` traces every unit.

    Returns:
        The same graph whether units were reused or not, but for the names of nodes that are no inputs, and that copies
        share their fake values with the pattern: what is a view of what is for operators to say, not for storages.
    """
    runs = find_runs(forward, units) if reuse else []
    if runs:
        names = [n for n, _ in forward.named_parameters(remove_duplicate=False)]
        names += [n for n, _ in forward.named_buffers(remove_duplicate=False)]
        try:
            with reduced(forward, runs):
                gm, _ = compat.joint_trace(forward, values, mode, decompositions)
                graph = gm.graph
                for run in runs:
                    graph = _Expansion(graph, run, names).graph()
        except Exception as error:  # the full trace says what is wrong, if anything is
            log.debug("tracing every unit: %s: %s", type(error).__name__, error)
        else:
            gm.graph = graph
            for run in runs:
                log.debug("reused %s for %d equal units", run.units[1], len(run.dropped))
            return gm
    return compat.joint_trace(forward, values, mode, decompositions)[0]


# ------------------------------------------------------------------ proof and copies in the joint graph


class _Place(NamedTuple):
    """Where a node of a traced unit stands.

    Attributes:
        part: ``input``, ``forward`` or ``backward``.
        unit: 0, 1 or 2: the first, second or last unit of the run.
        position: within the unit; the name of an input.
    """

    part: str
    unit: int
    position: int | str


class _Expansion:
    """Copies the second unit of a run for each one that was dropped.

    Args:
        traced: joint graph of the reduced forward.
        run: equal units.
        names: parameters and buffers of the whole forward, in order.
    """

    def __init__(self, traced: fx.Graph, run: Run, names: Sequence[str]) -> None:
        self.nodes = list(traced.nodes)
        self.run = run
        self.names = names
        self.kept = [run.segments[0], run.segments[1], run.segments[-1]]
        self.numbers = [0, 1, len(run.segments) - 1]  # of the traced units in the run
        self.places: dict[fx.Node, _Place] = {}
        self.parts: dict[str, list[list[fx.Node]]] = {}
        self.inputs = [n for n in self.nodes if n.op == "placeholder" and not _is_tangent(n)]
        self.tangents = [n for n in self.nodes if n.op == "placeholder" and _is_tangent(n)]
        for node in self.inputs:
            self._place_input(node)
        self._cut("forward", [*(s.unit for s in self.kept), run.after.unit])
        if any(is_backward(n) and n.op != "placeholder" for n in self.nodes):
            self._cut("backward", [*(s.unit for s in reversed(self.kept)), run.before.unit])
        self.stride = self._prove()
        first = self.parts["forward"][2][0]
        self.moved_from = int(first.meta["seq_nr"])
        self.moved_by = self.stride * len(run.dropped)
        self.new = fx.Graph()
        self.copies: dict[_Place, fx.Node] = {}  # place with the unit's number in the run
        self.outside: dict[fx.Node, fx.Node] = {}
        self.stacks: dict[tuple[int, int], Any] = {}

    def _place_input(self, node: fx.Node) -> None:
        name = _input_name(node)
        for index, segment in enumerate(self.kept):
            if name.startswith(segment.unit + "."):
                self.places[node] = _Place("input", index, name[len(segment.unit) :])

    def _cut(self, part: str, units: list[str]) -> None:
        """Finds the nodes of the traced units: from the first node in each to the first node in the next."""
        kind = "nn_module_stack" if part == "forward" else "fwd_nn_module_stack"
        starts: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            if node.op != "placeholder" and is_backward(node) == (part == "backward"):
                for path in paths(node, kind):
                    starts.setdefault(path, index)
        ends = [starts.get(unit) for unit in units]
        if part == "backward" and ends[-1] is None:
            ends[-1] = len(self.nodes) - 1
        cuts = [cut for cut in ends if cut is not None]
        if len(cuts) != len(ends) or cuts != sorted(set(cuts)):
            raise Unequal(f"the {part} of the units is not in a row")
        found = [self.nodes[a:b] for a, b in itertools.pairwise(cuts)]
        if part == "backward":
            found.reverse()
        self.parts[part] = found
        for unit, nodes in enumerate(found):
            for position, node in enumerate(nodes):
                self.places[node] = _Place(part, unit, position)

    # -- proof

    def _prove(self) -> int:
        """Proves that the three traced units are equal; returns the sequence numbers that one takes."""
        first, second, last = (int(s[0].meta["seq_nr"]) for s in self.parts["forward"])
        stride = second - first
        if last - second != stride or stride < 0:  # without gradients, all are the same
            raise Unequal("sequence numbers are not evenly spaced")
        for part, units in self.parts.items():
            if len({len(nodes) for nodes in units}) != 1:
                raise Unequal(f"the {part} of the units differs in length")
            for nodes in zip(*units, strict=True):
                self._prove_nodes(nodes, stride)
        for node in self.nodes[:-1]:
            if node not in self.places:
                for operand in node.all_input_nodes:
                    self._reachable(operand)
        return stride

    def _prove_nodes(self, nodes: Sequence[fx.Node], stride: int) -> None:
        texts, operands = [], []
        for unit, node in enumerate(nodes):
            found: list[Any] = []
            texts.append(self._node_text(node, unit, found))
            operands.append([self._relative(operand, unit) for operand in found])
        if texts[0] != texts[1] or texts[1] != texts[2]:
            raise Unequal(f"{nodes[1]} differs from {nodes[0]} or {nodes[2]}")
        for slot in zip(*operands, strict=True):
            _prove_slot(nodes[1], slot)
        numbers = [int(node.meta.get("seq_nr", -1)) for node in nodes]
        steps = {numbers[1] - numbers[0], numbers[2] - numbers[1]}
        if steps not in ({0}, {stride}):
            raise Unequal(f"{nodes[1]}: uneven sequence numbers")

    def _node_text(self, node: fx.Node, unit: int, operands: list[Any]) -> tuple[Any, ...]:
        """Everything about a node but its operands, which are collected, and its unit."""

        def operand(argument: fx.Node) -> str:
            operands.append(argument)
            return "%"

        segment = self.kept[unit]
        number = self.numbers[unit]
        before = self.run.segments[number - 1] if number else self.run.before
        return (
            node.op,
            node.target,
            text_of(node.args, operand),
            text_of(node.kwargs, operand),
            value_text(node.meta.get("val")),
            node.meta.get("partitioner_tag"),
            region_of(node, segment, before),
            *(
                [
                    (_moved(key, segment.unit, "*"), _moved(path, segment.unit, "*"), str(kind))
                    for key, (path, kind) in (node.meta.get(stack) or {}).items()
                ]
                for stack in ("nn_module_stack", "fwd_nn_module_stack")
            ),
        )

    def _relative(self, node: fx.Node, unit: int) -> fx.Node | _Place:
        """A node outside, or a place with the distance of its unit from ``unit``."""
        place = self.places.get(node)
        return node if place is None else place._replace(unit=place.unit - unit)

    def _reachable(self, node: fx.Node) -> None:
        """Nodes outside may read the first and the last unit only."""
        place = self.places.get(node)
        if place is not None and place.unit == 1:
            raise Unequal(f"{node} is used outside of the units")

    # -- the whole graph

    def graph(self) -> fx.Graph:
        """The joint graph with every unit."""
        inputs = self._copy_inputs()
        for node in self.nodes[:-1]:
            if node.op == "placeholder":
                continue
            if "backward" in self.parts and node is self.parts["backward"][1][0]:
                for number in reversed(range(2, self.numbers[2])):
                    self._copy_unit("backward", number)
            place = self.places.get(node)
            if place is None:
                copy = self.new.node_copy(node, self._seen_from_outside)
                self.outside[node] = copy
                self._move_sequence(copy)
            else:
                self._copy(node, place, self.numbers[place.unit])
            if node is self.parts["forward"][1][-1]:
                for number in range(2, self.numbers[2]):
                    self._copy_unit("forward", number)
        self._copy_output(inputs)
        self.new.lint()
        return self.new

    def _copy_inputs(self) -> list[tuple[fx.Node, int]]:
        """All inputs, in the order of the whole forward; returns the traced input of each, and its unit's number or -1."""
        known = {_input_name(node): node for node in self.inputs}
        order: list[tuple[fx.Node, int]] = []
        for name in self.names:
            owner = self.run.owner(name)
            if name in known:
                place = self.places.get(known[name])
                order.append((known[name], self.numbers[place.unit] if place else -1))
            elif owner is not None and 2 <= owner < self.numbers[2]:
                pattern = self.kept[1].unit + name[len(self.run.units[owner]) :]
                order.append((known[pattern], owner))
        order += [(node, -1) for node in self.inputs if not _input_name(node)]
        copied = dict.fromkeys(node for node, _ in order)
        if [n for n in copied if self.places.get(n) is None] != [
            n for n in self.inputs if self.places.get(n) is None
        ] or len(copied) != len(self.inputs):
            raise Unequal("inputs are in another order than parameters and buffers")
        numbered = "primals_{1}" if self.inputs[0].name == "primals_1" else "arg{0}_1"
        if [n.name for n in self.inputs] != [
            numbered.format(i, i + 1) for i in range(len(self.inputs))
        ]:
            raise Unequal("inputs have unknown names")
        for index, (node, number) in enumerate(order):
            place = self.places.get(node)
            name = numbered.format(index, index + 1)
            copy = self.new.create_node("placeholder", name, name=name)
            copy.meta = dict(node.meta)
            if place is None:
                self.outside[node] = copy
                continue
            self.copies[place._replace(unit=number)] = copy
            if number != self.numbers[place.unit]:
                copy.meta["desc"] = self._moved_input(node, number)
        for node in self.tangents:
            self.outside[node] = self.new.node_copy(node)
        return order

    def _moved_input(self, node: fx.Node, number: int) -> Any:
        """Descriptor of the same input of another unit."""
        desc = node.meta["desc"]
        target = _moved(desc.target, self.kept[1].unit, self.run.units[number])
        return dataclasses.replace(desc, target=target)

    def _copy_unit(self, part: str, number: int) -> None:
        """Copies the pattern for unit ``number`` of the run."""
        for position, node in enumerate(self.parts[part][1]):
            copy = self._copy(node, _Place(part, 1, position), number)
            copy.meta.pop("from_node", None)  # of the pattern
            for kind in ("nn_module_stack", "fwd_nn_module_stack"):
                if copy.meta.get(kind):
                    copy.meta[kind] = self._moved_stack(copy.meta[kind], number)
            region = region_of(node, *reversed(self.kept[:2]))
            if region is not None:
                compat.set_checkpoint_region(copy, self.run.region(number, *region))

    def _copy(self, node: fx.Node, place: _Place, number: int) -> fx.Node:
        """Copies a node of a traced unit to unit ``number`` of the run."""
        copy = self.new.node_copy(node, self._seen_from(place.unit, number))
        self.copies[place._replace(unit=number)] = copy
        first, second, _ = (nodes[int(place.position)] for nodes in self.parts[place.part])
        if first.meta["seq_nr"] != second.meta["seq_nr"]:
            copy.meta["seq_nr"] += self.stride * (number - place.unit)
        else:
            self._move_sequence(copy)
        return copy

    def _moved_stack(self, stack: Mapping[str, Any], number: int) -> dict[str, Any]:
        key = (id(stack), number)
        if key not in self.stacks:
            old, new = self.kept[1].unit, self.run.units[number]
            self.stacks[key] = {
                _moved(name, old, new): (_moved(path, old, new), kind)
                for name, (path, kind) in stack.items()
            }
        return self.stacks[key]

    def _move_sequence(self, node: fx.Node) -> None:
        """Makes room in the sequence numbers for the units that are copied in."""
        if node.meta.get("seq_nr", -1) >= self.moved_from:
            node.meta["seq_nr"] += self.moved_by

    def _seen_from(self, unit: int, number: int) -> Callable[[fx.Node], fx.Node]:
        """Operands of traced unit ``unit``, for unit ``number`` of the run."""

        def operand(node: fx.Node) -> fx.Node:
            place = self.places.get(node)
            if place is None:
                return self.outside[node]
            return self.copies[place._replace(unit=number + place.unit - unit)]

        return operand

    def _seen_from_outside(self, node: fx.Node) -> fx.Node:
        place = self.places.get(node)
        if place is None:
            return self.outside[node]
        return self.copies[place._replace(unit=self.numbers[place.unit])]

    def _copy_output(self, inputs: Sequence[tuple[fx.Node, int]]) -> None:
        """Outputs of forward, then one gradient for every input."""
        output = self.nodes[-1]
        flat: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        descs = list(output.meta["desc"])
        split = len(flat) - (len(self.inputs) if "backward" in self.parts else 0)
        grads = dict(zip(self.inputs, zip(flat[split:], descs[split:], strict=True), strict=False))
        for node, (grad, desc) in grads.items():
            if desc is not None and desc.grad_of != node.meta["desc"]:
                raise Unequal("gradients are in another order than inputs")
            if grad is not None and node not in self.places:
                self._reachable(grad)
        self._prove_gradients({node: grad for node, (grad, _) in grads.items()})
        values, kinds = [], descs[:split]
        for value in flat[:split]:
            if value is not None:
                self._reachable(value)
            values.append(None if value is None else self._seen_from_outside(value))
        for node, number in inputs if grads else ():
            grad, desc = grads[node]
            place = self.places.get(node)
            if grad is None:
                values.append(None)
            elif place is None:
                values.append(self._seen_from_outside(grad))
            else:
                values.append(self._seen_from(place.unit, number)(grad))
            if desc is not None and place is not None and number != self.numbers[place.unit]:
                desc = dataclasses.replace(desc, grad_of=self._moved_input(node, number))
            kinds.append(desc)
        new = self.new.output(type(output.args[0])(values))  # type: ignore[call-arg, arg-type]
        new.meta = {**output.meta, "desc": kinds}
        self._move_sequence(new)

    def _prove_gradients(self, grads: Mapping[fx.Node, fx.Node | None]) -> None:
        found: dict[int | str, list[Any]] = {}
        for node, grad in grads.items():
            place = self.places.get(node)
            if place is not None:
                seen = None if grad is None else self._relative(grad, place.unit)
                found.setdefault(place.position, [None] * 3)[place.unit] = seen
        for slot in found.values():
            _prove_slot(self.nodes[-1], slot)


def _prove_slot(node: fx.Node, slot: Sequence[Any]) -> None:
    """One operand of three equal units, as seen from each.

    The units before the first and behind the last are not part of the run: an operand in the previous unit is compared
    between the second and the last, and one in the next unit between the first and the second.
    """
    first, second, last = slot
    distance = second.unit if isinstance(second, _Place) else 0
    enters = distance == -1 and isinstance(first, fx.Node)
    leaves = distance == 1 and isinstance(last, fx.Node)
    if abs(distance) > 1 or not (first == second or enters) or not (last == second or leaves):
        raise Unequal(f"{node} is wired otherwise than in the neighbouring units")


def _input_name(node: fx.Node) -> str:
    """FQN of a parameter or buffer, empty for an input of the user."""
    return getattr(node.meta["desc"], "target", "")


def _is_tangent(node: fx.Node) -> bool:
    return type(node.meta["desc"]).__name__ == "TangentAOTInput"


def _moved(text: str, old: str, new: str) -> str:
    """A module path or key with another unit in it."""
    if old not in text:
        return text
    return re.sub(re.escape(old) + r"(?![^.@])", lambda _: new, text)


__all__ = ["joint_trace"]
