"""What a step costs, as expressions in the sizes of the mesh and of the inputs; evaluated without capturing again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import sympy
from torch import fx

from hp_compile.cost.flops import node_flops
from hp_compile.cost.hardware import Profile, load_profile
from hp_compile.cost.liveness import CATEGORIES, DIRECT, Lifetimes, Transport, lifetimes
from hp_compile.cost.replan import check_sizes, layout_like, replan
from hp_compile.cost.simulate import Op, Timeline, operations, simulate
from hp_compile.cost.spread import Spread
from hp_compile.cost.symbols import InputSymbols, evaluate, padded_elements
from hp_compile.cost.traffic import SymbolicCollective, symbolic_collectives, totals
from hp_compile.plan import Plan
from hyper_parallel.plan import ParamPlan

#: A byte count that needs no symbol.
ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps and moves, in bytes for each element of this rank's shards.

    Attributes:
        state: kept between steps; AdamW has two moments in float32.
        temporary: allocated for the time of the step; AdamW with ``foreach=True`` makes the root of the second moment,
            ``fused=True`` nothing.
        traffic: read and written in a step beside the gradient: parameter and both moments, in and out.
    """

    state: int = 8
    temporary: int = 4
    traffic: int = 24


#: ``torch.optim.AdamW`` on float32 parameters, in the variant that CPU and GPU take by default.
ADAMW = Optimizer()


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        params: shards, padding included.
        optimizer: state of the optimizer.
        gradients: gradients at the end of backward.
        saved: what forward saves for backward.
        weights: gathered weights, at the moment when most are there.
        step: the most that a step allocates above what is there before it (gradients and all of the above included).
        peak: params + optimizer + step.
    """

    params: int
    optimizer: int
    gradients: int
    saved: int
    weights: int
    step: int
    peak: int


@dataclass(frozen=True)
class Estimate:
    """A step on one mesh.

    Attributes:
        sizes: the mesh dims and dynamic input dims that it was evaluated for.
        sent: bytes that a rank sends, by kind of collective.
        flops: floating-point operations of a rank, by phase.
        memory: bytes of a rank.
    """

    sizes: Mapping[str, int]
    sent: Mapping[str, int]
    flops: Mapping[str, int]
    memory: Memory


@dataclass
class _Variant:
    """The programs of all meshes on which the same dims are larger than 1."""

    plan: Plan
    symbols: InputSymbols
    optimizer: Optimizer
    transport: Transport

    @cached_property
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        return self.plan.graphs

    @cached_property
    def spread(self) -> Spread:
        return Spread(self.graphs, self.symbols)

    @cached_property
    def collectives(self) -> tuple[SymbolicCollective, ...]:
        return symbolic_collectives(self.graphs, self.symbols)

    @cached_property
    def trained(self) -> sympy.Expr:
        """Elements of this rank's shards that get a gradient."""
        return sympy.Add(*(_shard(p) for p in self.plan.params.values() if p.requires_grad))

    @cached_property
    def lifetimes(self) -> Lifetimes:
        temporary = self.trained * self.optimizer.temporary
        return lifetimes(
            self.graphs,
            self.spread.nbytes,
            optimizer_bytes=temporary,
            transport=self.transport,
        )

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        gradient = _bytes(p for p in self.plan.params.values() if p.requires_grad)
        traffic = self.trained * self.optimizer.traffic + gradient
        return operations(self.graphs, self.spread, self.symbols, self.collectives, traffic)


