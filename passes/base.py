"""What every pass shares: the roles of inputs and outputs, collective metadata, and node emission.

A program is a plain :class:`torch.fx.GraphModule`. What capture knew about it is carried along and never guessed
again:

* ``gm.meta["program"]`` is a :class:`ProgramInfo`: mesh layout, parameter plans, units, options, stage.
* every placeholder has ``node.meta["role"]``, one of the ``*Input`` classes below;
* the output node has ``node.meta["roles"]``, one ``*Output`` (or gradient) role for each flat output;
* every node of a collective has ``node.meta["comm"]``, a :class:`Comm`.

Process groups appear in a program as the aliases of :meth:`MeshLayout.group_name`, the same text on every rank.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import fx

from hyper_parallel.errors import VerificationError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan

# ------------------------------------------------------------------ roles of inputs and outputs


@dataclass(frozen=True)
class ParamInput:
    """A parameter: full before ``unshard``, this rank's padded shard after it."""

    fqn: str


@dataclass(frozen=True)
class BufferInput:
    """A buffer of the module (running statistics, rotary tables, counters)."""

    fqn: str


@dataclass(frozen=True)
class UserInput:
    """The ``index``-th flat input that the caller passes."""

    index: int


@dataclass(frozen=True)
class TangentInput:
    """The gradient of the loss with respect to one forward output."""

    of: UserOutput | BufferUpdate


@dataclass(frozen=True)
class SavedInput:
    """A value that the forward program saved; ``index`` counts the saved values."""

    index: int


@dataclass(frozen=True)
class GradInput:
    """An unsharded (``partial=False``) or partly reduced gradient that enters a reduction program."""

    fqn: str
    partial: bool = False


@dataclass(frozen=True)
class UserOutput:
    """The ``index``-th flat output of the user's forward."""

    index: int


@dataclass(frozen=True)
class BufferUpdate:
    """The new value of a buffer that forward changed in place."""

    fqn: str


@dataclass(frozen=True)
class InputUpdate:
    """The new value of a user input that forward changed in place."""

    index: int


@dataclass(frozen=True)
class ParamGrad:
    """The gradient of one parameter."""

    fqn: str


@dataclass(frozen=True)
class InputGrad:
    """The gradient of one user input."""

    index: int


@dataclass(frozen=True)
class SavedOutput:
    """A value saved for the backward program."""

    index: int


@dataclass(frozen=True)
class NoGrad:
    """A gradient slot that nobody asked for (always ``None``)."""


InputRole = ParamInput | BufferInput | UserInput | TangentInput | SavedInput | GradInput
OutputRole = UserOutput | BufferUpdate | InputUpdate | ParamGrad | InputGrad | SavedOutput | NoGrad

# ------------------------------------------------------------------ collectives


@dataclass(frozen=True)
class Comm:
    """What a collective node is for; every pass that touches collectives reads and writes this only.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        axes: mesh dims over which it communicates, in mesh order.
        purpose: ``unshard``, ``reduce_grad``, ``replicate_grad``, ``tp``, ``ep`` or ``cp``.
        params: FQNs of the parameters whose bytes it carries, in registration order.
        unit: the unit the parameters belong to; the module that computes, for a collective without parameters.
        inner: for ``reshard_after_forward=int``, the size of the inner group that an ``unshard`` runs over (0: all).
        numels: elements that each parameter contributes to this rank's input (bucketed: in order of ``params``).
        padding: elements of this rank's share of the buffer that are padding.
    """

    kind: str
    axes: tuple[str, ...]
    purpose: str
    params: tuple[str, ...] = ()
    unit: str = ""
    inner: int = 0


@dataclass(frozen=True)
class ProgramInfo:
    """Facts about a program that passes need and must not guess.

    Attributes:
        layout: the mesh as a value, seen from this rank.
        params: ``ParamPlan`` of every parameter, by FQN, in registration order.
        units: unit name of every parameter FQN.
        unit_order: unit names in registration order.
        stage: how far the program has come (see ``passes.contract``).
        done: names of the passes applied, in order.
        compute_dtypes: dtype in which each parameter is used (``param_dtype``); storage is ``ParamPlan.dtype``.
    """

    layout: MeshLayout
    params: Mapping[str, ParamPlan]
    units: Mapping[str, str] = field(default_factory=dict)
    unit_order: tuple[str, ...] = ()
    stage: str = "captured"
    done: tuple[str, ...] = ()
    compute_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def mark(self, name: str, *, stage: str | None = None, **facts: Any) -> ProgramInfo:
        """Returns a copy with pass ``name`` recorded, and the facts it established."""
        return replace(
            self,
            done=(*self.done, name),
            stage=stage or self.stage,
            facts={**self.facts, **facts},
        )

    def with_facts(self, **facts: Any) -> ProgramInfo:
        """Returns a copy that knows further facts."""
        return replace(self, facts={**self.facts, **facts})


