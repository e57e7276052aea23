"""Damage to the tensor-parallel pass itself: its forward is changed before it is differentiated.

`tests.mutations` damages finished programs, which the verifier compares with what was captured. Here what is captured is
wrong already, so only the states over the mesh dim can tell.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import fx, nn

from hyper_parallel.errors import VerificationError
from passes.base import aten
from passes.tensor_parallel import Parallelised, functional
from tests.mutations import Mutant
from tests.program_cases import Setting, build

Sites = Callable[[Parallelised], Iterator[Any]]
Damage = Callable[[Parallelised, Any], Parallelised]


def tp_mutants(setting: Setting, kind: str) -> Iterator[Callable[[], Mutant]]:
    """Every mutant of a kind, made when called."""
    sites, damage = CHANGES[kind]
    found: list[Any] = []

    def look(made: Parallelised) -> Parallelised:
        found.extend(_named(site) for site in sites(made))
        return made

    build(setting, look)
    for site in found:
        yield lambda site=site: _make(setting, kind, site, damage)


def _make(setting: Setting, kind: str, site: Any, damage: Damage) -> Mutant:
    def change(made: Parallelised) -> Parallelised:
        return damage(made, _nodes(made, site))

    with mock.patch.dict(os.environ, HP_COMPILE_VERIFY="0"):
        graphs = build(setting, change, prove=False)
    for gm in graphs.values():
        gm.meta["setting"] = setting
    try:
        build(setting, change)
    except VerificationError as error:
        refused = str(error)
    else:
        refused = ""
    return Mutant(kind, f"tensor-parallel forward {site}", graphs, refused)


def _named(site: Any) -> Any:
    return fx.node.map_aggregate(site, lambda v: ("node", v.name) if isinstance(v, fx.Node) else v)


def _nodes(made: Parallelised, site: Any) -> Any:
    if isinstance(site, tuple) and len(site) == 2 and site[0] == "node":
        return next(n for n in made.forward.graph.nodes if n.name == site[1])
    return site


# ------------------------------------------------------------------ sites


def _calls(*targets: Any) -> Sites:
    def sites(made: Parallelised) -> Iterator[fx.Node]:
        yield from (n for n in made.forward.graph.nodes if n.target in targets)

    return sites


def _terms(made: Parallelised) -> Iterator[str]:
    yield from sorted(made.partial)


def _whole_parameters(made: Parallelised) -> Iterator[str]:
    """Parameters that take part in the same way on all ranks."""
    for node in made.forward.graph.nodes:
        name = str(node.target)
        if (
            node.op == "get_attr"
            and node.users
            and name not in {*made.partial, *made.claims.params}
        ):
            value = node.meta["val"]
            if isinstance(value, nn.Parameter) and value.requires_grad:
                yield name


def _biases(made: Parallelised) -> Iterator[fx.Node]:
    """Additions to a sum over the ranks."""
    for node in made.forward.graph.nodes:
        if node.target is aten.add.Tensor and any(
            getattr(a, "target", None) is functional.total and len(a.users) == 1 for a in node.args
        ):
            yield node


# ------------------------------------------------------------------ damage


def _replaced(make: Callable[[fx.Graph, fx.Node], fx.Node | Any]) -> Damage:
    """Puts what ``make(graph, node)`` builds into the place of a call."""

    def damage(made: Parallelised, node: fx.Node) -> Parallelised:
        users = list(node.users)
        with node.graph.inserting_after(node):
            new = make(node.graph, node)
        for user in users:
            user.replace_input_with(node, new)
        if not node.users and node.target is not functional.vary:  # no collective is left behind
            node.graph.erase_node(node)
        return made

    return damage


def _call(target: Any) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    """The same arguments given to another function."""

    def make(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return _described(graph.call_function(target, node.args, dict(node.kwargs)), node)

    return make


def _again(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The call once more, on its own result."""
    return _described(
        graph.call_function(node.target, (node, *node.args[1:]), dict(node.kwargs)), node
    )


def _described(new: fx.Node, old: fx.Node) -> fx.Node:
    new.meta = dict(old.meta)
    return new


def _without(made: Parallelised, name: str) -> Parallelised:
    return dataclasses.replace(made, partial=made.partial - {name})


def _with(made: Parallelised, name: str) -> Parallelised:
    return dataclasses.replace(made, partial=made.partial | {name})


def _bias_first(made: Parallelised, node: fx.Node) -> Parallelised:
    """Every rank adds the bias to its term, so that it is in the sum once a rank."""
    total, bias = node.args
    assert isinstance(total, fx.Node)
    term, group = total.args
    with node.graph.inserting_before(node):
        early = _described(node.graph.call_function(aten.add.Tensor, (term, bias)), node)
        new = _described(node.graph.call_function(functional.total, (early, group)), node)
    node.replace_all_uses_with(new)
    for dead in (node, total):
        node.graph.erase_node(dead)
    return made


def _input(_: fx.Graph, node: fx.Node) -> Any:
    return node.args[0]


CHANGES: Mapping[str, tuple[Sites, Damage]] = {
    "tp pass: border dropped": (_calls(functional.vary), _replaced(_input)),
    "tp pass: border doubled": (_calls(functional.vary), _replaced(_again)),
    "tp pass: sum dropped": (_calls(functional.total), _replaced(_input)),
    "tp pass: sum doubled": (_calls(functional.total), _replaced(_again)),
    "tp pass: own part for the part of the sum": (
        _calls(functional.scatter_total),
        _replaced(_call(functional.part)),
    ),
    "tp pass: gradient of a gather not summed": (
        _calls(functional.gather_vary),
        _replaced(_call(functional.gather)),
    ),
    "tp pass: gradient of a gather summed": (
        _calls(functional.gather),
        _replaced(_call(functional.gather_vary)),
    ),
    "tp pass: term of a gradient forgotten": (_terms, _without),
    "tp pass: whole gradient taken for a term": (_whole_parameters, _with),
    "tp pass: bias added on every rank": (_biases, _bias_first),
}
