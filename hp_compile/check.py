"""What can be wrong with a model that is to be sharded, checked before any weight is touched."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hyper_parallel.errors import HPCompileError, PlacementError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from hyper_parallel.torch_compat.eager import gradient_hooks


def check_module(module: nn.Module) -> None:
    """Checks that the module is a plain one, with parameters that can be cut.

    Args:
        module: the module.

    Raises:
        HPCompileError: it is wrapped or compiled already.
        PlacementError: a parameter is a DTensor, not yet initialised, or not dense.
    """
    name = type(module).__name__
    if isinstance(module, DistributedDataParallel):
        raise HPCompileError(
            f"{name} reduces gradients itself; pass the module inside it: hp_compile.shard(model.module, mesh, policy)"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise HPCompileError(
            f"{name} is a TorchScript module, which cannot be captured; pass the Python module that it was made from"
        )
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise HPCompileError(
            f"{name} is compiled by torch.compile already; pass the plain module, shard compiles it"
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    params = dict(module.named_parameters())
    sharded = [f for f, p in params.items() if isinstance(p, DTensor)]
    if sharded:
        raise PlacementError(
            f"{names(sharded)}: already a DTensor. shard takes a plain model and applies FSDP, TP and EP together; "
            "give the tensor-parallel plan as Policy(tp_plan=...) instead of calling parallelize_module or fully_shard"
        )
    lazy = [f for f, t in tensors.items() if is_lazy(t)]
    if lazy:
        raise PlacementError(
            f"{names(lazy)}: not initialised yet (a lazy module); run one forward before shard, so that the shapes are known"
        )
    sparse = [f for f, p in params.items() if p.layout != torch.strided]
    if sparse:
        raise PlacementError(
            f"{names(sparse)}: layout {params[sparse[0]].layout}; only dense parameters can be cut. Make it dense, or name "
            "it in Policy(ignored_params=...)"
        )


def warn_if_not_parallel(layout: MeshLayout, plans: Mapping[str, ParamPlan]) -> None:
    """Warns about ranks that repeat each other's work: nothing is cut over them, and they share their data.

    Args:
        layout: the mesh.
        plans: plan of every parameter.
    """
    idle = idle_dims(layout, plans)
    if len(layout.ranks) > 1 and layout.size(idle) == len(layout.ranks):
        warnings.warn(
            f"the mesh ({layout.describe()}) has no data-parallel dim: no parameter is cut, no gradient is reduced, and every "
            "rank has to be given the same data. Name a dim dp_shard or dp_replicate, or set Policy(roles={'shard': ...})",
            UserWarning,
            stacklevel=3,
        )
    elif idle:
        warnings.warn(idle_text(layout, idle), UserWarning, stacklevel=3)


def idle_dims(layout: MeshLayout, plans: Mapping[str, ParamPlan]) -> tuple[str, ...]:
    """Mesh dims with several ranks that share their data and that cut no parameter.

    Args:
        layout: the mesh.
        plans: plan of every parameter.
    """
    cut = {
        axis
        for plan in plans.values()
        for axis, placement in zip(layout.dim_names, plan.placements, strict=True)
        if not placement.is_replicate()
    }
    busy = {*cut, *layout.batch_dims}
    return tuple(a for a in layout.dim_names if a not in busy and layout.size(a) > 1)


def idle_text(layout: MeshLayout, idle: Sequence[str]) -> str:
    """What to say about such dims.

    Args:
        layout: the mesh.
        idle: the dims.
    """
    plan = "Policy.tp_plan" if set(idle) <= set(layout.roles.tp) else "the policy"
    return (
        f"mesh dim {', '.join(map(repr, idle))} of ({layout.describe()}) cuts no parameter: its ranks repeat each other's "
        f"work on the same data; say in {plan} what it cuts, or leave it out of the mesh"
    )


def check_call(
    module: nn.Module, original_class: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Checks that a call fits the parameters of ``forward``, before anything is captured.

    Raises:
        TypeError: it does not; the text is Python's own.
    """
    own = vars(module).get("forward")
    forward = original_class.forward if own is None else own
    given = (module, *args) if own is None else args
    try:
        inspect.signature(forward).bind(*given, **kwargs)
    except TypeError as error:
        raise TypeError(f"{original_class.__name__}.forward: {error}") from None


def check_parameters(
    module: nn.Module, plans: Mapping[str, ParamPlan], device: torch.device
) -> None:
    """Everything that can be wrong with the tensors of a plain module.

    Args:
        module: the module.
        plans: plan of every parameter.
        device: device of this rank on the mesh.

    Raises:
        PlacementError: the model is partly on meta, or on another accelerator.
        HPCompileError: a gradient or a gradient hook is set, or an optimizer holds a parameter.
    """
    params = {f: p for f, p in module.named_parameters() if not plans[f].ignored}
    buffers = dict(module.named_buffers())
    _check_meta(params, buffers)
    tensors = {**params, **buffers}
    foreign = [f for f, t in tensors.items() if not _can_move(t.device, device)]
    if foreign:
        raise PlacementError(
            f"{names(foreign)}: on {tensors[foreign[0]].device}, but this rank's device in the mesh is {device}; move the "
            f"model to the CPU or to {device} before shard"
        )
    graded = [f for f, p in params.items() if p.grad is not None]
    if graded:
        raise HPCompileError(
            f"{names(graded)}: has a gradient, which shard would lose; finish the step, or call "
            "zero_grad(set_to_none=True), before shard"
        )
    hooked = [f for f, p in params.items() if gradient_hooks(p)]
    if hooked:
        raise HPCompileError(
            f"{names(hooked)}: has a gradient hook, which would never run on the sharded parameter; register it after shard"
        )
    _check_optimizers(params)


def _check_meta(params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """All on meta is fine, and so are real buffers beside meta parameters (they need no weights to be computed)."""
    meta = [f for f, p in params.items() if p.is_meta]
    real = [f for f, p in params.items() if not p.is_meta]
    if not real:
        return
    meta += [f for f, b in buffers.items() if b.is_meta]
    if meta:
        raise PlacementError(
            f"the model is partly on the meta device: {names(meta)} on meta, but {names(real)} on {params[real[0]].device}; "
            "build all of it on meta and call to_empty after shard, or build all of it with real weights"
        )


def _can_move(source: torch.device, device: torch.device) -> bool:
    return source.type in ("cpu", "meta") or source == device


def names(fqns: Sequence[str]) -> str:
    """The first few of many FQNs, for messages.

    Args:
        fqns: the FQNs.
    """
    shown = ", ".join(fqns[:4])
    return f"{shown}, … ({len(fqns)} in all)" if len(fqns) > 4 else shown


def _check_optimizers(params: Mapping[str, nn.Parameter]) -> None:
    """A DTensor cannot take over the identity of a plain Parameter, so an optimizer from before would train nothing."""
    if _stale_optimizers(params):
        gc.collect()  # an optimizer that nobody holds any more may wait for the collector
    for optimizer, held in _stale_optimizers(params):
        raise HPCompileError(
            f"{type(optimizer).__name__} holds {names(held)} from before shard and would go on updating the full tensors "
            "that the model no longer uses; build the optimizer after shard (its old state can be loaded with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict)"
        )


def _stale_optimizers(
    params: Mapping[str, nn.Parameter],
) -> list[tuple[torch.optim.Optimizer, list[str]]]:
    by_id = {id(p): fqn for fqn, p in params.items()}
    found = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer):
            groups = getattr(candidate, "param_groups", ())
            held = [by_id[id(p)] for g in groups for p in g["params"] if id(p) in by_id]
            if held:
                found.append((candidate, held))
    return found
