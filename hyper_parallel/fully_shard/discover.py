"""What a call of ``fully_shard`` manages: modules, parameters, where they are registered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import PlacementError, PolicyError, ShardedStateError
from hyper_parallel.fully_shard.optim import owner_of
from hyper_parallel.fully_shard.registry import unit_of
from hyper_parallel.fully_shard.slice import ParamSlot
from hyper_parallel.torch_compat.eager import gradient_hooks, is_torch_fsdp_module

__all__ = ["Managed", "check_modules", "discover", "move_to_device"]


@dataclass(frozen=True)
class Managed:
    """One parameter that a new unit takes over.

    Attributes:
        fqn: Its first name, from the module that ``fully_shard`` was given.
        param: The parameter.
        slots: Everywhere it is registered in the unit.
    """

    fqn: str
    param: nn.Parameter
    slots: tuple[ParamSlot, ...]


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Checks that the modules can be made a unit.

    Raises:
        PolicyError: Not modules, none, or containers without a forward of their own.
        ShardedStateError: Sharded already.
    """
    if not modules:
        raise PolicyError("fully_shard: expected a module or a non-empty list of modules, got []")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise PolicyError(
                f"fully_shard: expected an nn.Module or a list of them, got {module!r} of type "
                f"{type(module).__name__}"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise PolicyError(
                f"fully_shard: {type(module).__name__} is a TorchScript module, which takes no "
                f"hooks; pass the module that it was made from"
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise PolicyError(
                f"fully_shard: {type(module).__name__} has no forward of its own, so its hooks "
                f"would never run; pass its children as a list, or one by one"
            )
        if unit_of(module) is not None or is_torch_fsdp_module(module):
            raise ShardedStateError(
                f"fully_shard: {type(module).__name__} is sharded already; shard a module once"
            )


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Drops modules that lie inside another one of the list."""
    modules = list(dict.fromkeys(modules))
    inner = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if module not in inner]


def discover(
    modules: Sequence[nn.Module], ignored: frozenset[int]
) -> tuple[list[Managed], list[nn.Parameter], list[Tensor]]:
    """Finds the parameters and buffers below the modules that no inner unit manages.

    Args:
        modules: The modules of the new unit.
        ignored: ``id`` of the parameters that are left alone.

    Returns:
        The parameters to manage in registration order, the ignored ones, and the buffers.

    Raises:
        PlacementError: A parameter belongs to another unit already.
    """
    slots: dict[int, list[ParamSlot]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    left_alone: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    for prefix, module in _own_modules(modules):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = f"{prefix}.{name}" if prefix else name
            if id(param) in ignored:
                left_alone[id(param)] = param
                continue
            _check_not_managed(fqn, param)
            first.setdefault(id(param), (fqn, param))
            slots.setdefault(id(param), []).append(ParamSlot(module, name))
        for buffer in module.buffers(recurse=False):
            buffers[id(buffer)] = buffer
    managed = [Managed(fqn, param, tuple(slots[key])) for key, (fqn, param) in first.items()]
    return managed, list(left_alone.values()), list(buffers.values())


def _own_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module, is_top: bool) -> None:
        if module in seen or (not is_top and unit_of(module) is not None):
            return
        seen.add(module)
        found.append((prefix, module))
        for name, child in module.named_children():
            visit(f"{prefix}.{name}" if prefix else name, child, False)

    for module in modules:
        visit("", module, True)
    return found


def _check_not_managed(fqn: str, param: nn.Parameter) -> None:
    owner = owner_of(param)
    if owner is not None:
        raise PlacementError(
            f"{fqn}: it is tied to {owner.fqn}, which another unit of fully_shard manages; put the "
            f"modules that share it into one unit: fully_shard([module_a, module_b])"
        )


def check_nothing_lost(managed: Sequence[Managed]) -> None:
    """Checks that parameters carry nothing that their slices would not have.

    Raises:
        ShardedStateError: Gradients, or hooks of gradients.
    """
    graded = [entry.fqn for entry in managed if entry.param.grad is not None]
    if graded:
        raise ShardedStateError(
            f"fully_shard would lose the gradients of {', '.join(graded)}; finish the step, or call "
            f"zero_grad(set_to_none=True), before it"
        )
    hooked = [entry.fqn for entry in managed if gradient_hooks(entry.param)]
    if hooked:
        raise ShardedStateError(
            f"fully_shard would lose the gradient hooks of {', '.join(hooked)}; register them "
            f"after it: they are then given the reduced slice"
        )


def move_to_device(
    managed: Sequence[Managed], buffers: Sequence[Tensor], device: torch.device
) -> None:
    """Moves parameters and buffers one by one; what is on the meta device stays there.

    Raises:
        PlacementError: A parameter is on another accelerator, or a DTensor on another device type.
    """
    entries = [(m.fqn, m.param) for m in managed]
    wrong = [
        f"{fqn} ({param.device})"
        for fqn, param in entries
        if param.device.type not in ("cpu", "meta", device.type)
        or (isinstance(param, DTensor) and param.device_mesh.device_type != device.type)
        or (param.device.type == device.type != "cpu" and param.device != device)
    ]
    if wrong:
        raise PlacementError(
            f"fully_shard on {device}: expected parameters on the CPU, on meta or on {device}, got "
            f"{', '.join(wrong)}; move the module first"
        )
    for tensor in [param for _, param in entries] + list(buffers):
        if tensor.device.type in ("meta", device.type) or isinstance(tensor, DTensor):
            continue
        tensor.data = tensor.data.to(device)