class CostModel:
    """The cost of a plan's step for every size of its data-parallel dims and of its dynamic inputs.

    Nothing is captured again. A mesh on which a dim has size 1 has other programs (a group of one needs no collective), so
    the passes run once for each set of dims that are larger than 1, and expressions are evaluated from there.

    Args:
        plan: a plan with a program.
        optimizer: what the optimizer keeps.
        transport: what the communication library allocates; nothing by default, as NCCL is taken to do.

    Raises:
        CaptureError: the plan was made without example inputs.

    Example:
        >>> model = CostModel(hp_compile.plan(net, mesh, args=(tokens,)))  # doctest: +SKIP
        >>> model.sent["all_gather"]  # doctest: +SKIP
        131072*(dp_shard - 1)*ceiling(64/dp_shard)
        >>> model.at({"dp_shard": 64}).memory.peak  # doctest: +SKIP
    """

    def __init__(
        self, plan: Plan, optimizer: Optimizer = ADAMW, transport: Transport = DIRECT
    ) -> None:
        program = plan._require_program()
        self.plan = plan
        self.optimizer = optimizer
        self.transport = transport
        self.symbols = InputSymbols.of(program.captured.input_shapes)
        self._variants: dict[frozenset[str], _Variant] = {}

    # -------------------------------------------------------------- expressions

    @cached_property
    def collectives(self) -> tuple[SymbolicCollective, ...]:
        """All collectives that a mesh of this plan's dims can have, in issue order."""
        return self._general.collectives

    @property
    def fixed(self) -> dict[str, int]:
        """Sizes of the dims that the captured graph depends on (tp, ep): expressions hold for these only."""
        layout = self.plan.layout
        return {a: layout.size(a) for a in layout.dim_names if a in _fixed(layout)}

    @cached_property
    def sent(self) -> Mapping[str, sympy.Expr]:
        """Bytes that a rank sends in a step, by kind of collective."""
        return {key[0]: self._closed(e) for key, e in totals(self.collectives).items()}

    def _closed(self, expression: sympy.Expr) -> sympy.Expr:
        """The expression with tp and ep as numbers: slices in the captured graph have the sizes that these leave."""
        fixed = self.fixed
        return expression.subs(
            {s: fixed[s.name] for s in expression.free_symbols if s.name in fixed}
        )

    @cached_property
    def flops(self) -> Mapping[str, sympy.Expr]:
        """Floating-point operations of a rank, by phase; recomputation is in backward."""
        return {
            phase: self._closed(
                sympy.Add(*(node_flops(node, self.symbols) for node in gm.graph.nodes))
            )
            for phase, gm in self._general.graphs.items()
        }

    @cached_property
    def memory(self) -> Mapping[str, sympy.Expr]:
        """Bytes of a rank that do not depend on the order of a program, by what they are for.

        ``params``, ``optimizer``, ``gradients`` (padding included), ``saved`` and ``weights``, the gathered weights that
        are in memory together where most are on a small mesh.
        """
        general = self._general
        params = list(general.plan.params.values())
        buffers = general.lifetimes.buffers
        found = {
            "params": _bytes(params),
            "optimizer": general.trained * self.optimizer.state,
            "gradients": _bytes(p for p in params if p.requires_grad),
            "saved": sympy.Add(*(b.nbytes for b in buffers if b.category == "saved")),
            "weights": self._most("weights"),
        }
        return {what: self._closed(e) for what, e in found.items()}

    def _most(self, category: str) -> sympy.Expr:
        """The buffers of a category at the place where they are largest, on a small mesh."""
        general = self._general
        found = general.lifetimes
        layout = general.plan.layout
        sizes = dict(zip(layout.dim_names, layout.shape, strict=True)) | dict(self.symbols.traced)
        live = found.live(_values([b.nbytes for b in found.buffers], sizes), category)
        place = max(range(len(live)), key=live.__getitem__, default=0)
        here = [b for b in found.buffers if b.born <= place <= b.dies and b.category == category]
        return sympy.Add(*(b.nbytes for b in here))

    # -------------------------------------------------------------- numbers

    def at(
        self, sizes: Mapping[str, int] | None = None, inputs: Mapping[str, int] | None = None
    ) -> Estimate:
        """Evaluates the expressions for one mesh.

        Args:
            sizes: size of any mesh dim; others as in the plan.
            inputs: size of a dynamic input dim (``batch``, of one rank); others as captured.

        Raises:
            HPCompileError: a tensor- or expert-parallel dim has another size than the plan.
            PolicyError: the policy does not fit the mesh.
        """
        variant = self._checked_variant(sizes or {})
        numbers = self._numbers(sizes, inputs)
        found = variant.lifetimes
        nbytes = _values([b.nbytes for b in found.buffers], numbers)
        memory = {k: evaluate(e, numbers) for k, e in self._static(variant).items()}
        step = int(max(found.live(nbytes), default=0))
        saved = sum(n for b, n in zip(found.buffers, nbytes, strict=True) if b.category == "saved")
        return Estimate(
            sizes=numbers,
            sent={k[0]: evaluate(e, numbers) for k, e in totals(variant.collectives).items()},
            flops={k: evaluate(e, numbers) for k, e in self.flops.items()},
            memory=Memory(
                **memory,
                saved=int(saved),
                weights=int(max(found.live(nbytes, "weights"), default=0)),
                step=step,
                peak=memory["params"] + memory["optimizer"] + step,
            ),
        )

    def _static(self, variant: _Variant) -> dict[str, sympy.Expr]:
        params = list(variant.plan.params.values())
        return {
            "params": _bytes(params),
            "optimizer": variant.trained * self.optimizer.state,
            "gradients": _bytes(p for p in params if p.requires_grad),
        }

    def live(
        self, sizes: Mapping[str, int] | None = None, inputs: Mapping[str, int] | None = None
    ) -> tuple[list[tuple[str, str]], dict[str, list[float]]]:
        """Bytes in memory at every place of a step, above what is there before it.

        Args:
            sizes: as for :meth:`at`.
            inputs: as for :meth:`at`.

        Returns:
            Name and phase of every place, and the bytes there by category.
        """
        variant = self._checked_variant(sizes or {})
        numbers = self._numbers(sizes, inputs)
        found = variant.lifetimes
        nbytes = _values([b.nbytes for b in found.buffers], numbers)
        return found.places, {c: found.live(nbytes, c) for c in CATEGORIES}

    def timeline(
        self,
        profile: str | Profile,
        sizes: Mapping[str, int] | None = None,
        inputs: Mapping[str, int] | None = None,
        *,
        streams: int = 1,
    ) -> Timeline:
        """Simulates a step on a machine.

        Args:
            profile: a machine (see ``load_profile``).
            sizes: as for :meth:`at`.
            inputs: as for :meth:`at`.
            streams: communication streams, 1 or 2.
        """
        variant = self._checked_variant(sizes or {})
        numbers = self._numbers(sizes, inputs)
        columns = [[getattr(op, c) for op in variant.ops] for c in ("flops", "nbytes", "sent")]
        values = list(zip(*(_values(column, numbers) for column in columns), strict=True))
        layout = layout_like(self.plan.layout, self.plan.policy, dict(sizes or {}))
        return simulate(
            variant.ops, values, profile=load_profile(profile), layout=layout, streams=streams
        )

    # -------------------------------------------------------------- programs behind them

    @property
    def _general(self) -> _Variant:
        """The programs with every data dim larger than 1, which have every collective."""
        layout = self.plan.layout
        return self._variant({axis: 2 for axis in layout.batch_dims if axis not in _fixed(layout)})

    def _checked_variant(self, sizes: Mapping[str, int]) -> _Variant:
        check_sizes(self.plan, sizes)
        return self._variant(sizes)

    def _variant(self, sizes: Mapping[str, int]) -> _Variant:
        layout = layout_like(self.plan.layout, self.plan.policy, sizes)
        wide = frozenset(n for n, s in zip(layout.dim_names, layout.shape, strict=True) if s > 1)
        key = wide | {f"+{name}" for name in layout.dim_names if name not in wide}
        if key not in self._variants:
            small = {name: 2 if name in wide else 1 for name in layout.dim_names}
            small |= {name: layout.size(name) for name in _fixed(layout)}
            self._widen(small, layout.roles.shard)
            self._variants[key] = _Variant(
                replan(self.plan, small), self.symbols, self.optimizer, self.transport
            )
        return self._variants[key]

    def _widen(self, small: dict[str, int], shard: Sequence[str]) -> None:
        """Room for the smaller groups of an integer reshard: twice their size, so that both kinds of gather exist."""
        inner = self.plan.policy.reshard_after_forward
        if isinstance(inner, bool) or inner is None:
            return
        for name in shard:
            if small[name] > 1:
                small[name] = 2 * inner
                return

    def _numbers(
        self, sizes: Mapping[str, int] | None, inputs: Mapping[str, int] | None
    ) -> dict[str, int]:
        """The value of every symbol."""
        layout = layout_like(self.plan.layout, self.plan.policy, sizes or {})
        dims = dict(zip(layout.dim_names, layout.shape, strict=True))
        return {**dims, **self.symbols.traced, **(inputs or {})}


def _fixed(layout: object) -> set[str]:
    """Mesh dims whose size the captured graph depends on."""
    roles = layout.roles  # type: ignore[attr-defined]
    return {*roles.tp, *roles.ep}


def _shard(plan: ParamPlan) -> sympy.Expr:
    return padded_elements(replace(plan, shard_dim=None) if plan.ignored else plan)


def _bytes(plans: object) -> sympy.Expr:
    """Bytes of parameters' shards."""
    return sympy.Add(*(_shard(p) * p.dtype.itemsize for p in plans))  # type: ignore[attr-defined]


def _values(expressions: Sequence[sympy.Expr], sizes: Mapping[str, int]) -> list[int]:
    """Evaluates many expressions, each distinct one once."""
    known: dict[sympy.Expr, int] = {}
    result = []
    for expression in expressions:
        if expression not in known:
            known[expression] = evaluate(expression, sizes)
        result.append(known[expression])
    return result


__all__ = ["ADAMW", "CostModel", "Estimate", "Memory", "Optimizer"]
