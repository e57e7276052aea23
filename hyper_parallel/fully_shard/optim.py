"""Optimizers that hold full parameters: they are given the sharded ones.

``fully_shard`` puts new Parameter objects into the model, and forward others while the unit is
gathered. An optimizer that was built before, or then, would silently train nothing. Before its next
step it is repaired: every full parameter is replaced by its sharded one, and optimizer state of the
full shape by this rank's slice.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyper_parallel.torch_compat.eager import ensure_optimizer_step_pre_hook

if TYPE_CHECKING:
    from hyper_parallel.fully_shard.full import FullParam

__all__ = ["adopt_optimizers", "note_replacement", "owner_of"]

_ATTRIBUTE = "_hsdp_param"


def note_replacement(old: Tensor, new: FullParam) -> None:
    """Notes on a full parameter which FullParam took it over."""
    setattr(old, _ATTRIBUTE, weakref.ref(new))


def owner_of(param: Tensor) -> FullParam | None:
    """Returns the FullParam that took a full parameter over, or None."""
    noted = getattr(param, _ATTRIBUTE, None)
    return noted() if isinstance(noted, weakref.ref) else None


def adopt_optimizers() -> None:
    """Makes sure that optimizers are repaired before they step."""
    ensure_optimizer_step_pre_hook(_replace_old_parameters)


@torch.no_grad()
def _replace_old_parameters(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        params = group["params"]
        for index, old in enumerate(params):
            owner = owner_of(old)
            if owner is None or owner.sharded_param is old:
                continue
            params[index] = owner.sharded_param
            if old in optimizer.state:
                optimizer.state[owner.sharded_param] = {
                    key: owner.shard_like(value) if _is_full(value, old) else value
                    for key, value in optimizer.state.pop(old).items()
                }


def _is_full(value: Any, old: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == old.shape and value.ndim > 0
