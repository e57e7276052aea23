"""Comparing the replicas of the units of one model; see ``hyper_parallel.replicas``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.mesh import MeshLayout
from hyper_parallel.replicas import check_replicas, checks_every_step, gradients_of, parameters_of

if TYPE_CHECKING:
    from hyper_parallel.fully_shard.state import UnitState

__all__ = ["ReplicaGuard", "compare_replicas"]


class ReplicaGuard:
    """Compares in every step, if the environment asks for it: parameters that a step may have changed, and gradients."""

    def __init__(self) -> None:
        self._due = True

    def before_forward(self, units: Iterable[UnitState]) -> None:
        """Compares the parameters before the first forward that trains, and after each backward that ended.

        Raises:
            ReplicaError: Replicas differ.
        """
        if self._due and torch.is_grad_enabled() and checks_every_step():
            compare_replicas(units, gradients=False)
            self._due = False

    def after_backward(self, units: Iterable[UnitState]) -> None:
        """Compares what is in ``.grad``.

        Raises:
            ReplicaError: Replicas differ.
        """
        self._due = True
        if checks_every_step():
            compare_replicas(units, parameters=False)


def compare_replicas(
    units: Iterable[UnitState], *, parameters: bool = True, gradients: bool = True
) -> None:
    """Compares what units hold on their meshes, one mesh after the other; collective over them.

    Args:
        units: The units, in one order on all ranks.
        parameters: Compare slices of parameters.
        gradients: Compare what is in their ``.grad``.

    Raises:
        ReplicaError: Replicas differ.
    """
    held: dict[MeshLayout, tuple[DeviceMesh, torch.device, dict[str, Tensor]]] = {}
    for unit in units:
        for param in unit.params:
            entry = held.setdefault(param.layout, (param.mesh, unit.device, {}))
            entry[2][param.fqn] = param.sharded_param
    for layout, (mesh, device, params) in held.items():
        replicas = parameters_of(params) if parameters else []
        replicas += gradients_of(params) if gradients else []
        check_replicas(mesh, layout, replicas, device)
