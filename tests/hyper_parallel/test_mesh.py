"""Roles of meshes (the table of docs/roles.md), exact rank lists, hybrid-shard meshes."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hyper_parallel
from hyper_parallel.errors import HPCompileError, MeshError
from hyper_parallel.mesh import (
    RECOGNISED_NAMES,
    MeshLayout,
    MeshRoles,
    ParallelState,
    build_fsdp_meshes,
    infer_roles,
    validate_hybrid_shard_args,
)
from tests.dist_pool import fake_world, run_ranks

KNOWN = (
    "Recognised names are replicate: dp_replicate, replicate, ddp; shard: dp_shard, fsdp, shard, "
    "dp, data; tp: tp, model; ep: ep, expert; cp: cp, context, sp."
)
FIX = "Rename the dims or pass roles, e.g. Policy(roles={'shard': ('dp_shard', 'cp'), 'tp': 'tp'})."


def layout_of(
    names: tuple[str, ...] | None,
    shape: tuple[int, ...],
    rank: int = 0,
    roles: object = None,
) -> MeshLayout:
    found_names, found = infer_roles(names, shape, roles)
    return MeshLayout(found_names, shape, tuple(range(math.prod(shape))), rank, found)


ROLE_TABLE = [
    # One dim.
    ("shard only", ("dp_shard",), (4,), None, MeshRoles(shard="dp_shard")),
    ("plain dp is sharded", ("dp",), (4,), None, MeshRoles(shard="dp")),
    ("replicate only", ("ddp",), (4,), None, MeshRoles(replicate="ddp")),
    ("tp only", ("tp",), (4,), None, MeshRoles(tp="tp")),
    ("unnamed 1D", None, (4,), None, MeshRoles(shard="shard")),
    # Two dims.
    (
        "HSDP",
        ("dp_replicate", "dp_shard"),
        (2, 2),
        None,
        MeshRoles(replicate="dp_replicate", shard="dp_shard"),
    ),
    (
        "HSDP, other order",
        ("fsdp", "replicate"),
        (2, 2),
        None,
        MeshRoles(replicate="replicate", shard="fsdp"),
    ),
    ("dp × tp", ("data", "model"), (2, 2), None, MeshRoles(shard="data", tp="model")),
    ("tp × ep, no data dim", ("tp", "ep"), (2, 2), None, MeshRoles(tp="tp", ep="ep")),
    ("cp only beside tp", ("sp", "tp"), (2, 2), None, MeshRoles(cp="sp", tp="tp")),
    ("unnamed 2D", None, (2, 4), None, MeshRoles(replicate="replicate", shard="shard")),
    # Sizes do not matter.
    ("size-1 shard dim", ("dp_shard", "tp"), (1, 4), None, MeshRoles(shard="dp_shard", tp="tp")),
    ("size-1 tp dim", ("dp_shard", "tp"), (4, 1), None, MeshRoles(shard="dp_shard", tp="tp")),
    (
        "unnamed 2D, one replica",
        None,
        (1, 4),
        None,
        MeshRoles(replicate="replicate", shard="shard"),
    ),
    # Three dims and more.
    (
        "dp × tp × ep",
        ("dp", "tp", "ep"),
        (2, 2, 2),
        None,
        MeshRoles(shard="dp", tp="tp", ep="ep"),
    ),
    (
        "everything",
        ("dp_replicate", "dp_shard", "context", "expert", "model"),
        (2, 2, 2, 2, 2),
        None,
        MeshRoles(
            replicate="dp_replicate", shard="dp_shard", cp="context", ep="expert", tp="model"
        ),
    ),
    # Roles as a mapping go before the names.
    (
        "dims without a meaning",
        ("a", "b"),
        (2, 2),
        {"replicate": "a", "shard": "b"},
        MeshRoles(replicate="a", shard="b"),
    ),
    (
        "only the unknown dim",
        ("pool", "tp"),
        (2, 2),
        {"shard": "pool"},
        MeshRoles(shard="pool", tp="tp"),
    ),
    (
        "two names of one role, said apart",
        ("dp", "fsdp"),
        (2, 2),
        {"replicate": "dp", "shard": "fsdp"},
        MeshRoles(replicate="dp", shard="fsdp"),
    ),
    (
        "two names of one role, said together",
        ("dp", "fsdp"),
        (2, 2),
        {"shard": ("fsdp", "dp")},
        MeshRoles(shard=("dp", "fsdp")),
    ),
    (
        "a role against the name",
        ("dp", "model"),
        (2, 2),
        {"replicate": "model"},
        MeshRoles(shard="dp", replicate="model"),
    ),
    (
        "cp is cut too and stays cp",
        ("dp_shard", "cp"),
        (2, 2),
        {"shard": ("dp_shard", "cp")},
        MeshRoles(shard=("dp_shard", "cp"), cp="cp"),
    ),
    (
        "cp is cut too and is no longer cp",
        ("dp_shard", "cp"),
        (2, 2),
        {"shard": ("dp_shard", "cp"), "cp": ()},
        MeshRoles(shard=("dp_shard", "cp")),
    ),
    (
        "ep is cut too",
        ("dp_shard", "ep"),
        (2, 2),
        {"shard": ["dp_shard", "ep"]},
        MeshRoles(shard=("dp_shard", "ep"), ep="ep"),
    ),
    (
        "experts borrow the shard dim",
        ("dp_shard",),
        (4,),
        {"shard": "dp_shard", "ep": "dp_shard"},
        MeshRoles(shard="dp_shard", ep="dp_shard"),
    ),
    # A MeshRoles is complete.
    (
        "MeshRoles",
        ("dp_shard", "cp"),
        (2, 2),
        MeshRoles(shard=("cp", "dp_shard")),
        MeshRoles(shard=("dp_shard", "cp")),
    ),
]


@pytest.mark.parametrize(
    ("names", "shape", "roles", "expected"),
    [row[1:] for row in ROLE_TABLE],
    ids=[row[0] for row in ROLE_TABLE],
)
def test_roles(names, shape, roles, expected) -> None:
    found_names, found = infer_roles(names, shape, roles)
    assert found == expected
    if names is not None:
        assert found_names == names


def documented_rows() -> list[tuple[str, str, str]]:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text(encoding="utf-8")
    table = text.partition("## Every boundary case")[2].partition("\n## ")[0]
    cells = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in table.splitlines()
        if line.startswith("|")
    ]
    return [(mesh, roles, result) for mesh, roles, result in cells[2:]]


@pytest.mark.parametrize(("mesh", "roles", "result"), documented_rows())
def test_the_documented_table(mesh: str, roles: str, result: str) -> None:
    sizes = mesh.removeprefix("unnamed ").strip("`").split(", ")
    shape = tuple(int(size.rpartition("=")[2]) for size in sizes)
    names = None if "unnamed" in mesh else [size.partition("=")[0] for size in sizes]
    given = eval(roles.strip("`"), {"MeshRoles": MeshRoles}) if roles else None
    if result.startswith("MeshError: "):
        with pytest.raises(MeshError) as caught:
            infer_roles(names, shape, given)
        assert result.removeprefix("MeshError: ") in str(caught.value)
    else:
        assert str(infer_roles(names, shape, given)[1]) == result


def test_the_documented_names() -> None:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text(encoding="utf-8")
    for role, names in RECOGNISED_NAMES.items():
        assert f"| `{role}` | {', '.join(f'`{name}`' for name in names)} |" in text


def test_unnamed_dims_are_called_by_their_roles() -> None:
    assert infer_roles(None, (4,))[0] == ("shard",)
    assert infer_roles(None, (2, 4))[0] == ("replicate", "shard")
    both = infer_roles(None, (2, 4), {"shard": ("replicate", "shard"), "replicate": ()})
    assert both == (("replicate", "shard"), MeshRoles(shard=("replicate", "shard")))


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, names in RECOGNISED_NAMES.items() for name in names]
)
def test_every_recognised_name(role: str, name: str) -> None:
    assert getattr(infer_roles((name,), (2,))[1], role) == (name,)


BAD_ROLES = [
    (
        "unnamed 3D",
        None,
        (2, 2, 2),
        None,
        "unnamed 3D mesh of shape (2, 2, 2): only 1D and 2D meshes have roles without names. Name "
        f"the dims: init_device_mesh(..., mesh_dim_names=(...)). {KNOWN}",
    ),
    (
        "unnamed 3D with roles",
        None,
        (2, 2, 2),
        {"shard": "shard"},
        "unnamed 3D mesh of shape (2, 2, 2): only 1D and 2D meshes have roles without names",
    ),
    (
        "unknown name",
        ("dp_shard", "pp"),
        (2, 2),
        None,
        f"mesh (dp_shard=2, pp=2): dim 'pp' has no role. {FIX} {KNOWN}",
    ),
    (
        "2D without any meaning",
        ("x", "y"),
        (2, 2),
        None,
        f"mesh (x=2, y=2): dim 'x' has no role. {FIX} {KNOWN}",
    ),
    ("a name in capitals", ("DP",), (2,), None, "mesh (DP=2): dim 'DP' has no role"),
    (
        "two shard names",
        ("dp", "fsdp"),
        (2, 4),
        None,
        "mesh (dp=2, fsdp=4): the names 'dp', 'fsdp' all mean shard, so say which it is: "
        "roles={'shard': ('dp', 'fsdp')} makes them one flattened axis, {'replicate': 'dp', "
        f"'shard': 'fsdp'}} makes them HSDP. {FIX} {KNOWN}",
    ),
    (
        "two replicate names",
        ("ddp", "replicate"),
        (2, 4),
        None,
        "mesh (ddp=2, replicate=4): the names 'ddp', 'replicate' all mean replicate, so say which "
        "it is: roles={'replicate': ('ddp', 'replicate')} makes them one flattened axis. ",
    ),
    (
        "two tp names",
        ("tp", "model"),
        (2, 2),
        None,
        "mesh (tp=2, model=2): role tp takes one dim, got 'tp', 'model'. ",
    ),
    (
        "two tp dims said",
        ("a", "b"),
        (2, 2),
        {"tp": ("a", "b")},
        "mesh (a=2, b=2): role tp takes one dim, got 'a', 'b'. ",
    ),
    (
        "roles name a dim that is missing",
        ("dp_shard", "tp"),
        (2, 2),
        {"shard": ("dp_shard", "cp")},
        "mesh (dp_shard=2, tp=2): roles names 'cp', which this mesh lacks. ",
    ),
    (
        "the name's role was given to others",
        ("a", "fsdp"),
        (2, 2),
        {"shard": "a"},
        "mesh (a=2, fsdp=2): dim 'fsdp' has no role: its name means shard, but roles gives shard "
        "to 'a'. ",
    ),
    (
        "a role is given to no dim",
        ("dp", "cp"),
        (2, 2),
        {"cp": ()},
        "mesh (dp=2, cp=2): dim 'cp' has no role: its name means cp, but roles gives cp to no dim.",
    ),
    (
        "MeshRoles leaves a dim out",
        ("dp_shard", "tp"),
        (2, 2),
        MeshRoles(shard="dp_shard"),
        "mesh (dp_shard=2, tp=2): dim 'tp' has no role. ",
    ),
    (
        "shard and replicate at once",
        ("dp",),
        (2,),
        {"shard": "dp", "replicate": "dp"},
        "mesh (dp=2): dim 'dp' cannot be replicate and shard at once; only shard or replicate "
        "combine with cp or ep. ",
    ),
    (
        "tp and shard at once",
        ("dp", "tp"),
        (2, 2),
        {"shard": ("dp", "tp"), "tp": "tp"},
        "mesh (dp=2, tp=2): dim 'tp' cannot be shard and tp at once",
    ),
    (
        "three roles at once",
        ("dp",),
        (2,),
        {"shard": "dp", "cp": "dp", "ep": "dp"},
        "mesh (dp=2): dim 'dp' cannot be cp and ep and shard at once",
    ),
    (
        "unknown role",
        ("dp",),
        (2,),
        {"pipeline": "dp"},
        "roles: unknown role 'pipeline'; the roles are replicate, shard, tp, ep, cp",
    ),
    (
        "roles of another type",
        ("dp",),
        (2,),
        ["dp"],
        "roles: expected a MeshRoles or a mapping from role to dim name(s), got ['dp']",
    ),
    (
        "dims of another type",
        ("dp",),
        (2,),
        {"shard": 0},
        "role 'shard': expected a mesh dim name or a tuple of names, got 0",
    ),
    (
        "dims by index",
        ("dp",),
        (2,),
        {"shard": (0,)},
        "role 'shard': expected mesh dim names (strings), got (0,)",
    ),
    (
        "a dim named twice",
        ("dp",),
        (2,),
        {"shard": ("dp", "dp")},
        "role 'shard' names a mesh dim twice: ('dp', 'dp'); name each dim once",
    ),
    (
        "a mesh with one name twice",
        ("dp", "dp"),
        (2, 2),
        None,
        "mesh (dp=2, dp=2): a dim name occurs twice. ",
    ),
    ("names and sizes differ", ("dp",), (2, 2), None, "1 mesh dim names ('dp',) for 2 dims (2, 2)"),
    ("no dims", (), (), None, "a mesh has at least one dim and positive sizes, got shape ()"),
    ("empty dim", ("dp",), (0,), None, "a mesh has at least one dim and positive sizes"),
]


@pytest.mark.parametrize(
    ("names", "shape", "roles", "text"),
    [row[1:] for row in BAD_ROLES],
    ids=[r[0] for r in BAD_ROLES],
)
def test_roles_that_do_not_fit(names, shape, roles, text) -> None:
    with pytest.raises(MeshError) as caught:
        infer_roles(names, shape, roles)
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value, HPCompileError)
    assert isinstance(caught.value, ValueError)


def test_roles_are_read_and_printed() -> None:
    roles = MeshRoles(replicate="r", shard=["s", "c"], cp="c")
    assert roles.shard == ("s", "c")
    assert roles.of("c") == ("shard", "cp")
    assert roles.of("nothing") == ()
    assert str(roles) == "replicate=r, shard=s×c, cp=c"
    assert str(MeshRoles()) == "no roles"
    assert hash(roles) == hash(MeshRoles(replicate=("r",), shard=("s", "c"), cp=("c",)))


# ---- layouts ----------------------------------------------------------------------------------


def test_exact_rank_lists() -> None:
    layout = layout_of(("dp_replicate", "dp_shard", "tp"), (2, 2, 2), rank=5)
    assert layout.coordinate == (1, 0, 1)
    assert layout.ranks_along("dp_shard") == (5, 7)
    assert layout.ranks_along("dp_replicate") == (1, 5)
    assert layout.ranks_along("tp") == (4, 5)
    assert layout.ranks_along(()) == (5,)
    # Several axes: row-major in mesh order, whatever order they are asked in.
    assert layout.ranks_along(("dp_replicate", "dp_shard")) == (1, 3, 5, 7)
    assert layout.ranks_along(("dp_shard", "dp_replicate")) == (1, 3, 5, 7)
    assert layout.ranks_along(("tp", "dp_replicate")) == (0, 1, 4, 5)
    assert layout.ranks_along(layout.dim_names) == tuple(range(8))


def test_other_mesh_order_gives_other_ranks() -> None:
    layout = layout_of(("tp", "dp_shard", "dp_replicate"), (2, 2, 2), rank=5)
    assert layout.ranks_along("dp_shard") == (5, 7)
    assert layout.ranks_along("dp_replicate") == (4, 5)
    assert layout.ranks_along(("dp_replicate", "dp_shard")) == (4, 5, 6, 7)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_are_rows_of_the_rank_tensor(shape: list[int], data: st.DataObject) -> None:
    """Against numpy-style indexing: a group is the rank tensor with all other dims fixed."""
    world = math.prod(shape)
    ranks = data.draw(st.permutations(range(world)))
    names = tuple(f"d{i}" for i in range(len(shape)))
    rank = data.draw(st.integers(0, world - 1))
    layout = MeshLayout(names, tuple(shape), tuple(ranks), rank, MeshRoles(shard=names))
    tensor = torch.tensor(ranks).view(shape)
    where = tuple((tensor == rank).nonzero()[0].tolist())
    axes = tuple(name for name in names if data.draw(st.booleans()))
    index = tuple(slice(None) if n in axes else i for n, i in zip(names, where, strict=True))
    assert layout.coordinate == where
    assert layout.ranks_along(reversed(axes)) == tuple(tensor[index].flatten().tolist())
    assert layout.size(axes) == len(layout.ranks_along(axes))


def test_groups_of_an_axis_partition_the_mesh() -> None:
    layouts = [layout_of(("dp_replicate", "dp_shard", "tp"), (2, 3, 2), r) for r in range(12)]
    groups = {layout.ranks_along(("dp_replicate", "tp")) for layout in layouts}
    assert sorted(rank for group in groups for rank in group) == list(range(12))
    assert all(layout.rank in layout.ranks_along("tp") for layout in layouts)


@pytest.mark.parametrize(
    ("names", "roles", "batch"),
    [
        (("dp_replicate", "dp_shard", "tp"), None, ("dp_replicate", "dp_shard")),
        (("tp", "dp_shard", "dp_replicate"), None, ("dp_shard", "dp_replicate")),
        (("dp_shard", "cp", "tp"), None, ("dp_shard", "cp")),
        (("dp_shard", "cp", "tp"), {"shard": ("dp_shard", "cp")}, ("dp_shard", "cp")),
        (("dp_shard", "ep", "tp"), None, ("dp_shard",)),
        (("dp_shard", "ep", "tp"), {"shard": ("dp_shard", "ep")}, ("dp_shard", "ep")),
        (("dp_shard", "ep", "tp"), {"replicate": "ep"}, ("dp_shard", "ep")),
    ],
)
def test_batch_dims(names, roles, batch) -> None:
    assert layout_of(names, (2,) * 3, roles=roles).batch_dims == batch


def test_a_layout_is_a_value() -> None:
    layout = layout_of(("dp_shard", "tp"), (2, 2), rank=1)
    same = layout_of(("dp_shard", "tp"), (2, 2), rank=1)
    layout.ranks_along("tp")
    assert layout == same
    assert hash(layout) == hash(same)
    assert pickle.loads(pickle.dumps(layout)) == layout
    other = layout_of(("dp_shard", "tp"), (2, 2), rank=2)
    assert layout != other
    # Names of groups and the digest do not depend on the rank, so programs do not either.
    assert layout.digest == other.digest
    assert layout.group_name(("tp", "dp_shard")) == f"hp:dp_shard.tp:{layout.digest}"
    assert layout.digest != layout_of(("dp_shard", "tp"), (4, 1)).digest
    assert len(layout.digest) == 8
    assert int(layout.digest, 16) >= 0


def test_axes_that_do_not_exist() -> None:
    layout = layout_of(("dp_shard", "tp"), (2, 2))
    assert layout.axes({"tp", "dp_shard"}) == ("dp_shard", "tp")
    with pytest.raises(MeshError, match=r"mesh \(dp_shard=2, tp=2\) has no dim 'cp', 'ep'"):
        layout.size(("ep", "tp", "cp"))


def test_rank_that_is_not_in_the_mesh() -> None:
    with pytest.raises(
        MeshError, match=r"rank 8 is not in the mesh \(dp=8\); only its ranks \[0, 1, 2, 3, 4, 5, 6"
    ):
        layout_of(("dp",), (8,), rank=8)
    with pytest.raises(MeshError, match=r"\[0, 1, …, 63\] \(64 ranks\)"):
        layout_of(("dp",), (64,), rank=64)
    with fake_world(8, rank=6):
        mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("dp",))
        with pytest.raises(MeshError, match=r"rank 6 is not in the mesh \(dp=4\)"):
            MeshLayout.from_mesh(mesh)
        assert MeshLayout.from_mesh(mesh, rank=2).rank == 2


def test_ranks_that_do_not_fit_the_shape() -> None:
    with pytest.raises(MeshError, match=r"mesh dims \('dp',\) of shape \(4,\) hold 4 ranks, got 3"):
        MeshLayout(("dp",), (4,), (0, 1, 2), 0, MeshRoles(shard="dp"))
    with pytest.raises(MeshError, match="a rank occurs twice in the mesh"):
        MeshLayout(("dp",), (2,), (1, 1), 1, MeshRoles(shard="dp"))


def test_layout_of_a_device_mesh() -> None:
    with fake_world(16, rank=13):
        mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        layout = MeshLayout.from_mesh(mesh)
        assert layout == layout_of(mesh.mesh_dim_names, (2, 4, 2), rank=13)
        for axis in mesh.mesh_dim_names:
            group = dist.get_process_group_ranks(mesh.get_group(axis))
            assert layout.ranks_along(axis) == tuple(group)
        part = MeshLayout.from_mesh(mesh["dp_shard", "tp"])
        assert part.ranks == tuple(range(8, 16))
        assert part.coordinate == (2, 1)
        with torch.device("meta"), FakeTensorMode():
            assert MeshLayout.from_mesh(mesh) == layout


def test_layout_of_an_unnamed_mesh() -> None:
    with fake_world(8, rank=5):
        layout = MeshLayout.from_mesh(init_device_mesh("cpu", (2, 4)))
        assert layout.ranks_along("shard") == (4, 5, 6, 7)
        assert layout.ranks_along("replicate") == (1, 5)


def test_large_meshes_need_no_process_group() -> None:
    names, shape = ("dp_replicate", "dp_shard", "tp"), (16, 128, 8)
    layout = layout_of(names, shape, rank=9001)
    assert layout.coordinate == (8, 101, 1)
    assert layout.ranks_along("dp_replicate") == tuple(range(9001 % 1024, 16384, 1024))
    assert layout.ranks_along("dp_shard")[:2] == (8193, 8201)


def test_only_a_device_mesh_is_a_mesh() -> None:
    with pytest.raises(MeshError, match=r"mesh: expected a DeviceMesh, got tuple \(2, 2\)"):
        MeshLayout.from_mesh((2, 2))


# ---- hybrid sharding --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "cp", "replicate", "names", "shape"),
    [
        (4, 1, 1, ("dp",), (4,)),
        (4, 1, 2, ("dp_replicate", "dp_shard"), (2, 2)),
        (4, 1, 4, ("dp_replicate", "dp_shard"), (4, 1)),
        (8, 2, 1, ("dp_shard",), (8,)),
        (8, 2, 2, ("dp_replicate", "dp_shard"), (2, 4)),
        (8, 4, 2, ("dp_replicate", "dp_shard"), (2, 4)),
        (8, 8, 1, ("dp_shard",), (8,)),
        (1, 1, 1, ("dp",), (1,)),
    ],
)
def test_hybrid_shard_meshes(world: int, cp: int, replicate: int, names, shape) -> None:
    for rank in {0, world // 2, world - 1}:
        with fake_world(world, rank):
            meshes = build_fsdp_meshes("cpu", world, cp, replicate)
            assert list(meshes) == ["dp_cp", "dp", "cp", "fsdp"]
            assert meshes["dp_cp"].mesh.tolist() == torch.arange(world).view(-1, cp).tolist()
            assert meshes["dp"].size() == world // cp
            assert meshes["cp"].mesh.tolist() == [rank // cp * cp + i for i in range(cp)]
            fsdp = meshes["fsdp"]
            assert (fsdp.mesh_dim_names, tuple(fsdp.shape)) == (names, shape)
            assert fsdp.mesh.flatten().tolist() == list(range(world))
            # Its roles need no words, and its groups are the ones the layout says.
            layout = MeshLayout.from_mesh(fsdp)
            assert layout.size(layout.batch_dims) == world
            for axis in names:
                group = dist.get_process_group_ranks(fsdp.get_group(axis))
                assert tuple(group) == layout.ranks_along(axis)


def test_context_ranks_shard_parameters_together() -> None:
    """8 ranks, context 2, 2 replicas: a shard group is two dp ranks times their cp ranks."""
    with fake_world(8, rank=5):
        meshes = build_fsdp_meshes("cpu", 8, 2, 2)
        layout = MeshLayout.from_mesh(meshes["fsdp"])
        assert meshes["dp"].mesh.tolist() == [1, 3, 5, 7]
        assert layout.ranks_along("dp_shard") == (4, 5, 6, 7)
        assert layout.ranks_along("dp_replicate") == (1, 5)


BAD_HYBRID = [
    (8, 1, 0, "dp_replicate_size must be at least 1, got 0"),
    (8, 1, -2, "dp_replicate_size must be at least 1, got -2"),
    (8, 0, 1, "context_parallel_size must be at least 1, got 0"),
    (0, 1, 1, "world_size must be at least 1, got 0"),
    (8, 3, 1, "world_size(8) must be divisible by context_parallel_size(3)"),
    (8, 1, 3, "data_parallel_size(8) must be divisible by dp_replicate_size(3)"),
    (8, 2, 8, "data_parallel_size(4) must be divisible by dp_replicate_size(8)"),
    (8, 1, 2.0, "dp_replicate_size must be an int, got 2.0 of type float"),
    (8, True, 2, "context_parallel_size must be an int, got True of type bool"),
]


@pytest.mark.parametrize(("world", "cp", "replicate", "text"), BAD_HYBRID)
def test_hybrid_sizes_that_do_not_fit(world, cp, replicate, text) -> None:
    args = SimpleNamespace(
        actor_num_nodes=2 if world == 8 else 1,
        actor_num_gpus_per_node=world // 2 if world == 8 else world,
        context_parallel_size=cp,
        dp_replicate_size=replicate,
    )
    with pytest.raises(MeshError) as caught:
        validate_hybrid_shard_args(args)
    assert str(caught.value) == text
    with pytest.raises(ValueError) as built:
        build_fsdp_meshes("cpu", world, cp, replicate)
    assert str(built.value) == text


def test_hybrid_arguments_that_fit() -> None:
    args = SimpleNamespace(world_size=8, context_parallel_size=2, dp_replicate_size=4)
    assert validate_hybrid_shard_args(args) is None


def test_parallel_state() -> None:
    with fake_world(4):
        meshes = build_fsdp_meshes("cpu", 4, 1, 2)
        state = ParallelState(meshes)
        assert state.get_mesh("fsdp") is meshes["fsdp"]
        with pytest.raises(
            MeshError, match="no mesh is called 'tp'; the meshes are cp, dp, dp_cp, fsdp"
        ):
            state.get_mesh("tp")


def sum_over_views(rank: int, world_size: int) -> dict[str, list[float]]:
    meshes = build_fsdp_meshes("cpu", world_size, 2, 2)
    sums = {}
    for name in ("dp", "cp"):
        value = torch.tensor(float(2**rank))
        dist.all_reduce(value, group=meshes[name].get_group())
        sums[name] = value.item()
    for axis in ("dp_replicate", "dp_shard"):
        value = torch.tensor(float(2**rank))
        dist.all_reduce(value, group=meshes["fsdp"].get_group(axis))
        sums[axis] = value.item()
    return sums


@pytest.mark.dist
def test_groups_of_hybrid_meshes_reduce_what_they_say() -> None:
    """Every rank contributes a bit, so a sum names the ranks that took part."""

    def bits(ranks: list[int]) -> float:
        return float(sum(2**r for r in ranks))

    for rank, sums in enumerate(run_ranks(sum_over_views, 4)):
        assert sums == {
            "dp": bits([rank % 2, rank % 2 + 2]),
            "cp": bits([rank // 2 * 2, rank // 2 * 2 + 1]),
            "dp_replicate": bits([rank % 2, rank % 2 + 2]),
            "dp_shard": bits([rank // 2 * 2, rank // 2 * 2 + 1]),
        }


def test_the_package_exports_the_vocabulary() -> None:
    for name in hyper_parallel.__all__:
        assert getattr(hyper_parallel, name) is not None
