"""Semi-private torch for graphs: fake twins, export, the joint trace and the partitioner.

Checked on torch 2.13.0. ``tests/test_torch_compat.py`` probes every name.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.fx.graph import _BoxedCodeGen
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import _pytree as pytree

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "bind_sizes",
    "boxed_forward",
    "checkpoint_region",
    "empty_graph_like",
    "fake_mode",
    "fake_parameter",
    "fast_tracing",
    "is_backed",
    "is_fake",
    "is_higher_order",
    "joint_trace",
    "lazy_module",
    "makes_memory",
    "mark_checkpoint_regions",
    "min_cut_partition",
    "number_of_guards",
    "plain_recurrent_layers",
    "preserve_node_meta",
    "pytree",
    "refuse_autograd_functions",
    "release_saved_tensors",
    "set_checkpoint_region",
    "sizes_fit",
    "tracing_context",
    "written_arguments",
    "written_values",
]

_SYMBOL_OPERATORS = (
    "_add",
    "_sub",
    "_mul",
    "_eq",
    "_ne",
    "_ge",
    "_gt",
    "_le",
    "_lt",
    "_sym_max",
    "_sym_min",
    "_mod",
)
_REGION = "hyper_parallel_checkpoint_region"


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode with its own shape environment."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=False)


def is_fake(value: object) -> bool:
    """True for a fake tensor."""
    return isinstance(value, FakeTensor)


def fake_like(
    mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """A fake tensor of the same shape and strides; no memory is touched."""
    with mode:
        return torch.empty_strided(
            tuple(tensor.shape), tuple(tensor.stride()), dtype=dtype, device=device
        )


def fake_parameter(
    mode: FakeTensorMode, param: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    """A fake, contiguous parameter with the shape of ``param`` (a DTensor's global shape)."""
    with mode:
        value = torch.empty(tuple(param.shape), dtype=dtype, device=device)
    return nn.Parameter(value, requires_grad=param.requires_grad)


def empty_graph_like(graph: fx.Graph) -> fx.Graph:
    """A graph without nodes that is called as ``graph`` is."""
    empty = fx.Graph()
    empty.set_codegen(graph._codegen)
    return empty


def tracing_context(mode: FakeTensorMode) -> contextlib.AbstractContextManager[Any]:
    """Makes ``mode`` the one that AOTAutograd and Inductor use."""
    return tracing(TracingContext(mode))


def joint_trace(
    module: nn.Module,
    args: Sequence[Any],
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> tuple[fx.GraphModule, Any]:
    """AOTAutograd's joint forward and backward graph (forward only when grad mode is off).

    Args:
        module: module with fake parameters.
        args: fake positional inputs.
        mode: the fake mode that owns them.
        decompositions: operator decompositions.

    Returns:
        ``(graph module, AOTAutograd's view and mutation metadata)``. The module generates its Python code when that is
        first run or read, so passes may recompile it at no cost.
    """
    # Imported here because they import Inductor, which takes seconds and sets an environment variable.
    from torch._functorch import config as functorch_config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing_context(mode))
        stack.enter_context(preserve_node_meta())
        stack.enter_context(functorch_config.patch(functionalize_rng_ops=False))
        joint = aot_export_joint_with_descriptors(
            stack, module, tuple(args), decompositions=dict(decompositions)
        )
        # Programs take flat lists. The container specs of the trace would only be copied with every graph, and copying
        # one warns.
        gm = joint.graph_module
        gm.graph.set_codegen(fx.graph.CodeGen())
        for spec in ("_in_spec", "_out_spec"):
            vars(gm).pop(spec, None)
        gm = _LazyGraphModule.from_graphmodule(gm)
        return gm, joint._aot_state.fw_metadata


def lazy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph in a module that holds what the graph names, and generates its code when it is first run or read."""
    lazy = _LazyGraphModule(gm, gm.graph)
    lazy.meta = dict(gm.meta)
    return lazy


def min_cut_partition(
    gm: fx.GraphModule, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's min-cut partitioner on a joint graph whose inputs are named ``primals_*`` and ``tangents_*``."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with _use_lazy_graph_module(True):
        halves = min_cut_rematerialization_partition(gm, None, num_fwd_outputs=num_fwd_outputs)
    forward, backward = map(lazy_module, halves)  # reordering for autograd makes an eager one
    return forward, backward


def boxed_forward(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """The graph's Python code as a function that takes its inputs in a list, which it empties.

    Every value, inputs included, is freed after its last use.

    Args:
        gm: a graph; not changed.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(gm, graph).forward


def release_saved_tensors(ctx: Any) -> None:
    """Drops autograd's own references to what a function saved, unless backward may run again (``retain_graph``)."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.maybe_clear_saved_tensors()


@contextlib.contextmanager
def fast_tracing() -> Iterator[None]:
    """Makes tracing with symbolic sizes cheaper while active; results are the same.

    Every fake tensor computes sizes, strides and contiguity from the same few expressions, so arithmetic on symbols is
    remembered. A trace also allocates many long-lived objects, which the garbage collector would visit again and again.
    """
    known: dict[Any, Any] = {}
    originals = {name: getattr(SymNode, name) for name in _SYMBOL_OPERATORS}

    def remembered(name: str, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def call(left: Any, right: Any) -> Any:
            traced = get_proxy_mode() is not None  # then the operation itself becomes a node
            if traced or not isinstance(right, SymNode):
                return original(left, right)
            env = left.shape_env
            key = (name, id(env), left._expr, left.pytype, right._expr, right.pytype)
            if key not in known:
                known[key] = env, original(left, right)  # holding env keeps its id unique
            return known[key][1]

        return call

    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    for name, original in originals.items():
        setattr(SymNode, name, remembered(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(SymNode, name, original)
        gc.set_threshold(*thresholds)


def checkpoint_region(node: fx.Node) -> int | None:
    """Number of the ``torch.utils.checkpoint`` region a node was captured in."""
    custom = node.meta.get("custom") or {}
    return custom.get(_REGION)


def set_checkpoint_region(node: fx.Node, region: int) -> None:
    """Moves a node to another ``torch.utils.checkpoint`` region."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _REGION: region}


@contextlib.contextmanager
def mark_checkpoint_regions() -> Iterator[None]:
    """While active, ``torch.utils.checkpoint.checkpoint`` runs its function once and marks the nodes.

    Non-strict export would otherwise inline the function and forget that it was checkpointed. The two internals that
    ``checkpoint`` looks up when called are replaced, so references and partials of ``checkpoint`` itself work too.
    """
    regions = iter(range(1, 1 << 29))

    def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        with annotate({_REGION: next(regions)}):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with annotate({_REGION: next(regions)}):
                return function(*args)

    originals = {
        "_checkpoint_without_reentrant_generator": without_reentrant,
        "CheckpointFunction": Reentrant,
    }
    saved = {name: getattr(checkpointing, name) for name in originals}
    try:
        for name, replacement in originals.items():
            setattr(checkpointing, name, replacement)
        yield
    finally:
        for name, value in saved.items():
            setattr(checkpointing, name, value)


@contextlib.contextmanager
def refuse_autograd_functions(refuse: Callable[[type, tuple[Any, ...]], None]) -> Iterator[None]:
    """While active, ``refuse(cls, args)`` is called before a ``torch.autograd.Function`` runs.

    ``Function.apply`` ends in ``super().apply``, which also sees a bound ``apply`` that was stored earlier.

    Args:
        refuse: raises to stop the call.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        refuse(cls, args)
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def is_higher_order(target: object) -> bool:
    """True for an operator that takes graphs as arguments (``torch.cond``, flex attention, ...)."""
    return isinstance(target, HigherOrderOperator)


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Placeholders whose memory an operator of an exported graph writes, directly or through views."""
    return (source for source in written_values(node) if source.op == "placeholder")


def written_values(node: fx.Node) -> Iterator[fx.Node]:
    """What owns the memory that an operator of an exported graph writes, directly or through views."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            values: list[fx.Node] = []
            fx.node.map_arg(given.get(argument.name), values.append)
            for value in values:
                source = _base_of(value)
                if source is not None:
                    yield source


def makes_memory(node: fx.Node) -> bool:
    """True for an operator whose results are new tensors.

    A composite operator may return its input although its schema does not say so, as dropout does in evaluation.
    """
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    composite = node.target.has_kernel_for_dispatch_key(  # type: ignore[union-attr]
        torch._C.DispatchKey.CompositeImplicitAutograd
    )
    return not composite and all(r.alias_info is None for r in schema.returns)


def _base_of(value: Any) -> fx.Node | None:
    """Follows views to the node that owns the memory."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        schema = getattr(value.target, "_schema", None)
        if schema is None:
            return value
        viewed = [
            v
            for v, a in zip(value.args, schema.arguments, strict=False)
            if a.alias_info is not None
        ]
        if not viewed:
            return value
        value = viewed[0]
    return value if isinstance(value, fx.Node) else None


def is_backed(number: Any) -> bool:
    """True for a symbolic number that depends on input sizes only, not on the values of tensors."""
    return not free_unbacked_symbols(number)


def bind_sizes(
    mode: FakeTensorMode,
    shapes: Sequence[Sequence[Any]],
    sizes: Sequence[Sequence[int]],
) -> dict[Any, int] | None:
    """Values of the size symbols for concrete sizes, or ``None`` when the sizes do not have the traced form.

    A traced dim is a number, a symbol, or an expression of symbols (``4*s0`` when forward needs a multiple of 4); symbols
    that stand in expressions only are solved for.

    Args:
        mode: the program's fake mode.
        shapes: traced shape of every input: ints and symbols.
        sizes: shape of every input of the call.
    """
    bound: dict[Any, int] = {}
    derived: list[tuple[Any, int]] = []
    for traced, concrete in zip(shapes, sizes, strict=True):
        if len(traced) != len(concrete):
            return None
        for dim, size in zip(traced, concrete, strict=True):
            expression = dim.node.expr if isinstance(dim, torch.SymInt) else dim
            if getattr(expression, "is_Symbol", False):
                if bound.setdefault(expression, size) != size:
                    return None
            elif getattr(expression, "free_symbols", None):
                derived.append((expression, size))
            elif int(expression) != size:
                return None
    for _ in range(len(derived) + 1):
        for expression, size in derived:
            unknown = [s for s in expression.free_symbols if s not in bound]
            if len(unknown) == 1:
                value = _solve(expression.xreplace(bound), unknown[0], size)
                if value is None:
                    return None
                bound[unknown[0]] = value
    return bound if all(e.xreplace(bound) == size for e, size in derived) else None


def _solve(expression: Any, symbol: Any, size: int) -> int | None:
    """The whole number that makes a linear expression equal ``size``."""
    constant = expression.xreplace({symbol: 0})
    slope = expression.xreplace({symbol: 1}) - constant
    if not (constant.is_Integer and getattr(slope, "is_Integer", False) and slope != 0):
        return None
    value, rest = divmod(size - int(constant), int(slope))
    return value if rest == 0 and expression.xreplace({symbol: value}) == size else None


def sizes_fit(
    mode: FakeTensorMode,
    shapes: Sequence[Sequence[Any]],
    sizes: Sequence[Sequence[int]],
) -> bool:
    """Whether concrete sizes satisfy the symbols, ranges and guards of a traced program.

    Args:
        mode: the program's fake mode.
        shapes: traced shape of every input: ints and symbols.
        sizes: shape of every input of the call.
    """
    bound = bind_sizes(mode, shapes, sizes)
    env = mode.shape_env
    if bound is None or env is None:
        return False
    for symbol, size in bound.items():
        allowed = env.var_to_range.get(symbol)
        if allowed is not None and not (allowed.lower <= size <= allowed.upper):
            return False
    return all(_holds(env.replace(guard.expr), bound) for guard in env.guards)


def number_of_guards(mode: FakeTensorMode) -> int:
    """How many guards tracing and code generation have put on the sizes so far."""
    return len(mode.shape_env.guards) if mode.shape_env is not None else 0


def _holds(expression: Any, bound: Mapping[Any, int]) -> bool:
    """A guard that still has symbols is about the values of tensors, which no input size decides."""
    value = expression.xreplace(dict(bound))
    return bool(value) if value in (True, False) else bool(value.free_symbols)


@contextlib.contextmanager
def plain_recurrent_layers() -> Iterator[None]:
    """While active, recurrent layers are traced as ordinary operators; oneDNN's single one has no backward in a trace."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])
