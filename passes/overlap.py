"""Overlap: issue collectives early and wait for them late.

Contract: needs a bucketed program; preserves everything but the order of nodes. A gather of weights moves to where the
previous unit's gather was waited for, so it travels while that unit computes (one unit of extra memory, as FSDP2's
prefetch); the wait stays at the first use. The wait of a gradient reduction moves to the end, so backward goes on while
it travels.

    before                            after
      a = all_gather(w0); wait          a = all_gather(w0); wait
      x = block0(x, a)                  b = all_gather(w1)
      b = all_gather(w1); wait          x = block0(x, a)
      x = block1(x, b)                  wait(b); x = block1(x, b)
"""

from __future__ import annotations

from torch import fx

from passes.base import WAIT, collectives, finish, inputs


def overlap(gm: fx.GraphModule) -> fx.GraphModule:
    """Reorders the collectives of a program.

    Args:
        gm: bucketed program; changed in place and returned.
    """
    _sink_reductions(gm)
    _prefetch_gathers(gm)
    return finish(gm, "overlap")


def _prefetch_gathers(gm: fx.GraphModule) -> None:
    """Each gather, with the nodes that only prepare its input, moves behind the previous gather's wait."""
    gathers = [n for n, c in collectives(gm) if c.purpose == "unshard" and not c.inner]
    waits = [_wait_of(n) for n in gathers]
    last_input = None
    for node, _ in inputs(gm):
        last_input = node
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    for index, gather in enumerate(gathers):
        target = waits[index - 1] if index else last_input
        if target is None or position[target] > position[gather]:
            continue
        for node in [*_preparation(gather), gather]:
            target.append(node)
            target = node


def _preparation(gather: fx.Node) -> list[fx.Node]:
    """Nodes between placeholders and the gather's input, in graph order; empty input cones are all on placeholders."""
    cone: set[fx.Node] = set()
    stack = list(gather.all_input_nodes)
    while stack:
        node = stack.pop()
        if node.op != "placeholder" and node not in cone:
            cone.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(cone)


def _sink_reductions(gm: fx.GraphModule) -> None:
    """Moves waits of gradient reductions, and all that depends on them, behind the rest of the graph, in order."""
    late: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        source = node.args[0] if node.args else None
        reduction_wait = (
            node.target is WAIT
            and isinstance(source, fx.Node)
            and getattr(source.meta.get("comm"), "purpose", "") in ("reduce_grad", "replicate_grad")
        )
        if reduction_wait or any(n in late for n in node.all_input_nodes):
            late.add(node)
    end = next(iter(reversed(gm.graph.nodes)))
    for node in [n for n in gm.graph.nodes if n in late]:
        end.prepend(node)


def _wait_of(node: fx.Node) -> fx.Node:
    return next(user for user in node.users if user.target is WAIT)
