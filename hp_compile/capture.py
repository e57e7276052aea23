"""Capture: an unmodified module becomes one single-device graph, without touching its weights.

``torch.export`` runs the forward of a *fake twin* (a deep copy in which every parameter and buffer is a fake tensor on
the mesh's device), then AOTAutograd traces the joint forward and backward. The result knows the role of each input and
output; nothing downstream identifies a node by name or position.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_compile.signature import Signature, TensorSpec, flatten_call
from hyper_parallel.errors import CaptureError
from hyper_parallel.torch_compat import graph as compat
from hyper_parallel.torch_compat.graph import pytree

log = logging.getLogger("hp_compile")

_ROOT = "module"


@dataclass(frozen=True)
class OutputSpec:
    """How to rebuild what the user's forward returned from the program's flat outputs.

    Attributes:
        tree: container structure (the model's own output classes included).
        leaves: for every leaf, the index of the flat output, or ``None`` for a constant.
        constants: value of each constant leaf.
    """

    tree: Any
    leaves: tuple[int | None, ...]
    constants: tuple[Any, ...]

    def rebuild(self, flat: Sequence[Any]) -> Any:
        """The user's own output object from flat tensors."""
        values = [
            self.constants[i] if source is None else flat[source]
            for i, source in enumerate(self.leaves)
        ]
        return pytree.tree_unflatten(values, self.tree)


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
    """

    gm: fx.GraphModule
    grad: bool
    output: OutputSpec
    fake_mode: Any
    input_shapes: tuple[tuple[Any, ...], ...]
    constants: dict[str, torch.Tensor]
    tied: Mapping[str, str]


class _Outputs:
    """Where the entry leaves the output structure (export restores attributes of modules)."""

    spec: OutputSpec | None = None


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
        result = self.get_submodule(_ROOT)(*args, **kwargs)
        leaves, tree = flatten_output(result)
        flat: list[torch.Tensor] = []
        sources: list[int | None] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                sources.append(len(flat))
                value = leaf if policy.output_dtype is None else _cast(leaf, policy.output_dtype)
                flat.append(_fresh(value))
            else:
                _check_constant_output(leaf)
                sources.append(None)
        constants = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        self._outputs.spec = OutputSpec(tree, tuple(sources), constants)
        return tuple(flat)


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _fresh(value: torch.Tensor) -> torch.Tensor:
    """The value under a new identity at no cost, so no output is a tracked view of an input or of another output."""
    return torch.ops.aten._unsafe_view.default(value, value.shape)


def _check_constant_output(leaf: object) -> None:
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(
            "forward returns a number that depends on the batch size; return it as a tensor, or compute it in the loop"
        )
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | torch.dtype):
        return
    held = [name for name, v in getattr(leaf, "__dict__", {}).items() if _holds_tensor(v)]
    if held:
        raise CaptureError(
            f"forward returns a {type(leaf).__name__} that holds tensors ({', '.join(held)}) and is no registered "
            "container: return tensors in tuples, lists, dicts or dataclasses, or register the class with "
            "torch.utils._pytree.register_pytree_node. For Hugging Face models pass use_cache=False"
        )


def _holds_tensor(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(_holds_tensor(v) for v in value)
    if isinstance(value, dict):
        return any(_holds_tensor(v) for v in value.values())
    return any(isinstance(v, torch.Tensor) for v in getattr(value, "__dict__", {}).values())


def flatten_output(result: object) -> tuple[list[Any], Any]:
    """Flattens nested containers; dataclasses that nobody registered are registered on the way."""
    while True:
        leaves, tree = pytree.tree_flatten(result)
        unknown = {
            type(x) for x in leaves if dataclasses.is_dataclass(x) and not isinstance(x, type)
        }
        if not unknown:
            return leaves, tree
        for cls in unknown:
            torch.export.register_dataclass(cls)


# ------------------------------------------------------------------ the fake twin


def fake_twin(
    module: nn.Module,
    original_class: type,
    mode: Any,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    ignored: frozenset[int],
) -> nn.Module:
    """A deep copy whose parameters and buffers are fake; the module and its weights are not touched.

    Args:
        module: the user's module, sharded or not, on any device.
        original_class: class whose ``forward`` is captured.
        mode: fake tensor mode.
        device: device of the mesh.
        precision: parameters get ``param_dtype`` here, as they have when they are used.
        ignored: ids of parameters that keep their dtype.

    Raises:
        CaptureError: an attribute cannot be copied, or a parameter hides in a Python container.
    """
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for param in module.parameters():
            dtype = param.dtype
            if precision.param_dtype is not None and dtype.is_floating_point:
                dtype = dtype if id(param) in ignored else precision.param_dtype
            memo[id(param)] = compat.fake_parameter(mode, param, device, dtype)
        for buffer in module.buffers():
            memo[id(buffer)] = compat.fake_like(mode, buffer, device, buffer.dtype)
    _refuse_hidden_parameters(module)
    try:
        twin = _copy_root(module, original_class, memo)
    except Exception as error:
        raise CaptureError(
            f"cannot copy {original_class.__name__} for capture: {type(error).__name__}: {error}. An attribute of the "
            "module cannot be deep-copied; keep such objects outside the module or give them a __deepcopy__"
        ) from error
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(twin, name).clear()  # the root's own hooks run around the program, not in it
    return twin


def _copy_root(module: nn.Module, original_class: type, memo: dict[int, Any]) -> nn.Module:
    """Deep copy of the root as its original class, without the runtime that ``shard`` attached.

    References to the root from below (a parent pointer, a hook's bound method) lead to the copy.
    """
    twin: nn.Module = object.__new__(original_class)
    memo[id(module)] = twin
    for name, value in module.__dict__.items():
        if name != "_hp_runtime" and "load_state_dict" not in name:
            twin.__dict__[name] = copy.deepcopy(value, memo)
    fresh = nn.Module()
    for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        twin.__dict__[name] = fresh.__dict__[name]
    return twin


def _refuse_hidden_parameters(module: nn.Module) -> None:
    """A trainable tensor in a list or dict would be baked into the graph as a constant and never trained."""
    known = {id(p) for p in module.parameters()} | {id(b) for b in module.buffers()}
    for fqn, sub in module.named_modules():
        for name, value in sub.__dict__.items():
            if (name.startswith("_") and name in nn.Module().__dict__) or name == "_hp_runtime":
                continue
            for where, tensor in _walk(value, name):
                trained = isinstance(tensor, nn.Parameter) or tensor.requires_grad
                if trained and id(tensor) not in known:
                    path = f"{fqn}.{where}" if fqn else where
                    raise CaptureError(
                        f"{path} is a parameter held in a Python container, so capture would turn it into a "
                        "constant that is never trained; register it: use nn.ParameterList or nn.ParameterDict, "
                        "or assign it as an attribute"
                    )


def _walk(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < 4 and isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _walk(item, f"{path}[{i}]", depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, f"{path}[{key!r}]", depth + 1)


# ------------------------------------------------------------------ export and joint trace


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
    before = _tensor_attributes(twin)
    with (
        _explained(twin),
        compat.mark_checkpoint_regions(),
        torch.set_grad_enabled(grad),
        compat.preserve_node_meta(),
    ):
        exported = torch.export.export(
            entry, tuple(stand_ins), dynamic_shapes=(spec,), strict=False
        )
    _refuse_stashed_tensors(twin, before)
    forward = exported.module(check_guards=False)
    _share_tied(forward, tied)
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    values = [n.meta["val"] for n in placeholders[len(placeholders) - len(tensors) :]]
    values = [
        v.detach().requires_grad_(t.requires_grad) if isinstance(v, torch.Tensor) else v
        for v, t in zip(values, tensors, strict=True)
    ]
    export_mode = next((v.fake_mode for v in values if compat.is_fake(v)), mode)
    with _explained(twin), torch.set_grad_enabled(grad):
        gm, _ = compat.joint_trace(forward, values, export_mode, decompositions)
    assert outputs.spec is not None
    return Captured(
        gm=gm,
        grad=grad,
        output=outputs.spec,
        fake_mode=export_mode,
        input_shapes=tuple(tuple(v.shape) for v in values),
        constants=_constants(forward, twin),
        tied=tied,
    )


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What export sees: a tensor of the same shape on the mesh's device; contents are never read."""
    if tensor.device.type == device.type and not compat.is_fake(tensor):
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


# ------------------------------------------------------------------ errors that say where


def _tensor_attributes(twin: nn.Module) -> dict[str, int]:
    """Ids of the tensors that live in attributes outside parameters and buffers."""
    found: dict[str, int] = {}
    for fqn, sub in twin.named_modules():
        for name, value in sub.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for where, tensor in _walk(value, name):
                found[f"{fqn}.{where}" if fqn else where] = id(tensor)
    return found


def _refuse_stashed_tensors(twin: nn.Module, before: Mapping[str, int]) -> None:
    for path, identity in _tensor_attributes(twin).items():
        if before.get(path) != identity:
            raise CaptureError(
                f"forward stores a tensor in self.{path}, which a captured program cannot do: the tensor would be "
                "stale after the first call. Return it from forward, or register_buffer it and update it in place"
            )


@contextlib.contextmanager
def _explained(twin: nn.Module) -> Iterator[None]:
    """Turns any failure of export or trace into a CaptureError with module FQN, source line and advice."""
    names = {id(m): fqn for fqn, m in twin.named_modules()}
    stack: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            stack.append(module)

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if stack and stack[-1] is module:
            stack.pop()

    pre = nn.modules.module.register_module_forward_pre_hook(enter)
    post = nn.modules.module.register_module_forward_hook(leave)
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, names.get(id(stack[-1])) if stack else None)) from error
    finally:
        pre.remove()
        post.remove()


