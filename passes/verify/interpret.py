"""Abstract interpretation of one program: for every node its digest, its state on every mesh axis, and its elements.

Two kinds of values flow through a program. A *computed* value has a digest (``passes.origin``): it is named by how it is
computed. A *packed* value is bytes on their way through a collective: shards, buckets, gathered buffers, reduced
gradients. It has a :class:`Pack` instead, and nothing but data movement may read it. A packed value becomes computed
when its elements are exactly those of one parameter, in order, in the dtype the model uses: that is what a gather is for.

States per mesh axis, join ``R < S < V``: **R** equal on all ranks, **S** each rank holds its own slice of one tensor,
**V** each rank holds a term of a sum, or its own data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import hyper_parallel.ops  # noqa: F401 -- registers shard_slice
from hyper_parallel.plan import ParamPlan
from passes.base import (
    COLLECTIVES,
    GATHER,
    REDUCE,
    SCATTER,
    VIEWS,
    WAIT,
    BufferInput,
    Comm,
    GradInput,
    ParamGrad,
    ParamInput,
    ProgramInfo,
    SavedInput,
    TangentInput,
    UserInput,
    aten,
    convert,
    info,
)
from passes.origin import COPIES, Origin, digest, empty_digest, input_digest, is_random
from passes.verify.compare import Mismatch, match
from passes.verify.expected import full_parameter
from passes.verify.movement import MOVES, move, static_shape
from passes.verify.packing import Pack, whole
from passes.verify.report import dtype_name, error, some
from passes.verify.sources import (
    Cast,
    Scattered,
    Shard,
    ShardAt,
    Slice,
    Term,
    Whole,
    bottom_of,
    shard_fqn,
    source_name,
)
from passes.verify.transfer import Group, gather, group_of, parse_group, reduce, scatter, slice_of
from passes.verify.values import Value

SHARD_SLICE = torch.ops.hyper_parallel.shard_slice.default
TAKE_CHUNK = torch.ops.hyper_parallel.take_chunk.default
LOCAL_IDS = torch.ops.hyper_parallel.local_ids.default
_WEIGHT_COPIES = COPIES | {convert, aten._to_copy.default}
_ORDER = "RSV"
#: What they return depends on the sizes of their inputs, not on the elements.
_SIZES = frozenset(
    {
        aten.sym_size.int, aten.sym_numel.default,
        aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default,
        aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default,
    }
)  # fmt: skip


class Interpreter:
    """Interprets one program.

    Args:
        gm: program with roles and an origin.
        saved: values that the forward program saved, for a backward program.

    Attributes:
        values: value of every node.
        axes: mesh dims with more than one rank.
        carried: for every gather, the parameters whose shards it carries.
    """

    def __init__(self, gm: fx.GraphModule, saved: Sequence[Value] | None = None) -> None:
        self.gm = gm
        self.program: ProgramInfo = info(gm)
        self.origin: Origin = self.program.facts["origin"]
        self.saved = saved
        layout = self.program.layout
        self.axes = tuple(a for a in layout.dim_names if layout.size(a) > 1)
        self.values: dict[fx.Node, Value] = {}
        self.carried: dict[fx.Node, tuple[str, ...]] = {}
        self._waits: dict[fx.Node, fx.Node] = {}
        self._by_digest: dict[str, fx.Node] = {}
        self._packs: dict[str, Any] = {}
        self._full: dict[str, Pack] = {}
        self._empty = {
            (plan.local_shape, self._used_dtype(plan)): plan
            for plan in self.program.params.values()
            if 0 in plan.local_shape
        }

    # -------------------------------------------------------------- the walk

    def run(self) -> Interpreter:
        """Interprets every node.

        Raises:
            VerificationError: a node does something that no correct program does.
        """
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self._check_pending(node)
            else:
                value = self._value(node)
                self.values[node] = value
                if value.digest is not None:
                    self._by_digest.setdefault(value.digest, node)
        unwaited = [n for n, v in self.values.items() if v.pending is n and n not in self._waits]
        if unwaited:
            raise error(
                f"{unwaited[0].name}: the collective is never waited for, so its result is never ready",
                node=unwaited[0],
                expected="one wait_tensor for every collective",
                cause="a pass dropped or rewired the wait",
            )
        return self

    def _check_pending(self, node: fx.Node) -> None:
        if isinstance(node.meta.get("val"), torch.SymInt | int):
            return  # a size, which is known before the data is there
        for source in node.all_input_nodes:
            if self.values[source].pending is not None:
                raise error(
                    f"{node.name}: reads the result of a collective that has not been waited for",
                    node=source,
                    found=f"{source.name} goes to {node.name} directly",
                    expected=f"{node.name} reads wait_tensor({source.name})",
                    cause="a pass dropped or rewired the wait",
                )

    def _value(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return Value(digest(node, self._digest), self._constant("R"))
        if node.target is WAIT:
            return self._wait(node)
        self._check_pending(node)
        if node.target in COLLECTIVES:
            return self._collective(node)
        if node.target is SHARD_SLICE:
            return self._shard_slice(node)
        packed = any(self.values[n].packed for n in node.all_input_nodes)
        if node.target in (TAKE_CHUNK, LOCAL_IDS) and not packed:
            return self._own_part(node)
        if packed:
            return self._packed(node)
        return self._computed(node)

    def _digest(self, node: fx.Node) -> str:
        found = self.values[node].digest
        assert found is not None
        return found

    # -------------------------------------------------------------- inputs

    def _constant(self, state: str) -> tuple[str, ...]:
        return (state,) * len(self.axes)

    def _own(self) -> tuple[str, ...]:
        """Data of this rank: V on the batch axes, R on the others."""
        batch = self.program.layout.batch_dims
        return tuple("V" if axis in batch else "R" for axis in self.axes)

    def _input(self, node: fx.Node) -> Value:
        role = node.meta.get("role")
        if isinstance(role, ParamInput):
            return self._param_input(node, role.fqn)
        if isinstance(role, SavedInput):
            if self.saved is None or role.index >= len(self.saved):
                raise error(
                    f"{node.name}: backward takes saved value {role.index}, which forward does not save",
                    node=node,
                    cause="forward and backward come from different programs",
                )
            return replace(self.saved[role.index], pending=None)
        if isinstance(role, GradInput):
            plan = self.program.params[role.fqn]
            state = list(self._own())
            for index, axis in enumerate(self.axes):
                if role.partial and axis in plan.shard_axes:
                    state[index] = "S"
            return Value(digest(node, self._digest), tuple(state))
        if isinstance(role, UserInput | TangentInput | BufferInput):
            return Value(digest(node, self._digest), self._own())
        raise error(f"{node.name}: this input has no role", node=node, found=str(role))

    def param_state(self, plan: ParamPlan, on_shard: str) -> tuple[str, ...]:
        """State of a parameter: S where TP or EP cut it, ``on_shard`` where FSDP cuts it, R elsewhere."""
        names = self.program.layout.dim_names
        state = []
        for axis in self.axes:
            placement = plan.unsharded_placements[names.index(axis)]
            cut = "R" if type(placement).__name__ == "Replicate" else "S"
            state.append(on_shard if axis in plan.shard_axes and plan.shard_size > 1 else cut)
        return tuple(state)

    def _param_input(self, node: fx.Node, fqn: str) -> Value:
        plan = self.program.params[fqn]
        value = node.meta["val"]
        shape, dtype = tuple(value.shape), value.dtype
        used = self.origin.params.get(fqn, dtype)
        name = self._param_digest(plan)
        gathered = self.program.facts.get("gathered")
        if plan.ignored or gathered is None or (gathered is False and dtype == used):
            self._check_shape(node, plan, shape, dtype, plan.local_shape, used)
            full = Value(name, self.param_state(plan, "R"), weight=fqn)
            return replace(full, weight=None) if plan.ignored else full
        cut = plan.shard_size > 1 and gathered
        want = plan.padded_shard_shape if cut else plan.local_shape
        self._check_shape(node, plan, shape, dtype, want, plan.dtype)
        state = self.param_state(plan, "S" if cut else "R")
        if cut:
            return Value(None, state, whole(Shard(fqn), shape))
        if dtype == used:
            return Value(name, state)
        return Value(None, state, whole(Whole(fqn), shape))

    def _check_shape(
        self, node: fx.Node, plan: ParamPlan, shape: Any, dtype: Any, want: Any, want_dtype: Any
    ) -> None:
        if shape != tuple(want) or dtype != want_dtype:
            raise error(
                f"{plan.fqn}: the program takes the parameter in another shape or dtype than it is stored in",
                node=node,
                found=f"{dtype_name(dtype)}{list(shape)}",
                expected=f"{dtype_name(want_dtype)}{list(want)}",
                cause="the placeholder was not turned into the padded shard in storage dtype",
            )

    # -------------------------------------------------------------- computed values

    def _join(self, node: fx.Node) -> tuple[str, ...]:
        states = [self.values[n].state for n in node.all_input_nodes]
        if is_random(node):
            states.append(self._own())
        if not states:
            return self._constant("R")
        joined = tuple(max(column, key=_ORDER.index) for column in zip(*states, strict=True))
        if node.target not in _SIZES:
            return joined
        # Only batches differ in size: what tp cuts, it cuts into equal parts.
        batch = self.program.layout.batch_dims
        return tuple(s if axis in batch else "R" for axis, s in zip(self.axes, joined, strict=True))

    def _computed(self, node: fx.Node) -> Value:
        weight = None
        if len(node.all_input_nodes) == 1 and (
            node.target in VIEWS or node.target in _WEIGHT_COPIES
        ):
            weight = self.values[node.all_input_nodes[0]].weight
        return Value(digest(node, self._digest), self._join(node), weight=weight)

    def by_digest(self, name: str) -> fx.Node | None:
        """The first node that holds a computed value."""
        return self._by_digest.get(name)

    def pack_of(self, node: fx.Node) -> Any:
        """The elements of a value: of a computed one, down to the operators that do more than move elements."""
        value = self.values[node]
        if value.pack is not None:
            return value.pack
        if value.parts is not None:
            return value.parts
        assert value.digest is not None
        return self._pack_of_digest(value.digest)

    def _pack_of_digest(self, name: str) -> Any:
        if name not in self._packs:
            node = self._by_digest[name]
            moved = self._moved(node)
            if moved is None:
                shape = static_shape(node)
                if shape is None:
                    raise ValueError(f"{node.name} has no fixed shape")
                moved = whole(Term(name), shape)
            self._packs[name] = moved
        return self._packs[name]

    def _moved(self, node: fx.Node) -> Any:
        if node.target not in MOVES or any(static_shape(n) is None for n in _tensors(node)):
            return None
        try:
            return move(node, self.pack_of)
        except (ValueError, TypeError, IndexError):
            return None

    # -------------------------------------------------------------- packed values

    def _packed(self, node: fx.Node) -> Value:
        if node.target not in MOVES:
            raise self._not_a_weight(node)
        try:
            result = move(node, self.pack_of)
        except (ValueError, TypeError, IndexError) as cause:
            raise error(
                f"{node.name}: packing does not add up: {cause}",
                node=node,
                cause="a split, reshape or slice around a collective has wrong sizes",
            ) from cause
        if not isinstance(result, Pack):
            return Value(None, self._join(node), parts=tuple(result))
        return self._settle(node, result, self._join(node))

    def _settle(self, node: fx.Node, pack: Pack, state: tuple[str, ...]) -> Value:
        """A packed value, or the parameter that it now is."""
        packed = Value(None, state, pack)
        sources = pack.sources()
        if not sources:
            empty = self._empty.get((pack.shape, node.meta["val"].dtype))
            return packed if empty is None else self._parameter(empty, pack)
        bottom = bottom_of(next(iter(sources)))
        if not isinstance(bottom, ShardAt | Whole):
            return packed
        plan = self.program.params[bottom.fqn]
        if pack.shape != plan.local_shape:
            return packed
        try:
            chain = match(pack, self._full_parameter(plan))
        except Mismatch:
            return packed
        used = self._used_dtype(plan)
        dtypes = [plan.dtype, *(c.dtype if isinstance(c, Cast) else None for c in chain)]
        if dtypes != ([plan.dtype] if used == plan.dtype else [plan.dtype, used]):
            return packed
        return self._parameter(plan, pack)

    def _parameter(self, plan: ParamPlan, pack: Pack) -> Value:
        state = self.param_state(plan, "R")
        return Value(self._param_digest(plan), state, pack, weight=plan.fqn)

    def _used_dtype(self, plan: ParamPlan) -> torch.dtype:
        return self.origin.params.get(plan.fqn, plan.dtype)

    def _param_digest(self, plan: ParamPlan) -> str:
        if 0 in plan.local_shape:
            return empty_digest(plan.local_shape, self._used_dtype(plan))
        return input_digest(ParamInput(plan.fqn))

    def _full_parameter(self, plan: ParamPlan) -> Pack:
        if plan.fqn not in self._full:
            cut = plan.shard_size > 1
            self._full[plan.fqn] = (
                full_parameter(plan) if cut else whole(Whole(plan.fqn), plan.local_shape)
            )
        return self._full[plan.fqn]

    def _not_a_weight(self, node: fx.Node) -> Exception:
        source = next(n for n in node.all_input_nodes if self.values[n].packed)
        value = self.values[source]
        held = value.pack.sources() if value.pack is not None else {}
        names = list(dict.fromkeys(map(self.owner, held)))
        if any(isinstance(bottom_of(s), Term | Scattered) for s in held):
            return error(
                f"{node.name} computes with a gradient that was reduced before all terms were added up",
                node=node,
                found=f"{some(names) or source.name}, state {self.state_text(value.state)}",
                expected=f"state V: reductions come last, after {node.name}",
                cause="a pass reduced one use of a shared parameter, not the sum over its uses",
            )
        axis = next((a for a, s in zip(self.axes, value.state, strict=True) if s == "S"), None)
        return error(
            f"{some(names) or source.name}: {node.name} computes with a value that is no whole parameter"
            + (f", on mesh dim {axis!r}" if axis else ""),
            node=node,
            found=f"{some(names)} as {list(value.pack.shape) if value.pack is not None else 'parts'}, "
            f"state {self.state_text(value.state)}",
            expected="the gathered parameter: every row once, in order, no padding, in the dtype of its use",
            cause="its all-gather or the removal of padding is missing, or a bucket is taken apart at the wrong place",
        )

    def owner(self, source: Any) -> str:
        """Whose bytes a source is: a parameter, or the gradient of one."""
        bottom = bottom_of(source)
        for role, known in self.origin.outputs.items():
            if isinstance(role, ParamGrad) and known is not None:
                node = self.by_digest(known)
                if known == getattr(bottom, "digest", None) or (
                    node is not None and bottom in self.pack_of(node).sources()
                ):
                    return f"the gradient of {role.fqn}"
        return source_name(bottom)

    def state_text(self, state: Sequence[str]) -> str:
        """``dp_replicate:R dp_shard:V``."""
        return " ".join(f"{a}:{s}" for a, s in zip(self.axes, state, strict=True)) or "(one rank)"

    # -------------------------------------------------------------- collectives

    def _wait(self, node: fx.Node) -> Value:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        value = self.values[source]
        if value.pending is not source or source in self._waits:
            again = source in self._waits
            raise error(
                f"{node.name}: waits {'a second time ' if again else ''}for {source.name}"
                + ("" if again else ", which is no collective"),
                node=node,
                expected="one wait_tensor for every collective",
            )
        self._waits[source] = node
        done = replace(value, pending=None)
        if value.digest is not None:
            return replace(done, digest=digest(node, self._digest))
        assert value.pack is not None
        return self._settle(node, value.pack, value.state)

    def _collective(self, node: fx.Node) -> Value:
        comm = node.meta.get("comm")
        if not isinstance(comm, Comm):
            raise error(
                f"{node.name}: the collective says nothing about what it is for",
                node=node,
                expected="node.meta['comm'] is a Comm",
                cause="a pass made it without metadata, or dropped it",
            )
        group = group_of(node, comm, self.program)
        source: Any = node.args[0]
        value = self.values[source]
        if not comm.params:  # of the model's own computation
            if value.packed:
                raise self._not_a_weight(node)
            state = self._opaque_state(value.state, group)
            return Value(digest(node, self._digest), state, pending=node)
        pack = self._input_pack(node, source)
        if node.target is GATHER:
            self.carried[node] = tuple(
                dict.fromkeys(f for s in pack.sources() if (f := shard_fqn(s)) is not None)
            )
            pack = gather(node, pack, group, self)
            state = self._after(value.state, group, "R")
        elif node.target is SCATTER:
            pack = scatter(node, pack, group, self)
            state = self._after(value.state, group, "S")
        elif node.target is REDUCE:
            pack = reduce(node, pack, group, self)
            state = self._after(value.state, group, "R")
        else:
            raise error(f"{node.name}: no {comm.purpose} is done by {comm.kind}", node=node)
        return Value(None, state, pack, pending=node)

    def _input_pack(self, node: fx.Node, source: fx.Node) -> Pack:
        try:
            pack = self.pack_of(source)
        except ValueError as cause:
            raise error(f"{node.name}: {cause}", node=node) from cause
        if not isinstance(pack, Pack):
            raise error(f"{node.name}: communicates a list", node=node)
        return pack

    def _after(self, state: Sequence[str], group: Group, new: str) -> tuple[str, ...]:
        inner_only = group.inner > 0
        return tuple(
            new if axis in group.axes and not (inner_only and new == "S") else old
            for axis, old in zip(self.axes, state, strict=True)
        )

    def _opaque_state(self, state: Sequence[str], group: Group) -> tuple[str, ...]:
        """State after a collective of the model's own computation (tp, ep, cp).

        Which ones there are is proved before capture and bound by the digests. Equal values may be terms of a sum, so a sum
        of R is not refused here.
        """
        new = {"all_gather": "R", "all_reduce": "R", "reduce_scatter": "S"}.get(group.kind, "V")
        return self._after(state, group, new)

    def _own_part(self, node: fx.Node) -> Value:
        """R → S: what this rank takes of a value that all ranks of a tensor-parallel group hold."""
        parsed = parse_group(node.args[-1], self.program)
        if parsed is None or parsed[1]:
            raise error(
                f"{node.name}: takes its part by a group that is no union of dims of this mesh",
                node=node,
                found=repr(node.args[-1]),
                expected=f"the alias of dims of ({self.program.layout.describe()})",
            )
        value = self._computed(node)
        state = tuple(
            "S" if axis in parsed[0] and old == "R" else old
            for axis, old in zip(self.axes, value.state, strict=True)
        )
        return replace(value, state=state)

    def _shard_slice(self, node: fx.Node) -> Value:
        source: Any = node.args[0]
        pack = slice_of(node, self._input_pack(node, source), self)
        state = tuple(
            "S" if axis in self._shard_axes(pack) else old
            for axis, old in zip(self.axes, self.values[source].state, strict=True)
        )
        return Value(None, state, pack)

    def _shard_axes(self, pack: Pack) -> tuple[str, ...]:
        axes: dict[str, None] = {}
        for source in pack.sources():
            if isinstance(source, Slice):
                for inner in source.whole.sources():
                    fqn = shard_fqn(inner)
                    if fqn is not None:
                        axes.update(dict.fromkeys(self.program.params[fqn].shard_axes))
        return tuple(axes)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
