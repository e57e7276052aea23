"""Systematic damage to correct programs: each kind finds its sites in a program, and damages a copy at one of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.base import (
    COLLECTIVES,
    GATHER,
    REDUCE,
    SCATTER,
    WAIT,
    Comm,
    ParamGrad,
    ParamInput,
    SavedInput,
    SavedOutput,
    UserOutput,
    aten,
    convert,
    emit,
    info,
    inputs,
    output_node,
    outputs,
    set_outputs,
)
from tests.program_cases import Graphs

SHARD_SLICE = torch.ops.hyper_parallel.shard_slice.default
TAKE_CHUNK = torch.ops.hyper_parallel.take_chunk.default
LOCAL_IDS = torch.ops.hyper_parallel.local_ids.default
REDUCTIONS = ("reduce_grad", "replicate_grad")


@dataclass(frozen=True)
class Mutant:
    """One damaged pair of programs.

    Attributes:
        kind: Kind of the damage.
        where: Half and node.
        graphs: The programs.
        refused: What the proof of the tensor-parallel pass says, before there are programs.
    """

    kind: str
    where: str
    graphs: Graphs
    refused: str = ""


Sites = Callable[[fx.GraphModule], Iterator[Any]]
Damage = Callable[[fx.GraphModule, Any], None]


def mutants(graphs: Mapping[str, fx.GraphModule], kind: str) -> Iterator[Callable[[], Mutant]]:
    """Every mutant of a kind, made when called."""
    sites, damage = KINDS[kind]
    for half in ("forward", "backward"):
        for site in sites(graphs[half]):
            yield lambda half=half, site=site: _make(graphs, kind, half, site, damage)


def _make(
    graphs: Mapping[str, fx.GraphModule], kind: str, half: str, site: Any, damage: Damage
) -> Mutant:
    gm = clone(graphs[half])
    names = {n.name: n for n in gm.graph.nodes}
    mapped = fx.node.map_aggregate(site, lambda v: names[v.name] if isinstance(v, fx.Node) else v)
    damage(gm, mapped)
    return Mutant(kind, f"{half} {_text(site)}", {**graphs, half: gm})


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that shares example values and facts, which damage never changes in place."""
    graph = fx.Graph()
    end = graph.output(graph.graph_copy(gm.graph, {}))
    end.meta = dict(output_node(gm).meta)
    result = fx.GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    return result


def _text(site: Any) -> str:
    return " ".join(str(s) for s in site) if isinstance(site, tuple) else str(site)


# ------------------------------------------------------------------ sites


def _all(gm: fx.GraphModule, *targets: Any, purposes: tuple[str, ...] = ()) -> Iterator[fx.Node]:
    for node in gm.graph.nodes:
        comm = node.meta.get("comm")
        if node.target in targets and (not purposes or (comm and comm.purpose in purposes)):
            yield node


def _waits(gm: fx.GraphModule) -> Iterator[fx.Node]:
    yield from _all(gm, WAIT)


def _wait_of(node: fx.Node) -> fx.Node:
    return next(u for u in node.users if u.target is WAIT)


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return x.shape == y.shape and x.dtype == y.dtype


def _after(gm: fx.GraphModule, node: fx.Node, make: Callable[..., fx.Node]) -> None:
    """Puts what ``make(add)`` builds from ``node`` in the place of ``node`` for all its users."""
    users = list(node.users)
    anchor = node.next
    while anchor.op == "placeholder" or anchor.target is operator.getitem:
        anchor = anchor.next
    with gm.graph.inserting_before(anchor):
        new = make(lambda target, *args, **kw: emit(gm.graph, target, *args, **kw))
    for user in users:
        user.replace_input_with(node, new)


