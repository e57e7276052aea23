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
from hyper_parallel.policy import Policy
from passes.base import OutputRole, TangentInput, UserInput, UserOutput, inputs, outputs


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
    """

    captured: Captured
    signature: Signature
    policy: Policy
    reshard: Mapping[str, bool | int]
    gathered: bool = True
    _lowered: dict[Any, Lowered] = field(default_factory=dict)
    _backward: dict[Reduction, fx.GraphModule] = field(default_factory=dict)
    _accepted: dict[tuple[tuple[int, ...], ...], bool] = field(default_factory=dict)

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

    def run_forward(self, values: list[Any]) -> Sequence[Any]:
        """Runs forward on values in placeholder order."""
        return self._callable("forward", lambda: self.forward)(values)

    def run_backward(self, reduction: Reduction, values: list[Any]) -> Sequence[Any]:
        """Runs backward on saved values and tangents in placeholder order."""
        return self._callable(reduction, lambda: self.backward(reduction))(values)

    def _callable(self, key: Any, build: Any) -> Lowered:
        if key not in self._lowered:
            gm = build()
            both = {"forward": self.forward, "backward": gm}
            pipeline.prove(both if isinstance(key, Reduction) else {"forward": gm})
            self._lowered[key] = lower(
                gm, backend=self.policy.backend, fake_mode=self.captured.fake_mode
            )
            self._accepted.clear()  # code generation may have added guards
        return self._lowered[key]

    # -------------------------------------------------------------- sizes

    def accepts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the program is right for these sizes (and, where traced statically, exactly these)."""
        sizes = tuple(tuple(t.shape) for t in tensors)
        if sizes not in self._accepted:
            self._accepted[sizes] = self._check(sizes)
        return self._accepted[sizes]

    def _check(self, sizes: tuple[tuple[int, ...], ...]) -> bool:
        from hyper_parallel.torch_compat import graph as compat

        return compat.sizes_fit(self.captured.fake_mode, self.captured.input_shapes, sizes)

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
