"""Combined placements, against DTensor's own reading of them and against torch.chunk."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from hyper_parallel.errors import MeshError, PlacementError
from hyper_parallel.mesh import MeshLayout, MeshRoles
from hyper_parallel.placement import (
    combine_placements,
    dtensor_placements,
    format_placements,
    local_shape,
    model_parallel_placements,
    shard_lengths,
    shard_offsets,
    take_model_parallel_part,
    take_shard,
)
from hyper_parallel.plan import plan_param
from hyper_parallel.policy import Policy
from hyper_parallel.torch_compat.distributed import strided_shard
from tests.dist_pool import fake_world, local_ranks, run_ranks

# Mesh orders that users have: data dims left of tp, right of it, around it, two shard dims, ep.
ORDERS = {
    "dp_shard,tp": MeshRoles(shard="dp_shard", tp="tp"),
    "tp,dp_shard": MeshRoles(shard="dp_shard", tp="tp"),
    "dp_replicate,dp_shard,tp": MeshRoles(replicate="dp_replicate", shard="dp_shard", tp="tp"),
    "dp_shard,cp,tp": MeshRoles(shard=("dp_shard", "cp"), cp="cp", tp="tp"),
    "dp_shard,tp,cp": MeshRoles(shard=("dp_shard", "cp"), cp="cp", tp="tp"),
    "tp,dp_shard,cp": MeshRoles(shard=("dp_shard", "cp"), cp="cp", tp="tp"),
    "dp_shard,ep,tp": MeshRoles(shard="dp_shard", ep="ep", tp="tp"),
    "ep,tp,dp_shard": MeshRoles(shard=("dp_shard", "ep"), ep="ep", tp="tp"),
}


def layout_of(order: str, shape: tuple[int, ...], rank: int = 0) -> MeshLayout:
    names = tuple(order.split(","))
    return MeshLayout(names, shape, tuple(range(math.prod(shape))), rank, ORDERS[order])


def nested_chunks(tensor: torch.Tensor, factors: list[int], dim: int) -> list[torch.Tensor]:
    """The shards as FSDP defines them: torch.chunk once per mesh dim, empty ones filled in."""
    parts = [tensor]
    for factor in factors:
        cut = []
        for part in parts:
            chunks = list(torch.chunk(part, factor, dim=dim))
            empty = part.narrow(dim, part.shape[dim], 0)
            cut += chunks + [empty] * (factor - len(chunks))
        parts = cut
    return parts


@pytest.mark.parametrize(
    ("size", "factors", "lengths"),
    [
        (10, (4,), (3, 3, 3, 1)),
        (10, (2, 2), (3, 2, 3, 2)),
        (5, (4,), (2, 2, 1, 0)),
        (2, (4,), (1, 1, 0, 0)),
        (0, (3,), (0, 0, 0)),
        (7, (1,), (7,)),
        (7, (), (7,)),
        (7, (1, 2, 1), (4, 3)),
    ],
)
def test_shard_lengths_follow_chunk(
    size: int, factors: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    assert shard_lengths(size, factors) == lengths
    offsets = shard_offsets(size, factors)
    assert offsets[0] == 0
    assert [a + n for a, n in zip(offsets, lengths, strict=True)] == [*offsets[1:], size]


@given(st.integers(0, 70), st.lists(st.integers(1, 6), max_size=3))
def test_shard_lengths_equal_torch_chunk(size: int, factors: list[int]) -> None:
    parts = nested_chunks(torch.arange(size), factors, 0)
    assert shard_lengths(size, factors) == tuple(len(part) for part in parts)
    assert torch.cat(parts).tolist() == list(range(size))


@pytest.mark.parametrize(
    ("order", "mp", "shard_dim", "text", "unsharded"),
    [
        ("dp_shard,tp", {}, 0, "[S(0), R]", "[R, R]"),
        ("dp_shard,tp", {"tp": Shard(1)}, 0, "[S(0), S(1)]", "[R, S(1)]"),
        ("dp_shard,tp", {"tp": Shard(0)}, 0, "[_S(0,2), S(0)]", "[R, S(0)]"),
        ("dp_shard,tp", {"tp": Shard(1)}, 1, "[_S(1,2), S(1)]", "[R, S(1)]"),
        ("tp,dp_shard", {"tp": Shard(0)}, 0, "[S(0), S(0)]", "[S(0), R]"),
        ("dp_replicate,dp_shard,tp", {"tp": Shard(0)}, 0, "[R, _S(0,2), S(0)]", "[R, R, S(0)]"),
        ("dp_shard,cp,tp", {"tp": Shard(0)}, 0, "[_S(0,2), _S(0,2), S(0)]", "[R, R, S(0)]"),
        ("dp_shard,tp,cp", {"tp": Shard(0)}, 0, "[_S(0,2), S(0), S(0)]", "[R, S(0), R]"),
        (
            "dp_shard,ep,tp",
            {"ep": Shard(0), "tp": Shard(0)},
            0,
            "[_S(0,4), S(0), S(0)]",
            "[R, S(0), S(0)]",
        ),
        ("dp_shard,ep,tp", {"ep": Shard(0)}, None, "[R, S(0), R]", "[R, S(0), R]"),
    ],
)
def test_combined_placement_text(
    order: str, mp: dict[str, Placement], shard_dim: int | None, text: str, unsharded: str
) -> None:
    layout = layout_of(order, (2,) * len(order.split(",")))
    placements, whole = combine_placements(layout, mp, layout.roles.shard, shard_dim)
    assert format_placements(placements) == text
    assert format_placements(whole) == unsharded


def test_odd_placements_are_still_printed() -> None:
    assert format_placements([Partial("sum")]) == "[P(sum)]"


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], dict[str, int], int, tuple[int, int]]:
    """A mesh order and sizes, the dims that TP/EP cut, the dim that FSDP cuts, and a shape."""
    order = draw(st.sampled_from(sorted(ORDERS)))
    names = order.split(",")
    shape = tuple(draw(st.integers(1, 3)) for _ in names)
    mp = {name: draw(st.integers(0, 1)) for name in names if name in ("tp", "ep")}
    mp = {name: dim for name, dim in mp.items() if draw(st.booleans())}
    size = [draw(st.integers(1, 7)), draw(st.integers(1, 7))]
    for name, dim in mp.items():
        size[dim] *= shape[names.index(name)]
    return order, shape, mp, draw(st.integers(0, 1)), (size[0], size[1])


@settings(max_examples=80, deadline=None)
@given(cases())
def test_local_shards_equal_distribute_tensor(
    case: tuple[str, tuple[int, ...], dict[str, int], int, tuple[int, int]],
) -> None:
    order, shape, mp, shard_dim, size = case
    full = torch.arange(math.prod(size)).view(size)
    world = math.prod(shape)
    policy = Policy(shard_placement_fn=lambda _: Shard(shard_dim))
    placed: dict[str, Placement] = {name: Shard(dim) for name, dim in mp.items()}
    ranks = torch.arange(world).view(shape)
    with fake_world(world):
        for rank in range(world):
            layout = layout_of(order, shape, rank)
            plan = plan_param("w", full, layout=layout, policy=policy, mp_placements=placed)
            mesh = DeviceMesh(
                "cpu", ranks, mesh_dim_names=layout.dim_names, _init_backend=False, _rank=rank
            )
            expected = distribute_tensor(full, mesh, plan.placements, src_data_rank=None)
            unsharded = take_model_parallel_part(full, layout, plan.unsharded_placements)
            assert unsharded.shape == plan.local_shape
            assert plan.shard_dim == shard_dim
            local = take_shard(unsharded, shard_dim, plan.lengths, plan.shard_index)
            assert local.shape == plan.shard_shape
            assert torch.equal(local, expected.to_local())
            # ... and what is meant: FSDP chunks what TP and EP left.
            chunks = nested_chunks(
                unsharded, [layout.size(axis) for axis in plan.shard_axes], shard_dim
            )
            assert torch.equal(local, chunks[plan.shard_index])
            assert tuple(chunk.shape[shard_dim] for chunk in chunks) == plan.lengths
            assert plan.padded_shard_shape == tuple(
                max(chunk.shape[d] for chunk in chunks) for d in range(2)
            )


def test_strided_expert_plan_is_sliced_like_dtensor() -> None:
    """An EP plan may itself be strided, when EP cuts after TP on the same dim."""
    full = torch.arange(24).view(12, 2)
    placements = [Replicate(), strided_shard(0, 2), Shard(0)]
    ranks = torch.arange(12).view(2, 3, 2)
    with fake_world(12):
        for rank in range(12):
            layout = layout_of("dp_shard,ep,tp", (2, 3, 2), rank)
            mesh = DeviceMesh(
                "cpu", ranks, mesh_dim_names=layout.dim_names, _init_backend=False, _rank=rank
            )
            expected = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
            assert torch.equal(take_model_parallel_part(full, layout, placements), expected)


FULL_CASES = [
    ("dp_shard,tp", (2, 2), (10, 3), {"tp": Shard(0)}, 0),
    ("dp_shard,tp", (2, 2), (3, 10), {"tp": Shard(1)}, 1),
    ("tp,dp_shard", (2, 2), (10, 3), {"tp": Shard(0)}, 0),
    ("dp_shard,tp", (2, 2), (1, 4), {"tp": Shard(1)}, 0),
    ("dp_shard,cp,tp", (2, 2, 1), (5, 2), {}, 0),
    ("dp_shard,tp,cp", (2, 2, 1), (6, 2), {"tp": Shard(0)}, 0),
    ("dp_shard,tp", (4, 1), (10, 3), {}, 0),
    ("dp_shard,tp", (4, 1), (2, 3), {"tp": Shard(0)}, 0),
]
FULL_CASES_8 = [
    ("dp_replicate,dp_shard,tp", (2, 2, 2), (10, 3), {"tp": Shard(0)}, 0),
    ("dp_shard,cp,tp", (2, 2, 2), (14, 3), {"tp": Shard(0)}, 0),
    ("dp_shard,tp,cp", (2, 2, 2), (14, 3), {"tp": Shard(0)}, 0),
    ("dp_shard,ep,tp", (2, 2, 2), (20, 3), {"ep": Shard(0), "tp": Shard(0)}, 0),
]


def build_dtensor(
    full: torch.Tensor,
    mesh: DeviceMesh,
    layout: MeshLayout,
    mp: dict[str, Placement],
    shard_dim: int,
) -> DTensor:
    policy = Policy(shard_placement_fn=lambda _: Shard(shard_dim))
    plan = plan_param("w", full, layout=layout, policy=policy, mp_placements=mp)
    local = take_model_parallel_part(full, layout, plan.unsharded_placements)
    local = take_shard(local, shard_dim, plan.lengths, plan.shard_index).contiguous()
    return DTensor.from_local(
        local, mesh, plan.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def check_full_tensors(rank: int, world_size: int, cases: list) -> list[bool]:
    same = []
    for order, shape, size, mp, shard_dim in cases:
        full = torch.arange(float(math.prod(size))).view(size)
        names = tuple(order.split(","))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        layout = MeshLayout.from_mesh(mesh, ORDERS[order])
        dtensor = build_dtensor(full, mesh, layout, mp, shard_dim)
        same.append(torch.equal(dtensor.full_tensor(), full))
    return same


@pytest.mark.dist
@pytest.mark.parametrize(("world", "cases"), [(4, FULL_CASES), (8, FULL_CASES_8)])
def test_full_tensor_restores_the_parameter(world: int, cases: list) -> None:
    answers = run_ranks(check_full_tensors, world, cases)
    assert answers == [[True] * len(cases)] * world


@pytest.mark.parametrize("case", FULL_CASES + FULL_CASES_8, ids=str)
def test_full_tensor_with_all_ranks_in_one_process(case: tuple) -> None:
    order, shape, size, mp, shard_dim = case
    names, world = tuple(order.split(",")), math.prod(shape)
    full = torch.arange(float(math.prod(size))).view(size)
    layouts = [layout_of(order, shape, rank) for rank in range(world)]
    policy = Policy(shard_placement_fn=lambda _: Shard(shard_dim))
    plans = [plan_param("w", full, layout=lay, policy=policy, mp_placements=mp) for lay in layouts]
    locals_ = [
        take_shard(
            take_model_parallel_part(full, layout, plan.unsharded_placements),
            shard_dim,
            plan.lengths,
            plan.shard_index,
        ).contiguous()
        for layout, plan in zip(layouts, plans, strict=True)
    ]
    with local_ranks(world) as mode:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        local = mode.rank_map(lambda rank: locals_[rank])
        dtensor = DTensor.from_local(
            local,
            mesh,
            plans[0].placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        assert torch.equal(dtensor.full_tensor().reconcile(), full)


@pytest.mark.parametrize(
    ("mp", "error", "text"),
    [
        (
            {"tp": Shard(0)},
            PlacementError,
            "blocks.0.weight: dim 0 of shape (7, 4) has 7 rows to cut over mesh dim 'tp' of size "
            "2, which does not divide; change the plan or the mesh",
        ),
        (
            {"tp": Shard(2)},
            PlacementError,
            "blocks.0.weight: Shard(2) names no dim of shape (7, 4); legal dims are 0 to 1",
        ),
        (
            {"tp": Partial()},
            PlacementError,
            "blocks.0.weight: a TP/EP plan places a parameter as Shard or Replicate, got P(sum) on "
            "mesh dim 'tp'",
        ),
        (
            {"dp_shard": Shard(1)},
            PlacementError,
            "blocks.0.weight: mesh dim 'dp_shard' has role shard, but only tp and ep dims take a "
            "TP/EP placement, got S(1)",
        ),
        (
            {"ep": Shard(1)},
            MeshError,
            "blocks.0.weight: a TP/EP plan names mesh dim 'ep', but the mesh has (dp_shard=2, "
            "tp=2); add the dim to the mesh or drop the plan",
        ),
    ],
)
def test_illegal_parallel_plans(
    mp: dict[str, Placement], error: type[Exception], text: str
) -> None:
    layout = layout_of("dp_shard,tp", (2, 2))
    with pytest.raises(error) as caught:
        model_parallel_placements("blocks.0.weight", (7, 4), layout, mp)
    assert str(caught.value) == text


def test_two_mesh_dims_on_one_tensor_dim_must_divide_together() -> None:
    layout = layout_of("dp_shard,ep,tp", (1, 2, 2))
    plan = {"ep": Shard(0), "tp": Shard(0)}
    assert local_shape((8, 3), layout, model_parallel_placements("w", (8, 3), layout, plan)) == (
        2,
        3,
    )
    with pytest.raises(PlacementError, match=r"w: dim 0 of shape \(6, 3\) has 3 rows to cut"):
        model_parallel_placements("w", (6, 3), layout, plan)


def test_negative_dims_are_counted_from_the_end() -> None:
    layout = layout_of("dp_shard,tp", (2, 2))
    assert model_parallel_placements("w", (4, 6), layout, {"tp": Shard(-1)}) == {"tp": Shard(1)}
    assert model_parallel_placements("w", (4, 6), layout, {"tp": Replicate()}) == {}


def test_placements_of_dtensor_parameters() -> None:
    layout = layout_of("dp_shard,tp", (2, 2))
    full = torch.zeros(4, 6)
    assert dtensor_placements("w", full, layout) == {}
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        on_tp = distribute_tensor(full, mesh["tp"], [Shard(-1)], src_data_rank=None)
        assert dtensor_placements("w", on_tp, layout) == {"tp": Shard(1)}
        on_both = distribute_tensor(full, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        assert dtensor_placements("w", on_both, layout) == {"tp": Shard(0)}
        sharded = distribute_tensor(full, mesh, [Shard(0), Replicate()], src_data_rank=None)
        with pytest.raises(
            PlacementError,
            match=r"w: it is a DTensor that is S\(0\) on mesh dim 'dp_shard' already",
        ):
            dtensor_placements("w", sharded, layout)
        unnamed = distribute_tensor(
            full, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None
        )
        with pytest.raises(PlacementError, match="w: it is a DTensor on a mesh without dim names"):
            dtensor_placements("w", unnamed, layout)
