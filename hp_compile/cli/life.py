"""The life of one parameter through a step, read from the plan, the captured program and the finished programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from hp_compile.cli.text import bytes_text, shape_text, short_dtype
from hp_compile.patterns import compress
from hp_compile.plan import Collective, Plan
from hyper_parallel.explain import explain_axes
from hyper_parallel.placement import format_placement
from hyper_parallel.plan import ParamPlan
from passes import base
from passes.unshard import is_weight_view

_MOST_USES = 6


@dataclass(frozen=True)
class Life:
    """What there is to say about one parameter.

    Attributes:
        fqn: its name.
        sections: heading and lines, in the order of a step.
    """

    fqn: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]


def life(plan: Plan, fqn: str) -> Life:
    """Follows one parameter.

    Args:
        plan: the plan.
        fqn: name of a parameter of it.
    """
    p = plan.params[fqn]
    sections = [("stored", _stored(plan, p))]
    if plan.has_program:
        used = list(uses(plan, fqn))
        sections += [
            ("gather", _gathers(plan, p, used)),
            ("use", _uses(used)),
            ("gradient", _gradient(plan, p)),
            ("reduction", _reductions(plan, p)),
        ]
    sections += [("ranks", _ranks(p)), ("why", (p.reason,))]
    return Life(fqn, tuple(sections))


def _stored(plan: Plan, p: ParamPlan) -> tuple[str, ...]:
    places = ", ".join(
        f"{name} {format_placement(place)}"
        for name, place in zip(plan.layout.dim_names, p.placements, strict=True)
    )
    lines = [
        f"{_dtype(p.dtype)} {shape_text(p.shape)}, placement {places}",
        f"this rank ({plan.layout.rank}) keeps {shape_text(p.shard_shape)}"
        + (f", padded to {shape_text(p.padded_shard_shape)}" if _padded(p) else ""),
    ]
    return tuple(lines)


def _padded(p: ParamPlan) -> bool:
    return p.shard_shape != p.padded_shard_shape


def _gathers(plan: Plan, p: ParamPlan, used: list[Use]) -> tuple[str, ...]:
    lines = [
        f"{phase} #{number}: {_collective(plan, c)}"
        for number, phase, c in _carrying(plan, p.fqn)
        if c.purpose == "unshard"
    ]
    if not lines:
        return (_why_no_gather(p, used),)
    info = base.info(plan.graphs["forward"])
    unit = info.units[p.fqn]
    lines.insert(0, f"with unit {unit}, {_reshard_text(info, unit)}")
    phases = {phase for _, phase, c in _carrying(plan, p.fqn) if c.purpose == "unshard"}
    if "backward" in plan.graphs and "backward" not in phases:
        reads = any(u.phase == "backward" for u in used)
        kept = info.facts.get("reshard", {}).get(unit) is False
        why = (
            "it is kept from forward"
            if reads and kept
            else "backward does not read its value, which is freed in forward"
        )
        lines.append(f"backward: none, {why}")
    return tuple(lines)


def _why_no_gather(p: ParamPlan, used: list[Use]) -> str:
    if p.ignored:
        return "none: the policy ignores it"
    if p.shard_size == 1:
        return "none: every rank holds the whole of it"
    return "none: nothing reads it" if not used else "none"


def _reshard_text(info: base.ProgramInfo, unit: str) -> str:
    value = info.facts.get("reshard", {}).get(unit)
    if value is True:
        return "freed after forward (reshard_after_forward)"
    if value is False:
        return "not cut again after forward"
    return f"cut again over groups of {value} ranks after forward (reshard_after_forward={value})"


def _carrying(plan: Plan, fqn: str) -> Iterator[tuple[int, str, Collective]]:
    for number, c in enumerate(plan.collectives):
        if fqn in c.params:
            yield number, c.phase, c


def _collective(plan: Plan, c: Collective) -> str:
    with_ = "alone"
    if len(c.params) > 1:
        with_ = f"in a bucket of {len(c.params)} ({_some(compress(c.params))})"
    return (
        f"{c.kind} over {explain_axes(plan.layout, c.axes)} in {_dtype(c.dtype)}, this rank sends "
        f"{bytes_text(c.nbytes)}, {with_}"
    )


def _some(names: list[str], most: int = 2) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


# ------------------------------------------------------------------ who reads it


@dataclass(frozen=True)
class Use:
    """One operator of the captured program that reads a parameter.

    Attributes:
        phase: ``forward`` or ``backward``.
        operator: its name.
        module: FQN of the module in whose forward it stands.
        line: ``file:line`` of the source.
    """

    phase: str
    operator: str
    module: str
    line: str


def uses(plan: Plan, fqn: str) -> Iterator[Use]:
    """Operators that read a parameter, through its views and casts, in the captured program.

    Args:
        plan: a plan with a program.
        fqn: the parameter.
    """
    seen: set[Use] = set()
    reached = [
        node for node, role in base.inputs(plan.captured, base.ParamInput) if role.fqn == fqn
    ]
    for node in reached:
        for user in node.users:
            if user.op == "output" or user in reached:
                continue
            if is_weight_view(user):
                reached.append(user)
                continue
            use = Use(
                "backward" if base.is_backward(user) else "forward",
                str(user.target).removesuffix(".default"),
                base.module_path(user),
                _short_line(base.source_line(user)),
            )
            if use not in seen:
                seen.add(use)
                yield use


def _short_line(line: str) -> str:
    """A source line with the path from the working directory or the installed package."""
    path, colon, number = line.rpartition(":")
    if not colon:
        return line
    inside = path.partition(f"site-packages{os.sep}")[2]
    if not inside:
        relative = os.path.relpath(path)
        inside = path if relative.startswith("..") else relative
    return f"{inside}:{number}"


def _uses(used: list[Use]) -> tuple[str, ...]:
    if not used:
        return ("nothing reads it",)
    lines = [
        f"{u.phase}: {u.operator} in {u.module or 'the root module'}"
        + (f" ({u.line})" if u.line else "")
        for u in used[:_MOST_USES]
    ]
    if len(used) > _MOST_USES:
        lines.append(f"and {len(used) - _MOST_USES} more")
    return tuple(lines)


def _gradient(plan: Plan, p: ParamPlan) -> tuple[str, ...]:
    if not p.requires_grad:
        return ("none: it is frozen",)
    for _, node, role in base.outputs(plan.captured, base.ParamGrad):
        if role.fqn == p.fqn and node is not None:
            made = _maker(node)
            dtype = _dtype(node.meta["val"].dtype)
            module = base.module_path(made)
            line = _short_line(base.source_line(made))
            where = ", for " + (module or "the root module") + (f" ({line})" if line else "")
            name = str(made.target).removesuffix(".default")
            return (f"{dtype} {shape_text(p.local_shape)} from {name}{where}",)
    return ("none: no output depends on it, so .grad stays None",)


def _maker(node: fx.Node) -> fx.Node:
    """The operator that computed a value, behind views and casts."""
    while is_weight_view(node):
        node = node.all_input_nodes[0]
    return node


def _reductions(plan: Plan, p: ParamPlan) -> tuple[str, ...]:
    lines = [
        f"{phase} #{number}: {_collective(plan, c)}"
        for number, phase, c in _carrying(plan, p.fqn)
        if c.purpose != "unshard"
    ]
    if not lines:
        return ("none",)
    op = plan.policy.reduce_op
    result = f"mean over the {p.batch_ranks} ranks with different data" if op == "avg" else "sum"
    return (f"{p.reduction}: {result}, kept as {_dtype(p.dtype)}", *lines)


def _ranks(p: ParamPlan) -> tuple[str, ...]:
    lines = []
    if p.shard_size > 1:
        lines.append(f"FSDP cuts it over {_some_ranks(p.sharded_ranks)}")
    if p.dp_size > 1:
        lines.append(f"data-parallel replicas of this slice: {_some_ranks(p.unsharded_ranks)}")
    return tuple(lines) or ("no other rank takes part",)


def _some_ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 8:
        return "ranks " + ", ".join(map(str, ranks))
    shown = ", ".join(map(str, ranks[:3]))
    return f"ranks {shown}, … {ranks[-1]} ({len(ranks)})"


def _dtype(dtype: object) -> str:
    return short_dtype(str(dtype).removeprefix("torch."))


__all__ = ["Life", "Use", "life", "uses"]
