"""Plan: what will run, as values that people read, compare and prove."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import fx

from hp_compile.check import idle_dims, idle_text
from hp_compile.program import Program, Reduction
from hp_compile.signature import Signature, TensorSpec
from hyper_parallel.errors import CaptureError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import format_placements
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import Policy
from passes import base
from passes.verify import verify_programs


@dataclass(frozen=True)
class Collective:
    """One collective of a step, as this rank issues it.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        phase: ``forward`` or ``backward``.
        axes: mesh dims it communicates over, in mesh order.
        ranks: global ranks of this rank's group, in group order.
        dtype: dtype on the wire.
        nbytes: bytes this rank sends under the ring algorithm, padding included.
        params: FQNs of the parameters it carries, in registration order.
        purpose: ``unshard``, ``reduce_grad``, ``replicate_grad``, ``tp``, ``ep`` or ``cp``.
        module: FQN of the module whose computation needs it, for one that carries no parameters; empty for the root.
    """

    kind: str
    phase: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    params: tuple[str, ...]
    purpose: str
    module: str = ""


class Plan:
    """What a step of one program runs on one rank.

    Args:
        layout: the mesh as a value, seen from this rank.
        policy: the policy.
        params: plan of every parameter.
        program: the captured program; ``None`` when the model was planned without example inputs.
        signature: signature of the call.

    Attributes:
        layout: the mesh as a value.
        policy: the policy.
    """

    def __init__(
        self,
        layout: MeshLayout,
        policy: Policy,
        params: Mapping[str, ParamPlan],
        program: Program | None,
        signature: Signature | None,
    ) -> None:
        self.layout = layout
        self.policy = policy
        self._params = dict(params)
        self._program = program
        self._signature = signature

    @property
    def params(self) -> Mapping[str, ParamPlan]:
        """``ParamPlan`` of every parameter by FQN, in registration order; a tied parameter once, under its first name."""
        return MappingProxyType(self._params)

    @property
    def has_program(self) -> bool:
        """Whether the plan was made with example inputs, so that it knows graphs and collectives."""
        return self._program is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader may not expect, one sentence each.

        Ranks that repeat each other's work, tensor-parallel styles that do not apply, values that are gathered and why.
        """
        idle = idle_dims(self.layout, self.params)
        first = (idle_text(self.layout, idle),) if idle else ()
        return first if self._program is None else (*first, *self._program.captured.notes)

    def _require_program(self) -> Program:
        if self._program is None:
            raise CaptureError(
                "this plan was made without example inputs, so it knows parameters but no program; pass them: "
                "hp_compile.plan(model, mesh, policy, args=(tokens,))"
            )
        return self._program

    @cached_property
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        """``"forward"`` and, when something requires grad, ``"backward"``: the very programs that are lowered."""
        program = self._require_program()
        graphs = {"forward": program.forward}
        if program.trains:
            graphs["backward"] = program.backward(self._reduction)
        return MappingProxyType(graphs)

    @property
    def captured(self) -> fx.GraphModule:
        """The program for one device that the passes started from, forward and backward in one; to read, not to change."""
        return self._require_program().captured.gm

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """One line for each leaf of the call: path, dtype and the sizes that the plan was made with, or the constant."""
        if self._signature is None or self._program is None:
            return ()
        return tuple(self._signature.describe_sizes(self._program.traced))

    @property
    def _reduction(self) -> Reduction:
        return Reduction(reduce_op=self.policy.reduce_op)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of one step in issue order, forward first."""
        return tuple(
            describe_collective(node, comm, phase, self.layout)
            for phase, gm in self.graphs.items()
            for node, comm in base.collectives(gm)
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of what will run: equal on every rank, device and backend, and for meta, plain and sharded models."""
        facts = program_facts(
            self.layout, self.policy, self._program, params=self._params, signature=self._signature
        )
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

    def verify(self) -> None:
        """Proves that every gradient is reduced exactly once over every axis.

        Raises:
            VerificationError: it is not; the text names parameter, axis, states and nodes.
        """
        verify_programs(self.graphs)

    def dump(self) -> str:
        """The plan as stable text for review: no ids, counters or process-group names."""
        from hp_compile.dump import dump

        return dump(self)

    def to_json(self) -> str:
        """The plan as a JSON document with a stable schema; ``hp_compile.serial`` describes and reads it."""
        from hp_compile import serial

        return serial.dumps(serial.save(self))

    def __repr__(self) -> str:
        return f"Plan({len(self._params)} parameters on {self.layout.describe()}, fingerprint {self.fingerprint})"


