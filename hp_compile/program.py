"""A program: what one input signature, mode and set of sizes compiles to, with its backward variants.

Every variant starts from the same captured joint graph and differs in the list of passes only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from hp_compile import pipeline
from hp_compile.capture import Captured
from hp_compile.lower import Lowered, lower
from hp_compile.signature import Signature
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import Policy
from hyper_parallel.torch_compat import graph as compat
from passes.base import (
    InputUpdate,
    OutputRole,
    TangentInput,
    UserInput,
    UserOutput,
    info,
    inputs,
    outputs,
)

#: Shape of every flat tensor input of a call.
Sizes = tuple[tuple[int, ...], ...]

#: How many distinct sizes a program remembers as accepted or not.
MAX_REMEMBERED_SIZES = 4096


def sizes_of(tensors: Sequence[torch.Tensor]) -> Sizes:
    """Shapes as a value."""
    return tuple(tuple(t.shape) for t in tensors)


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced; the runtime's setters change it, so it selects backward variants.

    Attributes:
        variant: ``"sync"``, ``"scatter"``, ``"none"`` (see ``passes.reduce_grads``).
        reduce_op: ``"avg"`` or ``"sum"``.
        divide_factor: explicit divisor, or ``None``.
    """

    variant: str = "sync"
    reduce_op: str = "avg"
    divide_factor: float | None = None


