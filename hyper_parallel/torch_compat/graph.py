"""Semi-private torch for graphs: fake twins, export, the joint trace and the partitioner.

Checked on torch 2.13.0. ``tests/test_torch_compat.py`` probes every name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import _pytree as pytree

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "boxed_forward",
    "checkpoint_region",
    "fake_mode",
    "fake_parameter",
    "is_fake",
    "joint_trace",
    "mark_checkpoint_regions",
    "min_cut_partition",
    "preserve_node_meta",
    "pytree",
    "release_saved_tensors",
    "sizes_fit",
    "tracing_context",
]

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


def min_cut_partition(
    gm: fx.GraphModule, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's min-cut partitioner on a joint graph whose inputs are named ``primals_*`` and ``tangents_*``."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with _use_lazy_graph_module(True):
        return min_cut_rematerialization_partition(gm, None, num_fwd_outputs=num_fwd_outputs)


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


def checkpoint_region(node: fx.Node) -> int | None:
    """Number of the ``torch.utils.checkpoint`` region a node was captured in."""
    custom = node.meta.get("custom") or {}
    return custom.get(_REGION)


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
    env = mode.shape_env
    bound: dict[Any, int] = {}
    derived: list[tuple[Any, int]] = []
    for traced, concrete in zip(shapes, sizes, strict=True):
        if len(traced) != len(concrete):
            return False
        for dim, size in zip(traced, concrete, strict=True):
            if not isinstance(dim, torch.SymInt):
                if int(dim) != size:
                    return False
                continue
            expression = dim.node.expr
            if expression.is_Symbol:
                if bound.setdefault(expression, size) != size:
                    return False
            elif expression.is_number:
                if int(expression) != size:
                    return False
            else:
                derived.append((expression, size))
    assert env is not None
    for symbol, size in bound.items():
        allowed = env.var_to_range.get(symbol)
        if allowed is not None and not (allowed.lower <= size <= allowed.upper):
            return False
    if any(expression.xreplace(bound) != size for expression, size in derived):
        return False
    return all(_holds(guard.expr, bound) for guard in env.guards)


def _holds(expression: Any, bound: Mapping[Any, int]) -> bool:
    """A guard on symbols that no input binds is about an intermediate and always true for bound inputs."""
    value = expression.xreplace(dict(bound))
    return (
        bool(value)
        if value in (True, False)
        or (getattr(value, "is_Boolean", False) and not value.free_symbols)
        else True
    )