class Other:
    """A reference from one program to another one that a copy of the program shares.

    Args:
        program: the other program.
    """

    def __init__(self, program: fx.GraphModule) -> None:
        self.program = program

    def __deepcopy__(self, memo: dict[int, Any]) -> Other:
        return self


def info(gm: fx.GraphModule) -> ProgramInfo:
    """The :class:`ProgramInfo` of a program."""
    program = gm.meta.get("program")
    if not isinstance(program, ProgramInfo):
        raise VerificationError(
            "this graph carries no ProgramInfo (gm.meta['program']): it was not made by hp_compile's capture, "
            "or a transform dropped the metadata; pass programs from Plan.graphs"
        )
    return program


def set_info(gm: fx.GraphModule, program: ProgramInfo) -> fx.GraphModule:
    """Stores ``program`` on the graph module and returns the module."""
    gm.meta["program"] = program
    return gm


_Role = TypeVar("_Role")


def inputs(gm: fx.GraphModule, kind: type[_Role] | None = None) -> Iterator[tuple[fx.Node, _Role]]:
    """Placeholders with their roles, in calling order; only those of class ``kind`` when given."""
    for node in gm.graph.find_nodes(op="placeholder"):
        role = node.meta.get("role")
        if kind is None or isinstance(role, kind):
            yield node, role


def output_node(gm: fx.GraphModule) -> fx.Node:
    """The output node of a program."""
    return next(iter(reversed(gm.graph.nodes)))


def outputs(
    gm: fx.GraphModule, kind: type[_Role] | None = None
) -> Iterator[tuple[int, fx.Node | None, _Role]]:
    """``(position, node or None, role)`` of the flat outputs; only roles of class ``kind`` when given."""
    out = output_node(gm)
    for position, (node, role) in enumerate(
        zip(out.args[0], out.meta["roles"], strict=True)  # type: ignore[arg-type]
    ):
        if kind is None or isinstance(role, kind):
            yield position, node, role


def set_outputs(gm: fx.GraphModule, changes: Mapping[int, fx.Node]) -> None:
    """Rewires output edges by position, all at once; nothing else that uses the old values changes."""
    out = output_node(gm)
    values = list(out.args[0])  # type: ignore[arg-type]
    for position, node in changes.items():
        values[position] = node
    out.args = (tuple(values),)


def reorder(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Puts the nodes of a graph into the given order, which names each of them once."""
    previous = nodes[0]
    for node in nodes[1:]:
        if previous.next is not node:
            previous.append(node)
        previous = node


# ------------------------------------------------------------------ emitting nodes


def emit(
    graph: fx.Graph,
    target: Callable[..., Any],
    *args: Any,
    comm: Comm | None = None,
    like: fx.Node | None = None,
    meta: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Adds a call at the graph's insertion point and computes its ``meta["val"]`` from its arguments.

    Args:
        graph: graph to add to; use ``graph.inserting_before`` / ``inserting_after`` around it.
        target: operator overload.
        *args: arguments; nodes stand for their values.
        comm: metadata of a collective.
        like: a node whose module stack and source location the new node inherits.
        meta: further metadata.
        **kwargs: keyword arguments of the operator.
    """
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    if like is not None:
        for key in ("nn_module_stack", "stack_trace", "partitioner_tag", "seq_nr"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
    if comm is not None:
        node.meta["comm"] = comm
    node.meta.update(meta or {})
    return node


aten = torch.ops.aten
c10d = torch.ops._c10d_functional
convert = torch.ops.prims.convert_element_type.default

GATHER = c10d.all_gather_into_tensor.default
SCATTER = c10d.reduce_scatter_tensor.default
REDUCE = c10d.all_reduce.default
ALL_TO_ALL = c10d.all_to_all_single.default
WAIT = c10d.wait_tensor.default
COLLECTIVES: Mapping[Any, str] = {
    GATHER: "all_gather",
    SCATTER: "reduce_scatter",
    REDUCE: "all_reduce",
    ALL_TO_ALL: "all_to_all",
}

#: Operators that only rename the bytes of their first argument.
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.alias.default,
        aten.detach.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.narrow.default,
        operator.getitem,
    }
)


