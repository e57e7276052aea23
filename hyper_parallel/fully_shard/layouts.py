"""On which mesh each parameter of a unit is planned.

``fully_shard`` may be given the whole mesh or its data dims only, and a parameter may be plain or a
DTensor that TP or EP placed on dims of its own. A parameter's mesh has the dims of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.errors import PlacementError
from hyper_parallel.fully_shard.discover import Managed
from hyper_parallel.fully_shard.post_forward import PostForward, split_shard_axis
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import dtensor_placements
from hyper_parallel.plan import ParamPlan, plan_param, resolve_enable_param_shard
from hyper_parallel.policy import Policy
from hyper_parallel.torch_compat.eager import concatenate_meshes

__all__ = ["PlannedParam", "UnitLayouts"]


@dataclass(frozen=True)
class PlannedParam:
    """A plan with the mesh that it is for.

    Attributes:
        plan: The plan.
        mesh: The mesh.
        layout: The mesh as a value.
        post_forward: Makes the smaller group of an integer ``reshard_after_forward``, if the
            parameter has one.
    """

    plan: ParamPlan
    mesh: DeviceMesh
    layout: MeshLayout
    post_forward: Callable[[], PostForward | None]


class UnitLayouts:
    """Plans the parameters of one unit.

    Args:
        mesh: What ``fully_shard`` was given.
        policy: Its arguments.

    Raises:
        MeshError: The mesh has no legal reading.
        PolicyError: The policy does not fit the mesh.
    """

    def __init__(self, mesh: DeviceMesh, policy: Policy) -> None:
        self._mesh = mesh
        self._policy = policy
        self.layout = MeshLayout.from_mesh(mesh, policy.roles)
        resolve_enable_param_shard(self.layout, policy)
        self._joined: dict[DeviceMesh, tuple[DeviceMesh, MeshLayout]] = {}
        self._splits: dict[tuple[MeshLayout, tuple[str, ...]], PostForward] = {}

    @property
    def reshard_after_forward(self) -> bool | None:
        """The setting as a bool; an integer is True, 1 is False because nothing would be freed."""
        value = self._policy.reshard_after_forward
        if value is None or isinstance(value, bool):
            return value
        return value != 1

    def plan(self, entry: Managed) -> PlannedParam:
        """Plans one parameter.

        Raises:
            PolicyError: The policy does not fit.
            PlacementError: The parameter cannot be placed.
        """
        mesh, layout = self._mesh_of(entry)
        plan = plan_param(
            entry.fqn,
            entry.param,
            layout=layout,
            policy=self._policy,
            mp_placements=dtensor_placements(entry.fqn, entry.param, layout),
        )
        return PlannedParam(plan, mesh, layout, lambda: self._post_forward(mesh, layout, plan))

    def adopt(self, plan: ParamPlan) -> PlannedParam:
        """Takes the plan of a parameter that is on the mesh as planned already."""
        mesh, layout = self._mesh, self.layout
        return PlannedParam(plan, mesh, layout, lambda: self._post_forward(mesh, layout, plan))

    def _mesh_of(self, entry: Managed) -> tuple[DeviceMesh, MeshLayout]:
        param = entry.param
        if not isinstance(param, DTensor) or param.device_mesh == self._mesh:
            return self._mesh, self.layout
        own = param.device_mesh
        if own in self._joined:
            return self._joined[own]
        names, ours = own.mesh_dim_names, self._mesh.mesh_dim_names
        if names is None or ours is None:
            raise PlacementError(
                f"{entry.fqn}: it is a DTensor on another mesh than fully_shard's, and one of the "
                f"two has no dim names; name the dims of the root mesh and slice it"
            )
        if set(names) <= set(ours):
            joined = self._mesh
        elif set(ours) <= set(names):
            joined = own
        elif set(names) & set(ours):
            raise PlacementError(
                f"{entry.fqn}: it is a DTensor on dims {names}, which overlap fully_shard's dims "
                f"{ours} in part; pass the mesh with all dims, or the data dims only"
            )
        else:
            joined = concatenate_meshes([self._mesh, own])
        layout = self.layout
        if joined is not self._mesh:
            layout = MeshLayout.from_mesh(joined, self._policy.roles)
        self._joined[own] = (joined, layout)
        return joined, layout

    def _post_forward(
        self, mesh: DeviceMesh, layout: MeshLayout, plan: ParamPlan
    ) -> PostForward | None:
        size = self._policy.reshard_after_forward
        if size is None or isinstance(size, bool) or size in (1, plan.shard_size):
            return None
        if plan.shard_size == 1:
            return None
        key = (layout, plan.shard_axes)
        if key not in self._splits:
            self._splits[key] = split_shard_axis(mesh, layout, plan.shard_axes, size)
        return self._splits[key]
