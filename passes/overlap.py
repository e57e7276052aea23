"""Overlap: issue collectives early, wait for them late, and keep one bucket of gradients in flight.

Contract: needs a bucketed program; preserves everything but the order of nodes. A gather of weights moves to where the
previous unit's gather was waited for, so it travels while that unit computes (one unit of extra memory, as FSDP2's
prefetch); its wait stays at the first use. The wait of a gradient reduction moves to just before the next unit's gradients
are packed for theirs, so it travels while that unit's backward runs, and its full gradients are freed before the next are
copied; an all-reduce likewise is waited for before the next one starts.

    before                            after
      a = all_gather(w0); wait          a = all_gather(w0); wait
      x = block0(x, a)                  b = all_gather(w1)
      b = all_gather(w1); wait          x = block0(x, a)
      x = block1(x, b)                  wait(b); x = block1(x, b)

      r1 = reduce_scatter(cat(g1))      r1 = reduce_scatter(cat(g1))
      wait(r1)                          g0 = block0_backward(x)
      g0 = block0_backward(x)           wait(r1)
      r0 = reduce_scatter(cat(g0))      r0 = reduce_scatter(cat(g0))
      wait(r0)                          wait(r0)
"""

from __future__ import annotations

from torch import fx

from passes.base import WAIT, Comm, collectives, finish, inputs, reorder

_REDUCTIONS = ("reduce_grad", "replicate_grad")


def overlap(gm: fx.GraphModule) -> fx.GraphModule:
    """Reorders the collectives of a program.

    Args:
        gm: bucketed program; changed in place and returned.
    """
    reorder(gm.graph, _LateWaits(gm).order())
    _prefetch_gathers(gm)
    return finish(gm, "overlap")


def _prefetch_gathers(gm: fx.GraphModule) -> None:
    """Each gather, with the nodes that only prepare its input, moves behind the previous gather's wait."""
    gathers = [n for n, c in collectives(gm) if c.purpose == "unshard"]
    waits = [_wait_of(n) for n in gathers]
    last_input = None
    for node, _ in inputs(gm):
        last_input = node
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    for index, gather in enumerate(gathers):
        target = waits[index - 1] if index else last_input
        preparation = _preparation(gather)
        if target is None or position[target] > position[gather]:
            continue
        for node in [*preparation, gather]:
            if node is not gather and position[node] < position[target]:
                continue
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


class _Late:
    """A wait and the nodes that need it, held back until something forces them out."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.nodes: list[fx.Node] = []
        self.out = False


class _LateWaits:
    """The order of a program in which waits of gradient reductions, and what depends on them, come late.

    A held group comes out when another unit packs gradients for the same kind of reduction, or starts it, or at the end.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._nodes = list(gm.graph.nodes)
        self._home: dict[fx.Node, _Late] = {}
        self._held: list[_Late] = []
        self._ordered: list[fx.Node] = []
        self._packs = {
            node: comm
            for start, comm in collectives(gm)
            if comm.purpose in _REDUCTIONS
            for node in (start, *_packing(start))
        }

    def order(self) -> list[fx.Node]:
        """All nodes, in the new order."""
        for node in self._nodes:
            source = node.args[0] if node.args else None
            comm = source.meta.get("comm") if isinstance(source, fx.Node) else None
            needs = [self._home[n] for n in node.all_input_nodes if n in self._home]
            held = [late for late in needs if not late.out]
            if node.op == "output":
                self._release(self._held)
            elif node.target is WAIT and getattr(comm, "purpose", "") in _REDUCTIONS:
                late = _Late(comm)  # type: ignore[arg-type]
                self._held.append(late)
                held = [late]
            if held and node.op != "output":
                late = max(held, key=self._held.index)
                late.nodes.append(node)
                self._home[node] = late
            else:
                self._emit(node)
        return self._ordered

    def _emit(self, node: fx.Node) -> None:
        if node in self._packs:
            mine = self._packs[node]
            self._release(
                [
                    late
                    for late in self._held
                    if late.comm.purpose == mine.purpose and late.comm.unit != mine.unit
                ]
            )
        self._ordered.append(node)

    def _release(self, groups: list[_Late]) -> None:
        """Puts groups into the order, each after the groups that it needs."""
        for late in list(groups):
            if late.out:
                continue
            late.out = True
            self._held.remove(late)
            for node in late.nodes:
                needed = [self._home[n] for n in node.all_input_nodes if n in self._home]
                self._release([n for n in needed if not n.out])
                self._emit(node)


def _packing(start: fx.Node) -> list[fx.Node]:
    """Nodes that do nothing but fill a collective's input buffer, when it is a concatenation."""
    found: list[fx.Node] = []
    stack = [start]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source.meta.get("packs") and len(source.users) == 1:
                found.append(source)
                stack.append(source)
    return found


def _wait_of(node: fx.Node) -> fx.Node:
    return next(user for user in node.users if user.target is WAIT)