def axes_of_group(name: object, layout: MeshLayout) -> tuple[str, ...] | None:
    """Mesh dims of a group alias; None for a text that is no alias of this mesh. A suffix ``/n`` is not looked at."""
    if not isinstance(name, str) or not name.startswith("hp:"):
        return None
    alias = name.partition("/")[0]
    axes = tuple(alias.split(":")[1].split("."))
    known = set(axes) <= set(layout.dim_names) and alias == layout.group_name(axes)
    return axes if known else None


def rename_groups(gm: fx.GraphModule, old: MeshLayout, new: MeshLayout) -> None:
    """Replaces the group aliases of one mesh by those of another with the same dims."""

    def renamed(argument: Any) -> Any:
        axes = axes_of_group(argument, old)
        if axes is None:
            return argument
        return new.group_name(axes) + str(argument)[len(old.group_name(axes)) :]

    for node in gm.graph.nodes:
        if any(isinstance(a, str) for a in node.args):
            node.args = tuple(renamed(a) if isinstance(a, str) else a for a in node.args)


def is_collective(node: fx.Node) -> bool:
    """True for the start of a functional collective (not for its wait)."""
    return node.op == "call_function" and node.target in COLLECTIVES


def collectives(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Comm]]:
    """Collectives with their metadata, in issue order."""
    for node in gm.graph.nodes:
        if is_collective(node):
            comm = node.meta.get("comm")
            if comm is None:
                raise VerificationError(
                    f"collective {node.format_node()} carries no Comm metadata: every collective of a program is put "
                    "there by a pass that says what it is for"
                )
            yield node, comm


def is_backward(node: fx.Node) -> bool:
    """True for a node of a joint program that autograd recorded for the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def finish(
    gm: fx.GraphModule, name: str, *, stage: str | None = None, **facts: Any
) -> fx.GraphModule:
    """Lints and recompiles a program at the end of pass ``name`` and records the pass."""
    gm.graph.lint()
    gm.recompile()
    return set_info(gm, info(gm).mark(name, stage=stage, **facts))


def remove_dead(gm: fx.GraphModule) -> None:
    """Removes nodes that nobody uses, collectives included.

    FX calls a wait impure, so its own dead code elimination keeps a gather that nobody reads, and would run it.
    """
    gm.graph.eliminate_dead_code(lambda node: node.is_impure() and node.target is not WAIT)


def module_path(node: fx.Node) -> str:
    """FQN of the module whose forward made this node, or whose backward it is; empty at the root or when unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    path: str = entries[-1][0] if entries else ""
    return path.removeprefix("module").removeprefix(".")  # capture calls the model "module"


def source_line(node: fx.Node) -> str:
    """Last user frame of the node's stack trace as ``file:line``, empty when unknown.

    A frame of torch's own modules counts only where there is no other.
    """
    trace = node.meta.get("stack_trace") or ""
    frames = [ln.strip() for ln in trace.splitlines() if ln.strip().startswith("File ")]
    lines = [frame for frame in frames if f"{os.sep}hp_compile{os.sep}" not in frame]
    lines = [frame for frame in lines if _TORCH not in frame] or lines
    if not lines:
        return ""
    parts = lines[-1].split('"')
    number = lines[-1].partition("line ")[2].partition(",")[0]
    return f"{parts[1]}:{number}" if len(parts) > 1 else ""


_TORCH = os.path.dirname(torch.__file__) + os.sep


def order(names: Sequence[str], program: ProgramInfo) -> list[str]:
    """FQNs in registration order."""
    position = {fqn: i for i, fqn in enumerate(program.params)}
    return sorted(names, key=position.__getitem__)


def hint(size: int | torch.SymInt) -> int:
    """A size as a plain number: the traced example's for a symbolic one."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.hint is not None else 0
    return int(size)