def _drop(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


# ------------------------------------------------------------------ reductions


def _drop_all_reduce(gm: fx.GraphModule, node: fx.Node) -> None:
    wait = _wait_of(node)
    wait.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(wait)
    gm.graph.erase_node(node)


def _scatter_to_slice(gm: fx.GraphModule, node: fx.Node) -> None:
    """Keep this rank's part of the own gradient (chunk 0 on all ranks, or by rank): nothing is summed."""
    wait, rows = _wait_of(node), _value(node).shape[0]
    with gm.graph.inserting_before(wait):
        part = emit(gm.graph, aten.slice.Tensor, node.args[0], 0, 0, rows)
    wait.replace_all_uses_with(part)
    gm.graph.erase_node(wait)
    gm.graph.erase_node(node)


def _scatter_to_own_slice(gm: fx.GraphModule, node: fx.Node) -> None:
    wait = _wait_of(node)
    with gm.graph.inserting_before(wait):
        part = emit(gm.graph, SHARD_SLICE, node.args[0], node.args[2], node.args[3])
    wait.replace_all_uses_with(part)
    gm.graph.erase_node(wait)
    gm.graph.erase_node(node)


def _double(gm: fx.GraphModule, node: fx.Node) -> None:
    comm = replace(node.meta["comm"], kind="all_reduce")
    group = node.args[-1]
    _after(
        gm,
        _wait_of(node),
        lambda add: add(WAIT, add(REDUCE, _wait_of(node), "sum", group, comm=comm)),
    )


def _other_axes(gm: fx.GraphModule, node: fx.Node) -> tuple[str, ...] | None:
    """Other mesh dims of the same number of ranks."""
    layout, axes = info(gm).layout, node.meta["comm"].axes
    for name in layout.dim_names:
        if (name,) != axes and layout.size(name) == layout.size(axes):
            return (name,)
    return None


def _collectives_with_other_axes(gm: fx.GraphModule) -> Iterator[Any]:
    for node in _all(gm, *COLLECTIVES):
        axes = _other_axes(gm, node)
        if axes and not node.meta["comm"].inner:
            yield (node, axes)


def _wrong_group(gm: fx.GraphModule, site: Any, relabel: bool = False) -> None:
    node, axes = site
    node.args = (*node.args[:-1], info(gm).layout.group_name(axes))
    if relabel:
        node.meta["comm"] = replace(node.meta["comm"], axes=tuple(axes))


def _wrong_axis(gm: fx.GraphModule, site: Any) -> None:
    _wrong_group(gm, site, relabel=True)


def _extra_axis(gm: fx.GraphModule, site: Any) -> None:
    """Reduce over one more mesh dim after a reduction."""
    node, axes = site
    comm = replace(node.meta["comm"], kind="all_reduce", axes=tuple(axes), purpose="replicate_grad")
    group = info(gm).layout.group_name(axes)
    wait = _wait_of(node)
    _after(gm, wait, lambda add: add(WAIT, add(REDUCE, wait, "sum", group, comm=comm)))


def _reductions_and_axes(gm: fx.GraphModule) -> Iterator[Any]:
    layout = info(gm).layout
    for node in _all(gm, SCATTER, REDUCE, purposes=REDUCTIONS):
        for axis in layout.dim_names:
            if layout.size(axis) > 1:
                yield (node, (axis,))


def _op_to(op: str) -> Damage:
    def damage(gm: fx.GraphModule, node: fx.Node) -> None:
        node.args = (node.args[0], op, *node.args[2:])

    return damage


def _roll_chunks(gm: fx.GraphModule, node: fx.Node) -> None:
    """Every rank gets the next rank's part."""
    source: Any = node.args[0]
    rows = _value(source).shape[0] // node.args[2]  # type: ignore[operator]
    with gm.graph.inserting_before(node):
        head = emit(gm.graph, aten.slice.Tensor, source, 0, 0, rows)
        tail = emit(gm.graph, aten.slice.Tensor, source, 0, rows, _value(source).shape[0])
        node.args = (emit(gm.graph, aten.cat.default, [tail, head]), *node.args[1:])


def _reduce_in(dtype: torch.dtype) -> Damage:
    def damage(gm: fx.GraphModule, node: fx.Node) -> None:
        source: Any = node.args[0]
        old = _value(source).dtype
        wait = _wait_of(node)
        with gm.graph.inserting_before(node):
            node.args = (emit(gm.graph, convert, source, dtype), *node.args[1:])
        node.meta["val"], wait.meta["val"] = _value(node).to(dtype), _value(wait).to(dtype)
        _after(gm, wait, lambda add: add(convert, wait, old))

    return damage


def _early_reduction(gm: fx.GraphModule, site: Any) -> None:
    """One term of a sum is all-reduced before the terms are added, and then again with the sum."""
    node, index, axes = site
    term = node.args[index]
    comm = Comm("all_reduce", tuple(axes), "replicate_grad", ("early",))
    with gm.graph.inserting_before(node):
        group = info(gm).layout.group_name(axes)
        early = emit(gm.graph, REDUCE, term, "sum", group, comm=comm)
        ready = emit(gm.graph, WAIT, early)
    args = list(node.args)
    args[index] = ready
    node.args = tuple(args)


def _sums(gm: fx.GraphModule) -> Iterator[Any]:
    axes = tuple(a for a in info(gm).layout.dim_names if info(gm).layout.size(a) > 1)[:1]
    for node in _all(gm, aten.add.Tensor):
        if info(gm).stage == "backward" and all(isinstance(a, fx.Node) for a in node.args):
            yield (node, 1, axes)


def _without_gradient(gm: fx.GraphModule) -> Iterator[Any]:
    """Parameters that the program returns no gradient for, and a mesh dim to reduce one over."""
    params, layout = info(gm).params, info(gm).layout
    axes = tuple(a for a in layout.dim_names if layout.size(a) > 1)[:1]
    have = {role.fqn for _, _, role in outputs(gm, ParamGrad)}
    if info(gm).stage == "backward" and axes:
        yield from ((fqn, axes) for fqn in params if fqn not in have)


def _reduce_frozen(gm: fx.GraphModule, site: Any) -> None:
    fqn, axes = site
    plan, end = info(gm).params[fqn], output_node(gm)
    example = next(n for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    comm = Comm("all_reduce", tuple(axes), "replicate_grad", (fqn,))
    with gm.graph.inserting_before(end):
        fresh = emit(
            gm.graph,
            aten.new_ones.default,
            example,
            list(plan.padded_shard_shape),
            dtype=plan.dtype,
        )
        group = info(gm).layout.group_name(axes)
        reduced = emit(gm.graph, WAIT, emit(gm.graph, REDUCE, fresh, "sum", group, comm=comm))
    _add_output(gm, reduced, ParamGrad(fqn))


# ------------------------------------------------------------------ scales and casts


def _grad_scales(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Divisions that reductions lead to, or that lead to one."""
    for node in _all(gm, aten.div.Tensor, aten.mul.Tensor):
        if isinstance(node.args[1], float) and not node.meta.get("nn_module_stack"):
            yield node


def _double_scale(gm: fx.GraphModule, node: fx.Node) -> None:
    _after(gm, node, lambda add: add(node.target, node, node.args[1]))


def _scale_to(factor: Callable[[fx.GraphModule, float], float]) -> Damage:
    def damage(gm: fx.GraphModule, node: fx.Node) -> None:
        node.args = (node.args[0], factor(gm, float(node.args[1])))  # type: ignore[arg-type]

    return damage


def _first_dim(gm: fx.GraphModule, value: float) -> float:
    size = float(info(gm).layout.shape[0])
    return size if size != value else value + 1


def _extra_scale(gm: fx.GraphModule, node: fx.Node) -> None:
    wait = _wait_of(node)
    _after(gm, wait, lambda add: add(aten.div.Tensor, wait, 2.0))


def _own_casts(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Casts of gradients, made by a pass."""
    if info(gm).stage == "backward":
        for node in _all(gm, convert):
            if not node.meta.get("nn_module_stack") and node.meta.get("seq_nr") is None:
                yield node


def _detour(gm: fx.GraphModule, node: fx.Node) -> None:
    """Through bfloat16 and back."""
    dtype = _value(node).dtype
    _after(gm, node, lambda add: add(convert, add(convert, node, torch.bfloat16), dtype))


# ------------------------------------------------------------------ gathers and waits


def _gather_to_copies(gm: fx.GraphModule, node: fx.Node) -> None:
    """The own shard in the place of everybody's."""
    wait = _wait_of(node)
    with gm.graph.inserting_before(wait):
        own = emit(gm.graph, aten.cat.default, [node.args[0]] * int(node.args[1]))  # type: ignore[arg-type]
    wait.replace_all_uses_with(own)
    gm.graph.erase_node(wait)
    gm.graph.erase_node(node)


def _gather_rolled(gm: fx.GraphModule, node: fx.Node) -> None:
    """The shards of the group in another order."""
    wait = _wait_of(node)
    rows, every = _value(node.args[0]).shape[0], _value(wait).shape[0]  # type: ignore[arg-type]

    def rolled(add: Callable[..., fx.Node]) -> fx.Node:
        head = add(aten.slice.Tensor, wait, 0, 0, rows)
        return add(aten.cat.default, [add(aten.slice.Tensor, wait, 0, rows, every), head])

    _after(gm, wait, rolled)


def _slice_is_first(gm: fx.GraphModule, node: fx.Node) -> None:
    rows = _value(node).shape[0]
    with gm.graph.inserting_before(node):
        first = emit(gm.graph, aten.slice.Tensor, node.args[0], 0, 0, rows)
    node.replace_all_uses_with(first)
    gm.graph.erase_node(node)


def _inner_gathers(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (n for n in _all(gm, GATHER) if n.meta["comm"].inner)


def _wait_dropped(gm: fx.GraphModule, wait: fx.Node) -> None:
    _drop(wait)


def _wait_on_input(gm: fx.GraphModule, wait: fx.Node) -> None:
    """The wait is for the input of the collective, whose result nobody reads."""
    collective: Any = wait.args[0]
    if _alike(collective, collective.args[0]):
        wait.args = (collective.args[0],)
    else:
        _drop(wait)


def _gather_in_storage_dtype(gm: fx.GraphModule, node: fx.Node) -> None:
    wait, source = _wait_of(node), node.args[0]
    assert isinstance(source, fx.Node)
    dtype = _value(source).dtype
    wider = torch.float32 if dtype != torch.float32 else torch.float64
    with gm.graph.inserting_before(node):
        node.args = (emit(gm.graph, convert, source, wider), *node.args[1:])
    node.meta["val"], wait.meta["val"] = _value(node).to(wider), _value(wait).to(wider)
    _after(gm, wait, lambda add: add(convert, wait, dtype))


# ------------------------------------------------------------------ tensor parallelism


def _unpacked_parts(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Calls that take this rank's part of a dim in one block."""
    yield from (n for n in _all(gm, TAKE_CHUNK) if n.args[2] == 1)


def _first_part(gm: fx.GraphModule, node: fx.Node) -> None:
    source, dim = node.args[:2]
    rows = _value(node).shape[dim]  # type: ignore[index]
    with gm.graph.inserting_before(node):
        first = emit(gm.graph, aten.slice.Tensor, source, dim, 0, rows)
    node.replace_all_uses_with(first)
    gm.graph.erase_node(node)


def _next_part(gm: fx.GraphModule, node: fx.Node) -> None:
    """Every rank takes its neighbour's part."""
    source, dim = node.args[:2]
    rows = _value(node).shape[dim]  # type: ignore[index]
    whole = _value(source).shape[dim]  # type: ignore[arg-type, index]
    with gm.graph.inserting_before(node):
        head = emit(gm.graph, aten.slice.Tensor, source, dim, 0, rows)
        tail = emit(gm.graph, aten.slice.Tensor, source, dim, rows, whole)
        node.args = (emit(gm.graph, aten.cat.default, [tail, head], dim), *node.args[1:])


def _ids_moved(gm: fx.GraphModule, node: fx.Node) -> None:
    ids, rows, group = node.args
    node.args = (ids, rows + 1, group)  # type: ignore[operator]


# ------------------------------------------------------------------ packing


def _slices(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Slices that a pass made to cut padding off."""
    for node in _all(gm, aten.slice.Tensor):
        if not node.meta.get("nn_module_stack") and len(node.args) == 4:
            source: Any = node.args[0]
            if _value(source).shape[node.args[1]] > node.args[3]:
                yield node


def _padding_kept(gm: fx.GraphModule, node: fx.Node) -> None:
    source, dim, start, stop = node.args
    node.args = (source, dim, start + 1, stop + 1)  # type: ignore[operator]


def _pads(gm: fx.GraphModule) -> Iterator[fx.Node]:
    yield from _all(gm, aten.constant_pad_nd.default)


def _padding_in_front(gm: fx.GraphModule, node: fx.Node) -> None:
    pads: Any = node.args[1]
    node.args = (node.args[0], [p for i in range(0, len(pads), 2) for p in (pads[i + 1], pads[i])])


def _siblings(gm: fx.GraphModule) -> Iterator[Any]:
    """Pieces of one bucket that have the same size."""
    for split in _all(gm, aten.split_with_sizes.default, aten.split.Tensor):
        items = [u for u in split.users if u.target is operator.getitem]
        for a, b in itertools.pairwise(items):
            if _alike(a, b):
                yield (a, b)


def _swap_pieces(gm: fx.GraphModule, site: Any) -> None:
    a, b = site
    a.args, b.args = (a.args[0], b.args[1]), (b.args[0], a.args[1])


def _neighbours(gm: fx.GraphModule) -> Iterator[Any]:
    """Two inputs of one bucket of the same shape."""
    for cat in _all(gm, aten.cat.default):
        parts: Any = cat.args[0]
        for i in range(len(parts) - 1):
            if _alike(parts[i], parts[i + 1]) and parts[i] is not parts[i + 1]:
                yield (cat, i)


def _swap_inputs(gm: fx.GraphModule, site: Any) -> None:
    cat, i = site
    parts = list(cat.args[0])
    parts[i], parts[i + 1] = parts[i + 1], parts[i]
    cat.args = (parts, *cat.args[1:])


def _splits(gm: fx.GraphModule) -> Iterator[Any]:
    for split in _all(gm, aten.split_with_sizes.default):
        sizes: Any = split.args[1]
        used = [u.args[1] for u in split.users if u.target is operator.getitem]
        for i in range(len(sizes) - 2):
            if sizes[i] != sizes[i + 1] and i + 1 in used and sizes[i] == sizes[i + 2]:
                yield (split, i)


def _rotate_sizes(gm: fx.GraphModule, site: Any) -> None:
    """Pieces keep their sizes but start at other places: a split through the middle of a parameter."""
    split, _ = site
    items = sorted(
        (u for u in split.users if u.target is operator.getitem), key=lambda n: n.args[1]
    )
    source, sizes, *dim = split.args
    axis = dim[0] if dim else 0
    shifted = [*sizes[-1:], *sizes[:-1]]
    split.args = (source, shifted, *dim)
    order = {i: (i + 1) % len(sizes) for i in range(len(sizes))}
    for item in items:
        item.args = (split, order[item.args[1]])
    assert axis in (0, 1)


def _any_bucket(gm: fx.GraphModule) -> Iterator[Any]:
    for split in _all(gm, aten.split_with_sizes.default):
        if len(split.args[1]) > 1 and not split.meta.get("nn_module_stack"):  # type: ignore[arg-type]
            yield (split, 0)


# ------------------------------------------------------------------ edges


def _pairs_of_outputs(role_class: type) -> Sites:
    def sites(gm: fx.GraphModule) -> Iterator[Any]:
        found = [(p, n) for p, n, _ in outputs(gm, role_class) if n is not None]
        for i, (p, a) in enumerate(found):
            for q, b in found[i + 1 :]:
                if a is not b and _alike(a, b):
                    yield (p, q)
                    break

    return sites


def _swap_outputs(gm: fx.GraphModule, site: Any) -> None:
    p, q = site
    flat: Any = output_node(gm).args[0]
    a, b = flat[p], flat[q]
    set_outputs(gm, {p: b})
    set_outputs(gm, {q: a})


def _repeat_output(gm: fx.GraphModule, site: Any) -> None:
    flat: Any = output_node(gm).args[0]
    set_outputs(gm, {site[0]: flat[site[1]]})


def _gradients(gm: fx.GraphModule) -> Iterator[Any]:
    for position, node, _ in outputs(gm, ParamGrad):
        if node is not None:
            yield (position,)


def _gradient_dropped(gm: fx.GraphModule, site: Any) -> None:
    out = output_node(gm)
    flat = list(out.args[0])  # type: ignore[arg-type]
    flat[site[0]] = None
    out.args = (tuple(flat),)


def _rewires(gm: fx.GraphModule) -> Iterator[Any]:
    """Operands that could read another value of the same shape."""
    earlier: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.meta.get("nn_module_stack"):
            for i, arg in enumerate(node.args):
                if isinstance(arg, fx.Node):
                    other = next((e for e in earlier if e is not arg and _alike(e, arg)), None)
                    if other is not None:
                        yield (node, i, other)
                        break
        earlier.append(node)


def _rewire(gm: fx.GraphModule, site: Any) -> None:
    node, index, other = site
    args = list(node.args)
    args[index] = other
    node.args = tuple(args)


def _own_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Floating-point values of the model itself."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        computed = node.op == "call_function" and node.target not in COLLECTIVES
        if computed and isinstance(value, torch.Tensor) and value.is_floating_point():
            yield node


def _times_two(gm: fx.GraphModule, node: fx.Node) -> None:
    _after(gm, node, lambda add: add(aten.mul.Tensor, node, 2.0))


def _full_weights(gm: fx.GraphModule) -> Iterator[Any]:
    """Gathered parameters that forward may not save; the last node of a chain that feeds the model."""
    program = info(gm)
    if program.stage == "forward" and program.facts.get("gathered"):
        for node in gm.graph.nodes:
            shape = tuple(getattr(node.meta.get("val"), "shape", ()))
            if node.target in (aten.slice.Tensor, aten.reshape.default, WAIT):
                held = [f for f in _gathered_with(node) if program.params[f].local_shape == shape]
                freed = bool(held) and all(_reshards(program, fqn) for fqn in held)
                if freed and any(u.meta.get("nn_module_stack") for u in node.users):
                    yield node


def _gathered_with(node: fx.Node) -> tuple[str, ...]:
    """The parameters of the gather that a value is taken from; none for a value of another kind."""
    while node.all_input_nodes and node.target is not GATHER:
        node = node.all_input_nodes[0]
    return node.meta["comm"].params if node.target is GATHER else ()


def _reshards(program: Any, fqn: str) -> bool:
    return program.facts["reshard"][program.units[fqn]] is not False


def _save_weight(gm: fx.GraphModule, node: fx.Node) -> None:
    """Forward keeps one more value; who would read it in backward does not matter."""
    number = sum(isinstance(r, SavedOutput) for r in output_node(gm).meta["roles"])
    _add_output(gm, node, SavedOutput(number))


def _add_output(gm: fx.GraphModule, node: fx.Node, role: Any) -> None:
    out = output_node(gm)
    flat: Any = out.args[0]
    out.args = ((*flat, node),)
    out.meta["roles"] = (*out.meta["roles"], role)


def _saved_inputs(gm: fx.GraphModule) -> Iterator[Any]:
    found = [n for n, _ in inputs(gm, SavedInput)]
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if _alike(a, b):
                yield (a, b)
                break


def _swap_roles(gm: fx.GraphModule, site: Any) -> None:
    a, b = site
    a.meta["role"], b.meta["role"] = b.meta["role"], a.meta["role"]


def _param_inputs(gm: fx.GraphModule) -> Iterator[Any]:
    found = [n for n, _ in inputs(gm, ParamInput)]
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if _alike(a, b):
                yield (a, b)
                break


def _of(*targets: Any, purposes: tuple[str, ...] = ()) -> Sites:
    return lambda gm: _all(gm, *targets, purposes=purposes)


KINDS: dict[str, tuple[Sites, Damage]] = {
    "all-reduce dropped": (_of(REDUCE, purposes=REDUCTIONS), _drop_all_reduce),
    "tp sum dropped": (_of(REDUCE, purposes=("tp",)), _drop_all_reduce),
    "tp sum doubled": (_of(SCATTER, REDUCE, purposes=("tp",)), _double),
    "part of rank 0 on every rank": (_unpacked_parts, _first_part),
    "part of the next rank": (_unpacked_parts, _next_part),
    "vocabulary starts at another row": (_of(LOCAL_IDS), _ids_moved),
    "reduce-scatter replaced by chunk 0": (_of(SCATTER), _scatter_to_slice),
    "reduce-scatter replaced by own slice": (_of(SCATTER), _scatter_to_own_slice),
    "reduction doubled": (_of(SCATTER, REDUCE, purposes=REDUCTIONS), _double),
    "reduced over one more dim": (_reductions_and_axes, _extra_axis),
    "wrong group, Comm untouched": (_collectives_with_other_axes, _wrong_group),
    "wrong axis, Comm agrees": (_collectives_with_other_axes, _wrong_axis),
    "sum replaced by avg": (_of(SCATTER, REDUCE), _op_to("avg")),
    "sum replaced by max": (_of(SCATTER, REDUCE), _op_to("max")),
    "scatter chunks in another order": (_of(SCATTER), _roll_chunks),
    "reduced in bfloat16": (_of(SCATTER, REDUCE), _reduce_in(torch.bfloat16)),
    "reduced in float16": (_of(SCATTER, REDUCE), _reduce_in(torch.float16)),
    "reduced before accumulation": (_sums, _early_reduction),
    "frozen parameter reduced": (_without_gradient, _reduce_frozen),
    "scale dropped": (_grad_scales, lambda gm, n: _drop(n)),
    "scale doubled": (_grad_scales, _double_scale),
    "scale of one mesh dim only": (_grad_scales, _scale_to(_first_dim)),
    "one more scale": (_of(SCATTER, REDUCE), _extra_scale),
    "gradient through bfloat16": (_own_casts, _detour),
    "gather replaced by own shard": (_of(GATHER), _gather_to_copies),
    "gathered shards in another order": (_of(GATHER), _gather_rolled),
    "gathered in another dtype": (_of(GATHER), _gather_in_storage_dtype),
    "int reshard keeps slice 0": (_of(SHARD_SLICE), _slice_is_first),
    "int reshard gather dropped": (_inner_gathers, _gather_to_copies),
    "wait dropped": (_waits, _wait_dropped),
    "wait for the input": (_waits, _wait_on_input),
    "padding kept in": (_slices, _padding_kept),
    "padding in front": (_pads, _padding_in_front),
    "pieces of a bucket swapped": (_siblings, _swap_pieces),
    "inputs of a bucket swapped": (_neighbours, _swap_inputs),
    "bucket split at wrong places": (_any_bucket, _rotate_sizes),
    "two gradients swapped": (_pairs_of_outputs(ParamGrad), _swap_outputs),
    "one gradient returned twice": (_pairs_of_outputs(ParamGrad), _repeat_output),
    "gradient not returned": (_gradients, _gradient_dropped),
    "two outputs swapped": (_pairs_of_outputs(UserOutput), _swap_outputs),
    "two saved values swapped": (_pairs_of_outputs(SavedOutput), _swap_outputs),
    "backward reads another saved value": (_saved_inputs, _swap_roles),
    "two parameters swapped": (_param_inputs, _swap_roles),
    "operand rewired": (_rewires, _rewire),
    "value doubled": (_own_nodes, _times_two),
    "full weight saved": (_full_weights, _save_weight),
}
#: Kinds whose harm is memory, not numbers: every mutant has to be rejected.
MEMORY_KINDS = frozenset({"full weight saved"})
