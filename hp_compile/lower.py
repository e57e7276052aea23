"""Lowering: a program becomes a callable on flat lists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from passes.base import info

Lowered = Callable[[list[Any]], Sequence[Any]]


def decompositions(backend: str) -> Mapping[Any, Any]:
    """Operator decompositions that a backend wants in the joint trace."""
    if backend == "inductor":
        from hyper_parallel.torch_compat import inductor

        return inductor.decompositions()
    return {}


def lower(gm: fx.GraphModule, *, backend: str, fake_mode: Any) -> Lowered:
    """Compiles a program; ``gm`` itself stays as it is.

    Args:
        gm: a forward, backward, inference or reduction program.
        backend: ``"inductor"`` or ``"aot_eager"``.
        fake_mode: the mode of the program's values.

    Returns:
        A function that takes the list of inputs (and may empty it, to free them early) and returns the outputs.
    """
    if backend == "aot_eager":
        from hyper_parallel.torch_compat import graph

        return graph.boxed_forward(gm)
    from hyper_parallel.torch_compat import inductor

    stage = info(gm).stage
    program = copy.deepcopy(gm)
    program.meta.clear()  # it names this rank, and Inductor's disk cache keys on it: all ranks share what one compiled
    examples = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return inductor.compile_graph(
        program,
        examples,
        fake_mode,
        is_backward=stage == "backward",
        is_inference=stage not in ("forward", "backward"),
    )