def _explain(error: Exception, fqn: str | None) -> str:
    where = f"module {fqn!r}" if fqn else "the root module" if fqn == "" else "the model"
    line = _user_line(error)
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    return (
        f"cannot capture {where}{f' ({line})' if line else ''}: {type(error).__name__}: {first}\n"
        f"{_advice(error)}"
    )


def _advice(error: Exception) -> str:
    name = type(error).__name__
    text = str(error)
    if "DataDependent" in name or "data-dependent" in text.lower() or "Could not guard" in text:
        return (
            "The forward branches on the value of a tensor (for example `if x.sum() > 0` or `.item()`). Use torch.where or "
            "torch.cond, move the decision out of forward, or set Policy(fallback='eager')"
        )
    return "Change that line so that torch.export can trace it, or set Policy(fallback='eager')"


def _user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame that belongs neither to torch nor to this package."""
    torch_root = str(torch.__path__[0])
    own = __file__
    found = ""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        trace = current.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            inside = name.startswith((torch_root, "<")) or name == own or "hp_compile" in name
            if not inside:
                found = f"{name}:{trace.tb_lineno}"
            trace = trace.tb_next
        if found:
            return found
        current = current.__cause__ or current.__context__
    return found


__all__ = ["Captured", "OutputSpec", "TensorSpec", "capture", "fake_twin", "flatten_call"]
