"""The proof of the tensor-parallel forward, before it is differentiated: every local value is a part of the right value.

The pass leaves two graphs: the forward of one device and that of one rank, and says which value is which. Nothing of this
is believed. The local graph is walked once more, and every value gets a :class:`Held`: the layout it has because of what
was really done to it. An operator that reads parts must be the one that its layout rule makes of exactly these parts; a
sum over the ranks must be where the rule makes terms, once, and before a bias; whole values must be whole.

The same walk proves the borders that backward needs. The gradient that arrives at a whole value is either the same on all
ranks, or a *term* of a sum. An operator on parts gives terms, an operator that all ranks do alike gives what it gets; so a
whole value goes to an operator on parts through ``vary`` (or is a parameter whose terms the plan sums), and to no other.

What is believed: the rules themselves, which say what an operator on parts computes. They are compared with one device
operator by operator (``tests/passes/test_tensor_parallel.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from passes.base import aten, module_path
from passes.tensor_parallel import functional
from passes.tensor_parallel.follow import attribute
from passes.tensor_parallel.layout import REPLICATED, Layout
from passes.tensor_parallel.rule import Call, Decision, decide
from passes.tensor_parallel.write import Parallelised
from passes.verify.report import error

_SUMS = frozenset({functional.total, functional.scatter_total})


@dataclass(frozen=True)
class Held:
    """What a local value is.

    Attributes:
        of: value of one device.
        layout: how the local value lies in it; one a tensor of a list.
        terms: the gradient that arrives here is a term of a sum over the ranks.
    """

    of: fx.Node
    layout: Layout | tuple[Layout, ...] = REPLICATED
    terms: bool = False

    @property
    def whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self.layout == REPLICATED

    def __str__(self) -> str:
        layouts = self.layout if isinstance(self.layout, tuple) else (self.layout,)
        text = ", ".join("whole" if x.replicated else f"cut {x}" for x in layouts)
        return f"{self.of.name}, {text}" + (
            ", with terms of its gradient" if self.terms and self.whole else ""
        )


def verify_parallel(made: Parallelised) -> None:
    """Proves the forward of one tensor-parallel rank against that of one device.

    Args:
        made: result of the tensor-parallel pass.

    Raises:
        VerificationError: a local value is not the part that it should be, a sum over the ranks is missing or done twice,
            or a gradient would be summed too often or not at all; the text names operator, module and source line.

    Example:
        >>> verify_parallel(tensor_parallel(forward, ...))  # doctest: +SKIP
    """
    _Proof(made).run()


class _Proof:
    def __init__(self, made: Parallelised) -> None:
        self.made = made
        self.claims = made.claims
        self.held: dict[fx.Node, Held] = {}
        self.claimed = {local: single for single, local in self.claims.values.items()}
        self.weights: set[fx.Node] = set()
        self.trains: set[fx.Node] = set()
        self.convert: dict[Any, Callable[[fx.Node, Held], Held]] = {
            functional.vary: self._vary,
            functional.gather: self._gather,
            functional.gather_vary: self._gather,
            functional.part: self._part,
        }

    def run(self) -> None:
        """Walks both graphs."""
        for node in self.claims.single.nodes:
            self._look_at(node)
        for node in self.made.forward.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.target in self.convert:
                source: Any = node.args[0]
                self.held[node] = self.convert[node.target](node, self._held(source, node))
            elif node in self.claimed:
                self._value(node, self.claimed[node])

    def _look_at(self, node: fx.Node) -> None:
        """Which values of one device are weights, and which a gradient reaches."""
        value = node.meta.get("val")
        if node.op == "get_attr":
            found = attribute(self.made.forward, str(node.target))
            if isinstance(found, nn.Parameter):
                self.weights.add(node)
            if isinstance(found, torch.Tensor) and found.requires_grad:
                self.trains.add(node)
        elif node.op == "placeholder":
            if isinstance(value, torch.Tensor) and (
                value.requires_grad or value.is_floating_point()
            ):
                self.trains.add(node)
        elif _differentiable(value):
            sources = _tensors(node)
            if any(s in self.trains for s in sources):
                self.trains.add(node)
            if len(sources) == 1 and sources[0] in self.weights:
                self.weights.add(node)

    def _held(self, local: fx.Node, reader: fx.Node) -> Held:
        if local not in self.held:
            raise error(
                f"{module_path(reader) or 'the root module'}: {reader.name} does not read the value that stands for its input",
                node=reader,
                expected=f"{local.name}, which is not in the graph or stands for nothing",
                cause="a sum, or what is added to it, was dropped, doubled or moved",
            )
        return self.held[local]

    # -------------------------------------------------------------- conversions

    def _vary(self, node: fx.Node, source: Held) -> Held:
        self._check_whole(node, source)
        self._check_where(node, node.args[1:], (self.claims.group,))
        return Held(source.of, terms=True)

    def _gather(self, node: fx.Node, source: Held) -> Held:
        layout = source.layout
        if not isinstance(layout, Layout) or layout.replicated:
            raise self._wrong(node, source, "a part: it gathers")
        where = (layout.dim, layout.blocks, self.claims.size, self.claims.group)
        self._check_where(node, node.args[1:], where)
        return Held(source.of, terms=node.target is functional.gather_vary)

    def _part(self, node: fx.Node, source: Held) -> Held:
        self._check_whole(node, source)
        dim, blocks, *where = node.args[1:]
        self._check_where(node, where, (self.claims.size, self.claims.group))
        return Held(source.of, Layout(dim, blocks))  # type: ignore[arg-type]

    def _check_whole(self, node: fx.Node, source: Held) -> None:
        if not source.whole or (source.terms and source.of in self.trains):
            raise self._wrong(node, source, "a whole value whose gradient is the same on all ranks")

    def _check_where(self, node: fx.Node, found: Any, expected: Any) -> None:
        if tuple(found) != tuple(expected):
            raise error(
                f"{node.name}: runs over another dim or group than its value is cut over",
                node=node,
                found=str(tuple(found)),
                expected=str(tuple(expected)),
            )

    def _wrong(self, node: fx.Node, source: Held, expected: str) -> Exception:
        return error(
            f"{node.name}: gets {source}",
            node=node,
            expected=expected,
            cause="a conversion between layouts is missing, or is done twice",
        )

    # -------------------------------------------------------------- values

    def _value(self, local: fx.Node, single: fx.Node) -> None:
        if local.op != "call_function":
            if (local.op, local.target) != (single.op, single.target):
                raise error(f"{local.name}: stands for {single.name}", node=local)
            layout = self.claims.params.get(str(single.target), REPLICATED)
            terms = local.op == "get_attr" and str(local.target) in self.made.partial
            self.held[local] = Held(single, layout, terms)
        elif single.target is operator.getitem:
            self._item(local, single)
        else:
            self._call(local, single)
        self._check_shape(local, single)

    def _item(self, local: fx.Node, single: fx.Node) -> None:
        source, index = single.args
        held = self._held(local.args[0], local)  # type: ignore[arg-type]
        if held.of is not source or local.args[1] != index or not isinstance(held.layout, tuple):
            raise error(f"{local.name}: is no item {index} of {source}", node=local)
        self.held[local] = Held(single, held.layout[index], held.terms)  # type: ignore[index]

    def _call(self, local: fx.Node, single: fx.Node) -> None:
        scratch = fx.Graph()
        leaves: dict[fx.Node, fx.Node] = {}
        seen: dict[fx.Node, Held] = {}

        def leaf(source: fx.Node) -> fx.Node:
            """What stands for the local value that is read for ``source``."""
            read = self.claims.reads.get((single, source), self.claims.values.get(source))
            if read is None:
                raise error(f"{local.name}: nothing is read for {source.name}", node=local)
            if source in self.claims.tensors:
                held = self._held(read, local)
                if held.of is not source:
                    raise self._wrong(local, held, f"{source.name}")
                seen[source] = held
            made = scratch.placeholder(read.name)
            leaves[made] = read
            return made

        def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return scratch.call_function(target, args, kwargs)

        args: Any = fx.node.map_arg(single.args, leaf)
        kwargs: Any = fx.node.map_arg(single.kwargs, leaf)
        if single.target is aten.sym_size.int:
            expected = self._size(single, seen, args, add)
            layout: Any = REPLICATED
            terms = False
        else:
            decision, layout = self._decision(local, single, seen)
            terms = self._gradients(local, single, seen, decision)
            emit = decision.emit if decision is not None else None
            expected = emit(add, args, kwargs) if emit else add(single.target, *args, **kwargs)
            if decision is not None and decision.partial:
                expected = self._summed(decision, layout, expected, leaf, add)
        self._compare(expected, local, leaves, local)
        self.held[local] = Held(single, layout, terms)

    def _size(self, single: fx.Node, seen: Any, args: Any, add: Callable[..., fx.Node]) -> fx.Node:
        """A size of one device, from that of a part."""
        (held,) = seen.values()
        dim = single.args[1] % len(held.of.meta["val"].shape)  # type: ignore[operator]
        found = add(single.target, args[0], single.args[1])
        return add(operator.mul, found, self.claims.size) if held.layout.dim == dim else found

    def _decision(
        self, local: fx.Node, single: fx.Node, seen: dict[fx.Node, Held]
    ) -> tuple[Decision | None, Any]:
        """What the operator's rule says about these layouts, and the layout of the output."""
        value = single.meta.get("val")
        whole = (REPLICATED,) * len(value) if isinstance(value, list | tuple) else REPLICATED
        layouts: Any = {source: held.layout for source, held in seen.items()}
        if all(held.whole for held in seen.values()):
            return None, whole
        call = Call(single, layouts, self.claims.size, self.claims.group, self.weights.__contains__)
        decision = decide(call)
        wanted = decision.inputs if decision is not None else {}
        for source, held in seen.items():
            if held.layout != wanted.get(source, REPLICATED):
                raise error(
                    f"{local.name}: {single.target} cannot run on these parts",
                    node=local,
                    found=str(held),
                    expected=f"{source.name}, {wanted.get(source, REPLICATED)}",
                    cause="a value was not gathered for an operator that mixes its parts",
                )
        assert decision is not None
        if not decision.partial:
            return decision, decision.output
        root = local
        for _ in decision.after:
            root = root.args[0]  # type: ignore[assignment]
        scattered = getattr(root, "target", None) is functional.scatter_total
        return decision, Layout(*root.args[1:3]) if scattered else REPLICATED  # type: ignore[arg-type]

    def _summed(
        self, decision: Decision, layout: Layout, term: fx.Node, leaf: Any, add: Any
    ) -> fx.Node:
        """The sum over the ranks, and what comes after it."""
        if layout.replicated:
            made = add(functional.total, term, self.claims.group)
        else:
            where = (layout.dim, layout.blocks, self.claims.size, self.claims.group)
            made = add(functional.scatter_total, term, *where)
        for source in decision.after:
            made = add(aten.add.Tensor, made, leaf(source))
        return made  # type: ignore[no-any-return]

    # -------------------------------------------------------------- gradients

    def _gradients(
        self, local: fx.Node, single: fx.Node, seen: dict[fx.Node, Held], decision: Decision | None
    ) -> bool:
        """Checks which gradients the operator gives its whole inputs; returns whether its own is a term."""
        whole = [h for h in seen.values() if h.whole and h.of in self.trains]
        if decision is None or decision.alike:
            terms = [h for h in whole if h.terms]
            if not terms or single not in self.trains:
                return False
            if len(terms) < len(whole):
                alike = next(h for h in whole if not h.terms)
                raise self._sum_error(local, alike, terms=True)
            return True
        for held in whole:
            scattered = getattr(local.args[0], "target", None) is functional.scatter_total
            gives_terms = held.of not in decision.after or scattered
            if held.terms != gives_terms:
                raise self._sum_error(local, held, gives_terms)
        return False

    def _sum_error(self, local: fx.Node, held: Held, terms: bool) -> Exception:
        missing = "the sum of its gradient over the tensor-parallel ranks is missing"
        doubled = "its gradient is whole on every rank and would be summed over the tensor-parallel ranks again"
        return error(
            f"{_named(held.of)}: {missing if terms else doubled}",
            node=local,
            found=str(held),
            expected="a value that passed the border where terms are summed (vary)"
            if terms
            else "the value itself",
            cause="a border between equal and different computation was dropped, doubled or crossed",
        )

    # -------------------------------------------------------------- comparison

    def _compare(
        self, expected: Any, found: Any, leaves: dict[fx.Node, fx.Node], root: fx.Node
    ) -> None:
        """Compares what the rule makes with what is there."""
        pairs: list[tuple[Any, Any]] = []
        if isinstance(expected, fx.Node) and expected in leaves:
            same = leaves[expected] is found
        elif isinstance(expected, fx.Node) and isinstance(found, fx.Node):
            same = expected.target == found.target
            pairs = [(expected.args, found.args), (dict(expected.kwargs), dict(found.kwargs))]
        elif isinstance(expected, tuple | list) and isinstance(found, tuple | list):
            same = len(expected) == len(found)
            pairs = list(zip(expected, found, strict=False))
        elif isinstance(expected, dict) and isinstance(found, dict):
            same = expected.keys() == found.keys()
            pairs = [(value, found.get(key)) for key, value in expected.items()]
        else:
            same = type(expected) is type(found) and expected == found
        if not same:
            raise self._difference(expected, found, leaves, root)
        for one, other in pairs:
            self._compare(one, other, leaves, root)

    def _difference(
        self, expected: Any, found: Any, leaves: dict[fx.Node, fx.Node], root: fx.Node
    ) -> Exception:
        read = leaves.get(expected) if isinstance(expected, fx.Node) else None
        if read in self.held and found in self.held and self.held[found].of is self.held[read].of:
            terms = self.held[read].terms
            return self._sum_error(root, self.held[found], terms)
        summed = "over the tensor-parallel ranks"
        what = f"{self.claimed[root].target} is not what its layout rule makes of it"
        if getattr(expected, "target", None) in _SUMS:
            what = f"the terms of {self.claimed[root].target} are not summed {summed}"
        elif getattr(found, "target", None) in _SUMS:
            what = f"{self.claimed[root].target} is summed {summed} where it holds no terms, or once more"
        return error(
            f"{module_path(root) or 'the root module'}: {what}",
            node=root,
            found=_text(found),
            expected=_text(read or expected),
            cause="a sum, or what is added to it, was dropped, doubled or moved",
        )

    def _check_shape(self, local: fx.Node, single: fx.Node) -> None:
        layout, value = self.held[local].layout, single.meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(layout, Layout):
            return
        shape = list(value.shape)
        if layout.dim is not None:
            shape[layout.dim] //= self.claims.size
        found = local.meta["val"].shape
        if len(found) != len(shape) or any(
            a != b
            for a, b in zip(found, shape, strict=True)
            if isinstance(a, int) and isinstance(b, int)
        ):
            raise error(
                f"{local.name}: has another shape than a part of {single.name}",
                node=local,
                found=str(list(found)),
                expected=str(shape),
            )

    def _output(self, node: fx.Node) -> None:
        single = next(iter(reversed(self.claims.single.nodes)))
        expected, found = _flat(single.args[0]), _flat(node.args[0])
        for source, local, layout in zip(expected, found, self.made.outputs, strict=True):
            if not isinstance(local, fx.Node) or source not in self.claims.tensors:
                continue
            held = self._held(local, node)
            if held.of is not source or held.layout != layout:
                raise self._wrong(
                    node, held, f"{source.name}, {'whole' if layout.replicated else layout}"
                )
            if held.terms and source in self.trains:
                raise self._sum_error(node, held, terms=False)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [
        n
        for n in node.all_input_nodes
        if isinstance(n.meta.get("val"), torch.Tensor | list | tuple)
    ]


def _flat(value: Any) -> list[Any]:
    return list(_leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _differentiable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_differentiable, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _text(value: Any) -> str:
    """A value, or a call and its name in the graph."""
    if not isinstance(value, fx.Node):
        return str(value)
    if value.op != "call_function":
        return value.name
    return f"{value.name} = {getattr(value.target, '__name__', value.target)}"


def _named(node: fx.Node) -> str:
    return str(node.target).removeprefix("module.") if node.op == "get_attr" else node.name


__all__ = ["Held", "verify_parallel"]
