"""Process groups of a mesh: exact ranks, made once, found by one name on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel.errors import MeshError
from hyper_parallel.groups import GroupInfo, clear_group_cache, get_group_info
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import plan_params
from hyper_parallel.policy import Policy
from tests.dist_pool import fake_world, local_ranks, run_ranks

NAMES = ("dp_replicate", "dp_shard", "tp")


def mesh_and_layout(
    shape: tuple[int, ...] = (2, 2, 2), names: tuple[str, ...] | None = NAMES
) -> tuple[DeviceMesh, MeshLayout]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh, MeshLayout.from_mesh(mesh)


def ranks_of(info: GroupInfo) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(info.group))


@pytest.fixture
def new_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The rank lists of the groups made, as seen by this process."""
    made: list[tuple[int, ...]] = []
    original = dist.new_group

    def count(ranks=None, *args, **kwargs):
        if ranks is not None and dist.get_rank() in ranks:
            made.append(tuple(ranks))
        return original(ranks, *args, **kwargs)

    monkeypatch.setattr("torch.distributed.device_mesh.new_group", count)
    monkeypatch.setattr(dist, "new_group", count)
    return made


@pytest.mark.parametrize("rank", range(8))
def test_groups_have_the_ranks_of_the_layout(rank: int) -> None:
    with fake_world(8, rank):
        mesh, layout = mesh_and_layout()
        for axes in (
            ("dp_shard",),
            ("tp",),
            ("dp_replicate", "dp_shard"),
            ("tp", "dp_replicate"),
            NAMES,
        ):
            info = get_group_info(mesh, layout, axes)
            assert ranks_of(info) == layout.ranks_along(axes)
            assert info.rank_size == len(layout.ranks_along(axes))
            assert info.group_name == layout.group_name(axes)


def test_rank_5_of_a_3d_mesh() -> None:
    with fake_world(8, 5):
        mesh, layout = mesh_and_layout()
        assert ranks_of(get_group_info(mesh, layout, "dp_shard")) == (5, 7)
        assert ranks_of(get_group_info(mesh, layout, "dp_replicate")) == (1, 5)


def test_one_dim_reuses_the_mesh_s_group(new_groups: list) -> None:
    with fake_world(8, 5):
        mesh, layout = mesh_and_layout()
        new_groups.clear()
        assert get_group_info(mesh, layout, "tp").group is mesh.get_group("tp")
        assert new_groups == []


def test_many_parameters_make_few_groups(new_groups: list) -> None:
    with fake_world(16, 9):
        mesh = init_device_mesh(
            "cpu", (2, 2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp")
        )
        layout = MeshLayout.from_mesh(mesh, {"shard": ("dp_shard", "cp")})
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
        new_groups.clear()
        known = dist.distributed_c10d._world.pg_map.copy()
        policy = Policy(min_shard_numel=5)  # biases stay whole: another replica group
        for _ in range(2):
            for plan in plan_params(model, layout, policy).values():
                sharded = get_group_info(mesh, layout, plan.shard_axes)
                replicas = get_group_info(mesh, layout, plan.replica_axes)
                assert replicas.rank_size == plan.dp_size
                assert sharded.rank_size == plan.shard_size
                if plan.shard_size > 1:
                    assert ranks_of(sharded) == plan.sharded_ranks
                assert ranks_of(replicas) == plan.unsharded_ranks
        assert new_groups == [(9, 11, 13, 15), (1, 3, 5, 7, 9, 11, 13, 15)]
        assert len(dist.distributed_c10d._world.pg_map) - len(known) == 2


def test_a_group_of_one_is_no_group(new_groups: list) -> None:
    with fake_world(4, 3):
        mesh, layout = mesh_and_layout((1, 4, 1))
        new_groups.clear()
        for axes in ((), ("dp_replicate",), ("tp", "dp_replicate")):
            info = get_group_info(mesh, layout, axes)
            assert (info.group, info.rank_size) == (None, 1)
        # Dims of size 1 beside another dim cost nothing either.
        info = get_group_info(mesh, layout, ("dp_replicate", "dp_shard"))
        assert info.group is mesh.get_group("dp_shard")
        assert info.group_name == layout.group_name(("dp_replicate", "dp_shard"))
        assert new_groups == []


def test_a_flattened_mesh_of_the_user_is_used(new_groups: list) -> None:
    with fake_world(8, 5):
        mesh, layout = mesh_and_layout()
        flat = mesh["dp_replicate", "dp_shard"]._flatten("my_dp")
        new_groups.clear()
        info = get_group_info(mesh, layout, ("dp_shard", "dp_replicate"))
        assert info.group is flat.get_group()
        assert new_groups == []


def test_the_user_may_flatten_afterwards() -> None:
    """Our own name for the flattened dim leaves the default name free."""
    with fake_world(8, 5):
        mesh, layout = mesh_and_layout()
        get_group_info(mesh, layout, ("dp_replicate", "dp_shard"))
        flat = mesh["dp_shard", "tp"]._flatten("dp_replicate_dp_shard")
        assert flat.size() == layout.size(("dp_shard", "tp"))


@pytest.mark.parametrize("world", [8, 16])
def test_unnamed_meshes(world: int) -> None:
    """Also a mesh that holds only a part of the world."""
    with fake_world(world, 6):
        mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4))
        layout = MeshLayout.from_mesh(mesh)
        assert ranks_of(get_group_info(mesh, layout, "shard")) == (4, 5, 6, 7)
        assert ranks_of(get_group_info(mesh, layout, "replicate")) == (2, 6)
        both = get_group_info(mesh, layout, ("replicate", "shard"))
        assert ranks_of(both) == tuple(range(8))
        assert get_group_info(mesh, layout, ("shard", "replicate")).group is both.group


