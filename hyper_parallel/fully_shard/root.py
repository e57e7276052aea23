"""First use of a model: which unit is the root, what its units share, what they are called."""

from __future__ import annotations

import dataclasses
import warnings

from torch import nn

from hyper_parallel.errors import ShardedStateError
from hyper_parallel.fully_shard.lifetime import TrainingState
from hyper_parallel.fully_shard.registry import unit_of
from hyper_parallel.fully_shard.state import UnitState

__all__ = ["init_root"]


def init_root(root: UnitState) -> None:
    """Joins all units below the root's module: one context, names from the root.

    A unit that ran alone before, as a root of its own, becomes part of the new tree.

    Raises:
        ShardedStateError: The root has several modules, a unit is in use, or parameters are not
            ready.
    """
    if len(root.modules) > 1:
        names = ", ".join(type(module).__name__ for module in root.modules)
        raise ShardedStateError(
            f"fully_shard needs one root module, but the outermost unit that runs has several: "
            f"{names}; apply fully_shard to their parent too"
        )
    module = root.modules[0]
    units: list[UnitState] = []
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is None:
            continue
        if unit not in units:
            if unit.training_state is not TrainingState.IDLE:
                raise ShardedStateError(
                    f"{name}: this unit is in the middle of a step of another root; run the outer "
                    f"module's forward first"
                )
            units.append(unit)
            unit.name = name
            unit.inner_modules = []
        else:
            unit.name += f", {name}"
        unit.is_root = unit is root
        unit.context = root.context
    root.context.units = units
    _assign_modules(module, root, set())
    _name_parameters(module, units)
    _warn_about_strangers(module, units)
    for unit in units:
        unit.check_ready()


def _assign_modules(module: nn.Module, owner: UnitState, seen: set[nn.Module]) -> None:
    if module in seen:
        return
    seen.add(module)
    owner = unit_of(module) or owner
    owner.inner_modules.append(module)
    for child in module.children():
        _assign_modules(child, owner, seen)


def _name_parameters(module: nn.Module, units: list[UnitState]) -> None:
    names: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), name)
    for unit in units:
        for managed in unit.params:
            fqn = names.get(id(managed.registered_param))
            if fqn is not None:
                managed.plan = dataclasses.replace(managed.plan, fqn=fqn)


def _warn_about_strangers(module: nn.Module, units: list[UnitState]) -> None:
    """Warns about trained parameters that came after ``fully_shard``: every rank trains its own."""
    known = {id(managed.registered_param) for unit in units for managed in unit.params}
    known |= {id(param) for unit in units for param in unit.ignored}
    strangers = [
        name
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in known
    ]
    if strangers:
        warnings.warn(
            f"no unit of fully_shard has {', '.join(strangers)}: added after it, they are neither "
            f"cut nor are their gradients reduced. Apply fully_shard when the model is complete, or "
            f"to the module that was added",
            stacklevel=2,
        )
