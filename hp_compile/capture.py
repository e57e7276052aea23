"""Capture: an unmodified module becomes one single-device graph, without touching its weights.

``torch.export`` runs the forward of a *fake twin* (a deep copy in which every parameter and buffer is a fake tensor on
the mesh's device), then AOTAutograd traces the joint forward and backward. The result knows the role of each input and
output; nothing downstream identifies a node by name or position.
"""

from __future__ import annotations

import enum
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_compile.effects import CallWatch, StateWatch, walk
from hp_compile.explain import Refusal, explained
from hp_compile.repeat import joint_trace
from hp_compile.signature import Signature, flatten_tree
from hp_compile.twin import fake_twin
from hyper_parallel.torch_compat import graph as compat
from hyper_parallel.torch_compat.graph import pytree
from passes.base import source_line
from passes.tensor_parallel import Gathered, Layout, Parallelised

log = logging.getLogger("hp_compile")

_ROOT = "module"

#: ``parallel(forward, fake_mode)``.
ParallelForward = Callable[[fx.GraphModule, Any], Parallelised]


@dataclass(frozen=True)
class SizeOutput:
    """A number that forward returned and that depends on input sizes.

    Attributes:
        expression: the number in terms of the program's size symbols.
        kind: ``int``, ``float`` or ``bool``.
    """

    expression: Any
    kind: type


@dataclass(frozen=True)
class OutputSpec:
    """How to rebuild what the user's forward returned from the program's flat outputs.

    Attributes:
        tree: container structure (the model's own output classes included).
        leaves: for every leaf, the index of the flat output, or ``None`` for a constant.
        constants: value of each constant leaf; a :class:`SizeOutput` for a number that depends on sizes.
    """

    tree: Any
    leaves: tuple[int | None, ...]
    constants: tuple[Any, ...]

    @property
    def has_sizes(self) -> bool:
        """Whether a leaf is computed from input sizes."""
        return any(isinstance(c, SizeOutput) for c in self.constants)

    def rebuild(self, flat: Sequence[Any], symbols: Mapping[Any, int] | None = None) -> Any:
        """The user's own output object.

        Args:
            flat: flat tensors.
            symbols: value of every size symbol, when ``has_sizes``.
        """
        values = [
            self._constant(self.constants[i], symbols) if source is None else flat[source]
            for i, source in enumerate(self.leaves)
        ]
        return pytree.tree_unflatten(values, self.tree)

    @staticmethod
    def _constant(value: Any, symbols: Mapping[Any, int] | None) -> Any:
        if isinstance(value, SizeOutput):
            return value.kind(value.expression.xreplace(dict(symbols or {})))
        return value