def test_slices_of_a_mesh() -> None:
    with fake_world(16, 13):
        root = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", *NAMES))
        mesh = root[NAMES]
        layout = MeshLayout.from_mesh(mesh)
        assert layout.ranks == tuple(range(8, 16))
        for axes in (("dp_shard",), ("dp_replicate", "dp_shard"), ("dp_shard", "tp"), NAMES):
            assert ranks_of(get_group_info(mesh, layout, axes)) == layout.ranks_along(axes)


def test_a_layout_of_another_rank_is_refused() -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        layout = MeshLayout.from_mesh(mesh, rank=0)
        with pytest.raises(MeshError) as caught:
            get_group_info(mesh, layout, "dp_shard")
        assert str(caught.value) == (
            "group along ('dp_shard',) of mesh (dp_replicate=2, dp_shard=2, tp=2): the process "
            "group has ranks [5, 7], the layout of rank 0 says [0, 2]; pass the mesh that the "
            "layout was read from"
        )


def test_groups_do_not_outlive_the_world(new_groups: list) -> None:
    axes = ("dp_replicate", "dp_shard")
    with fake_world(8, 5):
        mesh, layout = mesh_and_layout()
        first = get_group_info(mesh, layout, axes)
    for rank in (5, 2):  # the same layout again, then another rank of it
        with fake_world(8, rank):
            mesh, layout = mesh_and_layout()
            again = get_group_info(mesh, layout, axes)
            assert again.group is not first.group
            assert ranks_of(again) == layout.ranks_along(axes)
            resolved = funcol._resolve_group_name(again.group_name)
            assert resolved == again.group_name


def test_a_group_that_was_destroyed_is_made_again() -> None:
    with fake_world(8, 5):
        mesh, layout = mesh_and_layout()
        info = get_group_info(mesh, layout, ("dp_replicate", "dp_shard"))
        dist.destroy_process_group(info.group)
        mesh, layout = mesh_and_layout()
        again = get_group_info(mesh, layout, ("dp_replicate", "dp_shard"))
        assert again.group is not info.group
        assert ranks_of(again) == (1, 3, 5, 7)


def test_the_cache_can_be_cleared() -> None:
    with fake_world(8, 5):
        mesh, layout = mesh_and_layout()
        info = get_group_info(mesh, layout, ("dp_replicate", "dp_shard"))
        clear_group_cache()
        again = get_group_info(mesh, layout, ("dp_replicate", "dp_shard"))
        assert again.group_name == info.group_name
        assert ranks_of(again) == ranks_of(info)


def use_the_alias(rank: int, world_size: int) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_shard", "tp"))
    layout = MeshLayout.from_mesh(mesh)
    answers = {}
    for axes in ("dp_shard", ("dp_shard", "tp")):
        name = get_group_info(mesh, layout, axes).group_name
        value = torch.tensor([float(rank)])
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(value, layout.size(axes), name)
        gathered = torch.ops._c10d_functional.wait_tensor(gathered)
        answers[name] = gathered.tolist()
    return answers


@pytest.mark.dist
def test_functional_collectives_find_groups_by_alias() -> None:
    answers = run_ranks(use_the_alias, 4)
    assert len({tuple(answer) for answer in answers}) == 1  # the names are the same on all ranks
    for rank, answer in enumerate(answers):
        pair, everyone = answer.values()
        assert pair == [rank % 2, rank % 2 + 2]
        assert everyone == [0, 1, 2, 3]


def twice(rank: int, world_size: int) -> list[list[float]]:
    """Make groups, destroy the world, make it anew, make the groups again."""
    sums = []
    for attempt in range(2):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=NAMES)
        layout = MeshLayout.from_mesh(mesh)
        info = get_group_info(mesh, layout, ("dp_replicate", "tp"))
        value = torch.tensor([2.0**rank])
        dist.all_reduce(value, group=info.group)
        sums.append(value.tolist())
        if attempt == 0:
            dist.barrier()
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("again", store),
                rank=rank,
                world_size=world_size,
            )
    return sums


@pytest.mark.dist
def test_groups_after_teardown_with_real_processes() -> None:
    assert run_ranks(twice, 4) == [[[15.0], [15.0]]] * 4


def test_aliases_work_with_all_ranks_in_one_process() -> None:
    with local_ranks(4) as mode:
        mesh, layout = mesh_and_layout((2, 2), ("dp_shard", "tp"))
        name = get_group_info(mesh, layout, ("dp_shard", "tp")).group_name
        value = mode.rank_map(lambda rank: torch.tensor([2.0**rank]))
        total = torch.ops._c10d_functional.all_reduce(value, "sum", name)
        total = torch.ops._c10d_functional.wait_tensor(total)
        assert total.reconcile().tolist() == [15.0]
