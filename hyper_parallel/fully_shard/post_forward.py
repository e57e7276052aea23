"""The smaller group of an integer ``reshard_after_forward``: the shard axis split in two.

Ranks of the shard group are cut into runs of that many neighbours; each run holds the whole
parameter between forward and backward, so that the gather in backward stays inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from hyper_parallel.errors import PolicyError
from hyper_parallel.fully_shard.geometry import ShardGeometry
from hyper_parallel.groups import GroupInfo, get_group_info
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import combine_placements
from hyper_parallel.plan import ParamPlan
from hyper_parallel.torch_compat.distributed import is_shard, unflatten_mesh

__all__ = ["PostForward", "split_shard_axis"]


@dataclass(frozen=True)
class PostForward:
    """Where a parameter lives between forward and backward.

    Attributes:
        mesh: The mesh with the shard axis split into outer and inner dims.
        layout: That mesh as a value.
        base: The mesh before the split.
        axes: The inner dims: the group that holds one copy of the parameter.
        group_info: This rank's group along them.
        size: Its size.
    """

    mesh: DeviceMesh
    layout: MeshLayout
    base: MeshLayout
    axes: tuple[str, ...]
    group_info: GroupInfo
    size: int

    def geometry(self, plan: ParamPlan) -> ShardGeometry:
        """Returns how the unsharded local tensor is cut over the inner dims."""
        assert plan.shard_dim is not None
        index = self.layout.ranks_along(self.axes).index(self.layout.rank)
        return ShardGeometry.even(plan.local_shape, plan.shard_dim, self.size, index)

    def placements(self, plan: ParamPlan) -> tuple[Placement, ...]:
        """Returns the combined placement on the split mesh."""
        assert plan.shard_dim is not None
        pairs = zip(self.base.dim_names, plan.unsharded_placements, strict=True)
        cut = {name: placement for name, placement in pairs if is_shard(placement)}
        sharded, _ = combine_placements(self.layout, cut, self.axes, plan.shard_dim)
        return sharded


def split_shard_axis(
    mesh: DeviceMesh, layout: MeshLayout, shard_axes: tuple[str, ...], size: int
) -> PostForward:
    """Splits the shard axis into runs of ``size`` neighbours; collective over the mesh.

    Args:
        mesh: The mesh.
        layout: The mesh as a value.
        shard_axes: The dims that make up the shard axis, in mesh order.
        size: Ranks of a run.

    Raises:
        PolicyError: ``size`` cuts through the dims in a way that gives no runs.
    """
    axes: list[str] = []
    base = layout
    left = size
    for axis in reversed(shard_axes):
        extent = layout.size(axis)
        if left % extent == 0:
            axes.append(axis)
            left //= extent
        elif extent % left == 0:
            mesh, layout, inner = _split(mesh, layout, axis, left)
            axes.append(inner)
            left = 1
        else:
            raise PolicyError(
                f"reshard_after_forward: {size} does not fit the dims {list(shard_axes)} of mesh "
                f"({layout.describe()}); choose a product of the last sizes"
            )
        if left == 1:
            break
    ordered = layout.axes(axes)
    return PostForward(mesh, layout, base, ordered, get_group_info(mesh, layout, ordered), size)


def _split(
    mesh: DeviceMesh, layout: MeshLayout, axis: str, inner: int
) -> tuple[DeviceMesh, MeshLayout, str]:
    index = layout.dim_names.index(axis)
    names = (f"{axis}_outer", f"{axis}_inner")
    sizes = (layout.shape[index] // inner, inner)
    split = unflatten_mesh(mesh, index, sizes, names)
    roles = replace(
        layout.roles,
        **{
            role: tuple(
                part
                for name in getattr(layout.roles, role)
                for part in (names if name == axis else (name,))
            )
            for role in ("replicate", "shard")
        },
    )
    dims = (*layout.dim_names[:index], *names, *layout.dim_names[index + 1 :])
    shape = (*layout.shape[:index], *sizes, *layout.shape[index + 1 :])
    return split, replace(layout, dim_names=dims, shape=shape, roles=roles), names[1]
