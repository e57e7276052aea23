"""Which backward variant runs, and what happens to gradients that are not synchronised in it.

The state of accumulation lives in ``ParamState``. Accumulated gradients are folded in before the reduction, in the dtype
of the reduction, so every element is reduced once whatever the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hp_compile.build import reduction_program
from hp_compile.program import Reduction

if TYPE_CHECKING:
    from hp_compile.runtime import Runtime


@dataclass(frozen=True)
class Choice:
    """A backward variant, and the standalone reduction program to run after accumulation, if any.

    Attributes:
        run: the variant of the backward program.
        after: ``""`` (gradients are final), ``"hold"`` (accumulate, hand out nothing), ``"reduce"`` (fold, then reduce
            unsharded gradients), ``"replicate"`` (fold partial shards, then all-reduce).
    """

    run: Reduction
    after: str = ""


def choose(runtime: Runtime) -> Choice:
    """Reads the flags and what has been accumulated."""
    flags = runtime.flags

    def variant(name: str) -> Reduction:
        return Reduction(name, flags.reduce_op, flags.divide_factor)

    if not flags.gradient_sync:
        return Choice(variant("none"), "hold")
    if any(s.unsharded_grad is not None for s in runtime.states.values()):
        return Choice(variant("none"), "reduce")
    if not flags.all_reduce and any(p.dp_size > 1 for p in runtime.plans.values()):
        return Choice(variant("scatter"), "hold")
    if any(s.partial_grad is not None for s in runtime.states.values()):
        return Choice(variant("scatter"), "replicate")
    return Choice(variant("sync"))


def finish(
    runtime: Runtime, choice: Choice, grads: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Accumulates or folds; returns the gradients that autograd may hand out."""
    if choice.after == "":
        return dict(grads)
    final = {f: g for f, g in grads.items() if runtime.plans[f].ignored}
    slot = "unsharded_grad" if choice.run.variant == "none" else "partial_grad"
    _accumulate(runtime, grads, slot)
    if choice.after == "hold":
        return final
    if choice.after == "reduce":
        unsharded = _take(runtime, "unsharded_grad")
        replicas = any(p.dp_size > 1 for p in runtime.plans.values())
        held = any(s.partial_grad is not None for s in runtime.states.values())
        if not held and (runtime.flags.all_reduce or not replicas):
            return {**final, **_run(runtime, unsharded, "sync", choice)}
        _accumulate(runtime, _run(runtime, unsharded, "scatter", choice), "partial_grad")
        if not runtime.flags.all_reduce:
            return final
    return {**final, **_run(runtime, _take(runtime, "partial_grad"), "replicate", choice)}


def _accumulate(runtime: Runtime, grads: Mapping[str, torch.Tensor], slot: str) -> None:
    """Adds in place: programs return gradients in memory of their own."""
    for fqn, grad in grads.items():
        state = runtime.states[fqn]
        if not state.plan.ignored:
            held = getattr(state, slot)
            setattr(state, slot, grad if held is None else held.add_(grad))


def _take(runtime: Runtime, slot: str) -> dict[str, torch.Tensor]:
    taken = {}
    for fqn, state in runtime.states.items():
        value = getattr(state, slot)
        if value is not None:
            taken[fqn] = value
            setattr(state, slot, None)
    return taken


def _run(
    runtime: Runtime, grads: Mapping[str, torch.Tensor], variant: str, choice: Choice
) -> dict[str, torch.Tensor]:
    dtypes = tuple((fqn, grad.dtype) for fqn, grad in grads.items())
    program = reduction_program(runtime, dtypes, replace(choice.run, variant=variant))
    return dict(zip(grads, program(list(grads.values())), strict=True))