@dataclass
class Program:
    """One captured program and everything compiled from it.

    Attributes:
        signature: signature of the calls it serves.
        captured: result of capture; its graph is annotated and cleaned, and never consumed.
        policy: the policy.
        reshard: ``reshard_after_forward`` of every unit.
        gathered: whether gathers are in the graph (``False``: the runtime holds the weights unsharded).
        traced: sizes of the flat tensor inputs that it was captured with.
    """

    captured: Captured
    signature: Signature
    policy: Policy
    reshard: Mapping[str, bool | int]
    gathered: bool = True
    traced: Sizes = ()
    _lowered: dict[Any, Lowered] = field(default_factory=dict)
    _backward: dict[Reduction, fx.GraphModule] = field(default_factory=dict)
    _plain: dict[Any, Lowered] = field(default_factory=dict)
    _accepted: dict[Sizes, bool] = field(default_factory=dict)

    @property
    def params(self) -> Mapping[str, ParamPlan]:
        """Plan of every parameter, with what capture found out about its gradient."""
        return info(self.captured.gm).params

    @property
    def trains(self) -> bool:
        """Whether the program has a backward."""
        return self.captured.grad

    @cached_property
    def _halves(self) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        joint = copy.deepcopy(self.captured.gm)
        steps = pipeline.shard_steps(self.policy, self.reshard, self.gathered)
        joint = pipeline.run(joint, steps)
        if not self.trains:
            return joint, None
        return pipeline.split(joint)

    @cached_property
    def forward(self) -> fx.GraphModule:
        """The forward (or inference) program that is lowered."""
        return pipeline.run(self._halves[0], pipeline.schedule_steps(self.policy))

    def backward(self, reduction: Reduction) -> fx.GraphModule:
        """The backward program that is lowered, with its gradient reductions."""
        if reduction not in self._backward:
            source = self._halves[1]
            assert source is not None
            steps = pipeline.reduce_steps(self.policy, reduction)
            self._backward[reduction] = pipeline.run(
                copy.deepcopy(source), [*steps, *pipeline.schedule_steps(self.policy)]
            )
        return self._backward[reduction]

    def run_forward(self, values: list[Any], sizes: Sizes) -> Sequence[Any]:
        """Runs forward.

        Args:
            values: one value for each placeholder, in order; may be emptied.
            sizes: sizes of the flat tensor inputs of the call.
        """
        return self._callable("forward", lambda: self.forward, sizes)(values)

    def run_backward(self, reduction: Reduction, values: list[Any], sizes: Sizes) -> Sequence[Any]:
        """Runs backward.

        Args:
            reduction: the variant.
            values: saved values and tangents in placeholder order; may be emptied.
            sizes: sizes of the flat tensor inputs of the call.
        """
        return self._callable(reduction, lambda: self.backward(reduction), sizes)(values)

    def _callable(self, key: Any, build: Any, sizes: Sizes) -> Lowered:
        mode = self.captured.fake_mode
        if key not in self._lowered:
            gm = build()
            both = {"forward": self.forward, "backward": gm}
            pipeline.prove(both if isinstance(key, Reduction) else {"forward": gm})
            guards = compat.number_of_guards(mode)
            self._lowered[key] = lower(gm, backend=self.policy.backend, fake_mode=mode)
            if guards != compat.number_of_guards(mode):  # code generation relies on more
                self._accepted.clear()
        if not self._fits(sizes):
            # Code generated for other sizes, in between this call's accepts() and now, does not fit; the graph does.
            if key not in self._plain:
                self._plain[key] = lower(build(), backend="aot_eager", fake_mode=mode)
            return self._plain[key]
        return self._lowered[key]

    # -------------------------------------------------------------- sizes

    def accepts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the program is right for these sizes (and, where traced statically, exactly these)."""
        return self._fits(sizes_of(tensors))

    def _fits(self, sizes: Sizes) -> bool:
        if sizes not in self._accepted:
            if len(self._accepted) >= MAX_REMEMBERED_SIZES:
                self._accepted.clear()
            self._accepted[sizes] = compat.sizes_fit(
                self.captured.fake_mode, self.captured.input_shapes, sizes
            )
        return self._accepted[sizes]

    def rebuild(self, flat: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
        """The user's own output object.

        Args:
            flat: flat user outputs.
            tensors: the flat tensor inputs of the call.
        """
        spec = self.captured.output
        if not spec.has_sizes:
            return spec.rebuild(flat)
        mode, shapes = self.captured.fake_mode, self.captured.input_shapes
        return spec.rebuild(flat, compat.bind_sizes(mode, shapes, sizes_of(tensors)))

    @cached_property
    def _changed_inputs(self) -> tuple[int, ...]:
        return tuple(role.index for _, _, role in outputs(self.forward, InputUpdate))

    def return_updates(self, given: Sequence[torch.Tensor], used: Sequence[torch.Tensor]) -> None:
        """Copies inputs that forward changed in place back to where the caller passed them.

        Args:
            given: the caller's flat tensors.
            used: the same on the mesh's device and contiguous, as the program ran on them.
        """
        with torch.no_grad():
            for index in self._changed_inputs:
                if used[index] is not given[index]:
                    given[index].copy_(used[index])

    @cached_property
    def used_inputs(self) -> tuple[int, ...]:
        """Flat tensor inputs that forward takes, in order."""
        return tuple(role.index for _, role in inputs(self.forward, UserInput))

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """User outputs whose gradient backward takes."""
        source = self._halves[1]
        assert source is not None
        tangents = inputs(source, TangentInput)
        return frozenset(r.of.index for _, r in tangents if isinstance(r.of, UserOutput))

    @cached_property
    def outputs_behind(self) -> Mapping[OutputRole, frozenset[OutputRole]]:
        """For every gradient, the forward outputs that it comes from; all of them for one that is constant."""
        source = self._halves[1]
        assert source is not None
        behind: dict[fx.Node, frozenset[OutputRole]] = {}
        tangents = {node: role.of for node, role in inputs(source, TangentInput)}
        for node in source.graph.nodes:
            own = frozenset({tangents[node]}) if node in tangents else frozenset()
            behind[node] = own.union(*(behind[n] for n in node.all_input_nodes))
        everything: frozenset[OutputRole] = frozenset(tangents.values())
        gradients: list[tuple[int, fx.Node | None, OutputRole]] = list(outputs(source))
        return {
            role: everything if node is None else behind[node] or everything
            for _, node, role in gradients
        }
