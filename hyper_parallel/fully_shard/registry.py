"""Which unit a module belongs to: noted on the module itself, so two models share nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hyper_parallel.fully_shard.state import UnitState

__all__ = ["set_unit", "unit_of"]

_ATTRIBUTE = "_hsdp_unit_state"


def unit_of(module: nn.Module) -> Any:
    """Returns the unit that ``fully_shard`` made of a module, or None."""
    return vars(module).get(_ATTRIBUTE)


def set_unit(module: nn.Module, unit: UnitState) -> None:
    """Notes the unit of a module."""
    vars(module)[_ATTRIBUTE] = unit