@dataclass
class Captured:
    """One single-device program.

    Attributes:
        gm: joint graph (``grad=True``) or forward graph, with AOTAutograd's descriptors on inputs and outputs.
        grad: whether the graph has a backward.
        output: how to rebuild the user's output.
        fake_mode: owner of every fake tensor in the graph; its shape environment holds the symbols and guards.
        input_shapes: shape of every tensor input, ints and symbols.
        constants: tensors that the forward created or held outside parameters and buffers, by buffer name.
        tied: alias FQN to the first FQN of the same parameter.
        updates: flat outputs that are the new value of a buffer that forward replaced.
        partial: parameters whose gradients are terms of a sum over the tensor-parallel ranks.
        gathered: values that were gathered for operators that cannot run on tensor-parallel parts.
        uncut: modules at which a value was to be cut over tp and is not, with the dim and its length.
        output_layouts: tensor-parallel layout of every flat output; empty when all are whole.
        notes: what a reader of the plan should know about its tensor parallelism.
    """

    gm: fx.GraphModule
    grad: bool
    output: OutputSpec
    fake_mode: Any
    input_shapes: tuple[tuple[Any, ...], ...]
    constants: dict[str, torch.Tensor]
    tied: Mapping[str, str]
    updates: Mapping[int, str] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    gathered: tuple[Gathered, ...] = ()
    uncut: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    output_layouts: tuple[Layout, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Outputs:
    """Where the entry leaves the output structure (export restores attributes of modules)."""

    spec: OutputSpec | None = None
    updates: Mapping[int, str] = field(default_factory=dict)


class _Entry(nn.Module):
    """The module that is exported: flat tensors in, flat tensors out; containers and constants live outside."""

    def __init__(
        self,
        module: nn.Module,
        signature: Signature,
        precision: MixedPrecisionPolicy,
        outputs: _Outputs,
    ) -> None:
        super().__init__()
        self.add_module(_ROOT, module)
        self._signature = signature
        self._precision = precision
        self._outputs = outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the user's forward on rebuilt arguments and flattens what it returns."""
        policy = self._precision
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            tensors = tuple(_cast(t, policy.param_dtype) for t in tensors)
        args, kwargs = self._signature.rebuild(tensors)
        root = self.get_submodule(_ROOT)
        watch = StateWatch(root)
        with CallWatch(), compat.refuse_autograd_functions(_refuse_function):
            result = root(*args, **kwargs)
        replaced = watch.finish()
        leaves, tree = flatten_tree(result)
        flat: list[torch.Tensor] = []
        sources: list[int | None] = []
        constants: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                sources.append(len(flat))
                value = leaf if policy.output_dtype is None else _cast(leaf, policy.output_dtype)
                flat.append(_fresh(value))
                constants.append(None)
            else:
                sources.append(None)
                constants.append(_constant_output(leaf))
        self._outputs.spec = OutputSpec(tree, tuple(sources), tuple(constants))
        self._outputs.updates = dict(enumerate(replaced, start=len(flat)))
        flat.extend(_fresh(value) for value in replaced.values())
        return tuple(flat)


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _fresh(value: torch.Tensor) -> torch.Tensor:
    """The value under a new identity at no cost, so no output is a tracked view of an input or of another output."""
    return torch.ops.aten._unsafe_view.default(value, value.shape)


_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_SYMBOLIC = ((torch.SymBool, bool), (torch.SymInt, int), (torch.SymFloat, float))


def _constant_output(leaf: Any) -> Any:
    """What an output leaf that is no tensor is at each call."""
    for symbolic, kind in _SYMBOLIC:
        if isinstance(leaf, symbolic):
            if not compat.is_backed(leaf):
                raise Refusal(
                    "forward returns a number that depends on the values of a tensor",
                    "Return it as a tensor, or compute it in the loop",
                    fqn="",
                )
            return SizeOutput(leaf.node.expr, kind)
    if isinstance(leaf, (*_ATOMS, type)):
        return leaf
    held = [path for path, _ in walk(leaf, type(leaf).__name__)]
    if held or isinstance(leaf, Iterator):
        raise Refusal(
            f"forward returns a {type(leaf).__name__} that {f'holds tensors ({held[0]})' if held else 'is used up once'} and "
            "is no registered container",
            "Return tensors in tuples, lists, dicts, named tuples or dataclasses, or register the class with "
            "torch.utils._pytree.register_pytree_node. For Hugging Face models pass use_cache=False",
            fqn="",
        )
    return leaf


def _refuse_function(function: type, args: tuple[Any, ...]) -> None:
    """``torch.autograd.Function``: export would keep its forward and forget its backward."""
    uses_grad = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    if torch.is_grad_enabled() and uses_grad and not function.__module__.startswith("torch."):
        raise Refusal(
            f"forward calls the torch.autograd.Function {function.__qualname__}, whose own backward torch.export would lose",
            "Write it as operators with an ordinary gradient (y = x + (f(x) - x).detach() for a straight-through estimator), "
            "as a torch.library.custom_op with register_autograd, or set Policy(fallback='eager')",
        )


# ------------------------------------------------------------------ export and joint trace


@torch.backends.mkldnn.flags(
    enabled=False
)  # its recurrent layers are one operator that has no backward in a trace
def capture(
    module: nn.Module,
    signature: Signature,
    tensors: Sequence[torch.Tensor],
    *,
    original_class: type,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    unit_modules: Sequence[str],
    grad: bool,
    dynamic: Sequence[frozenset[int]],
    decompositions: Mapping[Any, Any],
    ignored: frozenset[int] = frozenset(),
    parallel: ParallelForward | None = None,
    reuse: bool = True,
) -> Captured:
    """Captures one program.

    Args:
        module: the user's module.
        signature: container tree and constants of the call.
        tensors: the flat tensor inputs, on any device; only shape, dtype and ``requires_grad`` are read.
        original_class: the class whose ``forward`` runs.
        device: device of the mesh.
        precision: mixed precision policy.
        unit_modules: FQNs of modules whose floating-point inputs are cast to ``param_dtype``, as FSDP2 casts them.
        grad: trace a backward too.
        dynamic: for every tensor input, the dims whose size stays symbolic.
        decompositions: operator decompositions for the trace.
        ignored: ids of ignored parameters.
        parallel: turns the forward of one device into that of one rank, before it is differentiated.
        reuse: trace equal units once (see ``hp_compile.repeat``); the graph is the same without.

    Raises:
        CaptureError: the forward cannot be captured; the text names the module, the source line and what to do.
    """
    mode = compat.fake_mode()
    twin = fake_twin(module, original_class, mode, device, precision, ignored)
    tied = _tied(twin)
    _cast_unit_inputs(twin, unit_modules, precision)
    outputs = _Outputs()
    entry = _Entry(twin, signature, precision, outputs)
    stand_ins = [_stand_in(t, device) for t in tensors]
    spec = tuple({d: torch.export.Dim.AUTO for d in dims} or None for dims in dynamic)
    with (
        explained(twin),
        warnings.catch_warnings(),
        compat.mark_checkpoint_regions(),
        torch.set_grad_enabled(grad),
        compat.preserve_node_meta(),
    ):
        warnings.filterwarnings("ignore", "The tensor attribute.* assigned during export")
        exported = torch.export.export(
            entry, tuple(stand_ins), dynamic_shapes=(spec,) if spec else None, strict=False
        )
    with explained(twin):
        _refuse_changed_constants(exported)
    forward = exported.module(check_guards=False)
    _share_tied(forward, tied)
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    values = [n.meta["val"] for n in placeholders[len(placeholders) - len(tensors) :]]
    values = [
        v.detach().requires_grad_(t.requires_grad) if isinstance(v, torch.Tensor) else v
        for v, t in zip(values, tensors, strict=True)
    ]
    export_mode = next((v.fake_mode for v in values if compat.is_fake(v)), mode)
    parallelised = None
    if parallel is not None:
        parallelised = parallel(forward, export_mode)
        forward = parallelised.forward
        forward.recompile()
    with explained(twin), torch.set_grad_enabled(grad):
        repeated = [f"{_ROOT}.{fqn}" for fqn in unit_modules if fqn]
        gm = joint_trace(forward, values, export_mode, decompositions, repeated, reuse=reuse)
        _refuse_nested_graphs(gm)
    gm = _flat(gm)
    assert outputs.spec is not None
    return Captured(
        gm=gm,
        grad=grad,
        output=outputs.spec,
        fake_mode=export_mode,
        input_shapes=tuple(tuple(v.shape) for v in values),
        constants={
            **_constants(forward, twin),
            **{
                name.removeprefix(f"{_ROOT}."): value
                for name, value in (parallelised.constants if parallelised else {}).items()
            },
        },
        tied=tied,
        updates=outputs.updates,
        partial=frozenset(n.removeprefix(f"{_ROOT}.") for n in parallelised.partial)
        if parallelised
        else frozenset(),
        gathered=parallelised.gathered if parallelised else (),
        uncut=parallelised.uncut if parallelised else {},
        output_layouts=parallelised.outputs if parallelised else (),
    )


def _flat(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph alone: flat inputs and outputs, without pytree specs and the parameters it was traced from."""
    gm.graph.set_codegen(fx.graph.CodeGen())
    return compat.lazy_module(gm)


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What export sees: a contiguous tensor of the same shape on the mesh's device; contents are never read."""
    if tensor.device.type == device.type and tensor.is_contiguous() and not compat.is_fake(tensor):
        return tensor.detach()
    return torch.empty(tuple(int(s) for s in tensor.shape), dtype=tensor.dtype, device=device)


def _tied(twin: nn.Module) -> dict[str, str]:
    """Alias FQN to first FQN for parameters that are registered more than once."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for fqn, param in twin.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), fqn)
        if owner != fqn:
            tied[fqn] = owner
    return tied


def _share_tied(forward: fx.GraphModule, tied: Mapping[str, str]) -> None:
    """Makes every use of a tied parameter read its first name, so it is one input with one gradient."""
    if not tied:
        return
    prefix = _ROOT + "."
    for node in list(forward.graph.nodes):
        if node.op == "get_attr" and str(node.target).removeprefix(prefix) in tied:
            node.target = prefix + tied[str(node.target).removeprefix(prefix)]
    for alias in tied:
        path, _, name = (prefix + alias).rpartition(".")
        owner = forward.get_submodule(path)
        if name in owner._parameters:
            del owner._parameters[name]
    forward.recompile()


def _cast_unit_inputs(
    twin: nn.Module, units: Sequence[str], precision: MixedPrecisionPolicy
) -> None:
    dtype = precision.param_dtype
    if dtype is None or not precision.cast_forward_inputs:
        return

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return pytree.tree_map_only(torch.Tensor, lambda t: _cast(t, dtype), (args, kwargs))

    for fqn in units:
        if fqn:
            twin.get_submodule(fqn).register_forward_pre_hook(cast, with_kwargs=True)


def _constants(forward: fx.GraphModule, twin: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that export lifted and that are no buffer of the user's module."""
    own = {f"{_ROOT}.{name}" for name, _ in twin.named_buffers(remove_duplicate=False)}
    return {n: b.detach() for n, b in forward.named_buffers() if n not in own}


def _refuse_changed_constants(exported: Any) -> None:
    """A tensor that is neither parameter nor buffer and changes in forward would start from its first value each call."""
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in exported.graph.nodes:
        for source in compat.written_arguments(node):
            name = constants.get(source.name)
            if name is None:
                continue
            path = name.removeprefix(_ROOT + ".")
            known = "" if "lifted_tensor" in path else f" {path!r}"
            raise Refusal(
                f"forward changes a tensor{known} in place that is no registered buffer",
                "Register it with register_buffer, so that the change is kept, saved and moved with the module",
                where=source_line(node),
                fqn=path.rpartition(".")[0] if known else None,
            )


def _refuse_nested_graphs(gm: fx.GraphModule) -> None:
    """Operators that carry graphs of their own hide what happens inside from every pass."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and compat.is_higher_order(node.target):
            raise Refusal(
                f"forward uses the higher-order operator {node.target}, whose inner graphs the passes do not look into",
                "Use torch.where, an ordinary attention function or an unrolled loop, or set Policy(fallback='eager')",
                where=source_line(node),
            )


__all__ = ["Captured", "OutputSpec", "SizeOutput", "capture"]
