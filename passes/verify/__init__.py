"""Verify: prove that a program computes what was captured and reduces every gradient exactly once over every axis.

Contract: needs programs with roles, Comm metadata and an origin; changes nothing. It may be called on any program at any
stage, also between passes.

The proof has three parts, all on one walk over the graph (see ``docs/verification.md``):

* *states*: per value and mesh axis R, S or V; a gather needs S, a reduction needs V, a gradient ends as S on the axes FSDP
  cuts and R on its replicas, with one scale and in the planned dtypes;
* *elements*: the bytes of every bucket are followed through cat, split, slice, pad and reshape, so a parameter is gathered
  and a gradient scattered element by element as planned;
* *computation*: everything else is compared, by digest, with the graph that capture recorded, across forward, saved values
  and backward. A gathered parameter counts as the parameter, so a gather delivered to the wrong user is seen.

    before                                       after
      g = wait(all_reduce(c, sum, dp_shard))       VerificationError: w: its gradient has the wrong state on
      return g as ParamGrad("w")                   mesh dim 'dp_shard' …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from hyper_parallel.errors import VerificationError
from passes.base import SavedOutput, info, outputs
from passes.origin import is_random
from passes.verify.checks import check_outputs
from passes.verify.expected import check_plan
from passes.verify.interpret import Interpreter
from passes.verify.parallel import verify_parallel
from passes.verify.report import error
from passes.verify.values import Value

__all__ = ["verify_against", "verify_parallel", "verify_programs", "verify_stage"]


def verify_programs(graphs: Mapping[str, fx.GraphModule]) -> None:
    """Proves the programs of one plan.

    Args:
        graphs: ``"forward"`` and, if it trains, ``"backward"``; a forward alone is an inference program.

    Raises:
        VerificationError: the text names parameter, mesh dim, states, and the nodes that lead there.

    Example:
        >>> verify_programs(plan.graphs)  # doctest: +SKIP
    """
    saved: list[Value] | None = None
    if "forward" in graphs:
        saved = _verify(graphs["forward"], None)
    for name, gm in graphs.items():
        if name != "forward":
            if "forward" in graphs:
                _check_random(graphs["forward"], gm)
            _verify(gm, saved)


def verify_against(gm: fx.GraphModule, graphs: Mapping[str, fx.GraphModule]) -> None:
    """Proves one program in the place of the same half of a plan, together with the other half.

    Args:
        gm: forward, backward or inference program.
        graphs: the plan's programs.

    Raises:
        VerificationError: it does not implement the plan.
    """
    program = info(gm)
    half = "backward" if program.stage in ("backward", "reduction") else "forward"
    if half not in graphs:
        raise VerificationError(f"the plan has no {half} program to compare with")
    _same_plan(gm, graphs[half])
    verify_programs({**graphs, half: gm})


def verify_stage(gm: fx.GraphModule) -> None:
    """Proves what can be proved of a program between passes: of a joint graph, or of one half on its own.

    A backward half is interpreted with the values of the forward half it was split from.

    Args:
        gm: program at any stage after ``annotate``.

    Raises:
        VerificationError: a pass has damaged it.
    """
    program = info(gm)
    saved = None
    forward = program.facts.get("forward")
    if program.stage == "backward" and forward is not None:
        saved = _verify(forward.program, None)
        _check_random(forward.program, gm)
    _verify(gm, saved)


def _verify(gm: fx.GraphModule, saved: Sequence[Value] | None) -> list[Value]:
    program = info(gm)
    if "origin" not in program.facts:
        raise VerificationError(
            "the program carries no origin: it was not annotated, so there is nothing to compare it with; make programs "
            "with hp_compile.plan, or call passes.origin.record after building one by hand"
        )
    for plan in program.params.values():
        check_plan(plan, program.layout)
    interpreter = Interpreter(gm, saved).run()
    check_outputs(interpreter)
    found = {
        role.index: interpreter.values[node]
        for _, node, role in outputs(gm, SavedOutput)
        if node is not None
    }
    return [found[index] for index in sorted(found)]


def _check_random(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """A random operator of forward that backward runs again draws other numbers."""
    drawn = {n.meta["random"] for n in forward.graph.nodes if "random" in n.meta and is_random(n)}
    for node in backward.graph.nodes:
        if is_random(node) and node.meta.get("random") in drawn:
            raise error(
                f"{node.name}: a random operator of forward is run again in backward, so the two do not agree",
                node=node,
                expected="its result is saved by forward",
                cause="the partitioner was told to recompute it",
            )


def _same_plan(gm: fx.GraphModule, other: fx.GraphModule) -> None:
    left, right = info(gm), info(other)
    for fqn, plan in right.params.items():
        if left.params.get(fqn) != plan:
            raise VerificationError(
                f"{fqn}: the program was made for another plan of this parameter\n  found:    {left.params.get(fqn)}\n"
                f"  expected: {plan}"
            )
    if left.layout != right.layout:
        raise VerificationError(
            f"the program was made for mesh ({left.layout.describe()}), the plan for ({right.layout.describe()})"
        )