def describe_collective(
    node: fx.Node, comm: base.Comm, phase: str, layout: MeshLayout
) -> Collective:
    """The :class:`Collective` of one node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    nbytes = base.hint(value.numel()) * value.element_size()
    ranks = inner_ranks(layout, comm)
    return Collective(
        kind=comm.kind,
        phase=phase,
        axes=comm.axes,
        ranks=ranks,
        dtype=value.dtype,
        nbytes=ring_bytes(comm.kind, nbytes, len(ranks)),
        params=comm.params,
        purpose=comm.purpose,
        module=comm.unit if not comm.params else "",
    )


def inner_ranks(layout: MeshLayout, comm: base.Comm) -> tuple[int, ...]:
    """Global ranks of a collective's group; for an integer reshard, the slice of ``comm.inner`` ranks around this one."""
    ranks = layout.ranks_along(comm.axes)
    if not comm.inner:
        return ranks
    start = ranks.index(layout.rank) // comm.inner * comm.inner
    return ranks[start : start + comm.inner]


def ring_bytes(kind: str, nbytes: int, group_size: int) -> int:
    """Bytes one rank sends in a ring (Patarasuk and Yuan, 2009) for an input of ``nbytes``.

    Args:
        kind: kind of collective.
        nbytes: size of this rank's input.
        group_size: ranks in the group.
    """
    others = group_size - 1
    if kind == "all_gather":
        return nbytes * others
    if kind == "all_reduce":
        return -(-2 * nbytes * others // group_size)
    return -(-nbytes * others // group_size)


def program_facts(
    layout: MeshLayout,
    policy: Policy,
    program: Program | None,
    *,
    params: Mapping[str, ParamPlan] | None = None,
    signature: Signature | None = None,
) -> list[str]:
    """What must be equal on all ranks and decides what runs, one fact a line."""
    facts = [f"mesh: {layout.describe()} ranks {layout.digest} roles {layout.roles}"]
    facts += [f"policy.{name}: {value}" for name, value in policy.program_key()]
    if params is None:
        assert program is not None
        params = base.info(program.captured.gm).params
    for plan in params.values():
        facts.append(
            f"parameter {plan.fqn}: {_dtype(plan.dtype)}{list(plan.shape)} {format_placements(plan.placements)} "
            f"{plan.reduction}{'' if plan.requires_grad else ' frozen'}{' ignored' if plan.ignored else ''}"
        )
    signature = signature or (program.signature if program is not None else None)
    if signature is not None:
        facts += [line for line in signature.describe()]
    if program is not None:
        facts += _program_lines(program, policy)
    return facts


def _program_lines(program: Program, policy: Policy) -> list[str]:
    graphs = {"forward": program.forward}
    if program.trains:
        graphs["backward"] = program.backward(Reduction(reduce_op=policy.reduce_op))
    lines = []
    for phase, gm in graphs.items():
        for node, comm in base.collectives(gm):
            dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
            lines.append(
                f"{phase} {comm.kind} over {'.'.join(comm.axes)}{f'/{comm.inner}' if comm.inner else ''} "
                f"{_dtype(dtype)} {comm.purpose}: {', '.join(comm.params)}"
            )
    return lines


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["Collective", "Plan", "TensorSpec", "describe_collective", "program_facts", "ring_bytes"]
