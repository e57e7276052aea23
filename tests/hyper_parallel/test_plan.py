"""ParamPlan: who is cut over which ranks, what is reduced where, and the sentence that says so."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hyper_parallel.errors import PlacementError, PolicyError
from hyper_parallel.mesh import MeshLayout, infer_roles
from hyper_parallel.placement import format_placements
from hyper_parallel.plan import ParamPlan, plan_param, plan_params, resolve_enable_param_shard
from hyper_parallel.policy import Policy
from tests.dist_pool import fake_world


def layout_of(spec: str, rank: int = 0, roles: object = None) -> MeshLayout:
    """Reads e.g. ``dp_replicate=2,dp_shard=4``."""
    pairs = [part.split("=") for part in spec.split(",")]
    shape = tuple(int(size) for _, size in pairs)
    names, found = infer_roles([name for name, _ in pairs], shape, roles)
    return MeshLayout(names, shape, tuple(range(math.prod(shape))), rank, found)


def plan_of(
    spec: str,
    *,
    size: tuple[int, ...] = (16, 8),
    rank: int = 0,
    roles: object = None,
    mp: dict[str, Placement] | None = None,
    requires_grad: bool = True,
    sum_axes: tuple[str, ...] = (),
    **policy: object,
) -> ParamPlan:
    return plan_param(
        "w",
        torch.empty(size, device="meta", requires_grad=requires_grad),
        layout=layout_of(spec, rank, roles),
        policy=Policy(**policy),
        mp_placements=mp,
        sum_axes=sum_axes,
    )


CUT = {"tp": Shard(0)}
MATRIX = [
    # mesh, extra roles, TP/EP plan, policy -> rank_size, shard_size, dp_size, reduction, placements
    ("dp_shard=4", None, None, {}, 4, 4, 1, "RS", "[S(0)]"),
    ("dp_replicate=4", None, None, {}, 4, 1, 4, "AR", "[R]"),
    ("dp_replicate=2,dp_shard=4", None, None, {}, 8, 4, 2, "RS+AR", "[R, S(0)]"),
    ("dp_shard=1", None, None, {}, 1, 1, 1, "none", "[S(0)]"),
    ("dp_replicate=1,dp_shard=4", None, None, {}, 4, 4, 1, "RS", "[R, S(0)]"),
    ("dp_replicate=4,dp_shard=1", None, None, {}, 4, 1, 4, "AR", "[R, S(0)]"),
    # TP: replicated and cut parameters have the same data-parallel domain.
    ("dp_shard=4,tp=2", None, None, {}, 4, 4, 1, "RS", "[S(0), R]"),
    ("dp_shard=4,tp=2", None, CUT, {}, 4, 4, 1, "RS", "[_S(0,2), S(0)]"),
    ("dp_replicate=2,dp_shard=2,tp=2", None, CUT, {}, 4, 2, 2, "RS+AR", "[R, _S(0,2), S(0)]"),
    ("dp_shard=1,tp=8", None, CUT, {}, 1, 1, 1, "none", "[_S(0,8), S(0)]"),
    # A tp-only mesh has no data-parallel domain.
    ("tp=8", None, None, {}, 1, 1, 1, "none", "[R]"),
    ("tp=8", None, CUT, {}, 1, 1, 1, "none", "[S(0)]"),
    ("tp=4,ep=2", None, {"tp": Shard(1), "ep": Shard(0)}, {}, 1, 1, 1, "none", "[S(1), S(0)]"),
    ("tp=8", None, CUT, {"enable_param_shard": False}, 1, 1, 1, "none", "[S(0)]"),
    # Sharding switched off: the whole data-parallel domain is all-reduced, nothing is scattered.
    ("dp_shard=8", None, None, {"enable_param_shard": False}, 8, 1, 8, "AR", "[R]"),
    (
        "dp_shard=4,tp=2",
        None,
        CUT,
        {"enable_param_shard": False},
        4,
        1,
        4,
        "AR",
        "[R, S(0)]",
    ),
    (
        "dp_replicate=2,dp_shard=4",
        None,
        None,
        {"enable_param_shard": False},
        8,
        1,
        8,
        "AR",
        "[R, R]",
    ),
    # Sharding asked for explicitly.
    ("dp_shard=4,tp=2", None, CUT, {"enable_param_shard": True}, 4, 4, 1, "RS", "[_S(0,2), S(0)]"),
    # Context parallel: data to a parameter; cut over it only when roles say so.
    ("dp_shard=2,cp=2", None, None, {}, 4, 2, 2, "RS+AR", "[S(0), R]"),
    ("dp_shard=2,cp=2", {"shard": ("dp_shard", "cp")}, None, {}, 4, 4, 1, "RS", "[S(0), S(0)]"),
    ("cp=4", None, None, {}, 4, 1, 4, "AR", "[R]"),
    ("cp=4,tp=2", None, CUT, {}, 4, 1, 4, "AR", "[R, S(0)]"),
    # Experts: ep is no batch dim unless a data role names it, and never for what it cuts.
    ("dp_shard=2,ep=2", None, None, {}, 2, 2, 1, "RS", "[S(0), R]"),
    ("dp_shard=2,ep=2", None, {"ep": Shard(0)}, {}, 2, 2, 1, "RS", "[_S(0,2), S(0)]"),
    ("dp_shard=2,ep=2", {"shard": ("dp_shard", "ep")}, None, {}, 4, 4, 1, "RS", "[S(0), S(0)]"),
    (
        "dp_shard=2,ep=2",
        {"shard": ("dp_shard", "ep")},
        {"ep": Shard(0)},
        {},
        2,
        2,
        1,
        "RS",
        "[_S(0,2), S(0)]",
    ),
    ("dp_shard=2,ep=2", {"replicate": "ep"}, None, {}, 4, 2, 2, "RS+AR", "[S(0), R]"),
    ("dp_shard=2,ep=2", {"replicate": "ep"}, {"ep": Shard(1)}, {}, 2, 2, 1, "RS", "[S(0), S(1)]"),
    (
        "dp_shard=4",
        {"shard": "dp_shard", "ep": "dp_shard"},
        {"dp_shard": Shard(0)},
        {},
        1,
        1,
        1,
        "none",
        "[S(0)]",
    ),
    # Too small to cut: whole on every data rank.
    ("dp_replicate=2,dp_shard=4", None, None, {"min_shard_numel": 129}, 8, 1, 8, "AR", "[R, R]"),
    (
        "dp_replicate=2,dp_shard=4",
        None,
        None,
        {"min_shard_numel": 128},
        8,
        4,
        2,
        "RS+AR",
        "[R, S(0)]",
    ),
    ("dp_shard=4,tp=2", None, CUT, {"min_shard_numel": 129}, 4, 1, 4, "AR", "[R, S(0)]"),
]


@pytest.mark.parametrize(
    ("spec", "roles", "mp", "policy", "rank_size", "shard_size", "dp_size", "reduction", "text"),
    MATRIX,
)
def test_decision_matrix(
    spec, roles, mp, policy, rank_size, shard_size, dp_size, reduction, text
) -> None:
    world = layout_of(spec, roles=roles).size(layout_of(spec, roles=roles).dim_names)
    for rank in range(world):
        plan = plan_of(spec, rank=rank, roles=roles, mp=mp, **policy)
        sizes = (plan.rank_size, plan.shard_size, plan.dp_size)
        assert sizes == (rank_size, shard_size, dp_size)
        assert plan.reduction == reduction
        assert format_placements(plan.placements) == text
        assert plan.rank_size == plan.shard_size * plan.dp_size
        assert len(plan.sharded_ranks) == shard_size
        assert len(plan.unsharded_ranks) == dp_size
        assert rank in plan.sharded_ranks
        assert rank in plan.unsharded_ranks
        assert plan.sharded_ranks[plan.shard_index] == rank
        assert set(plan.sharded_ranks) & set(plan.unsharded_ranks) == {rank}


def test_exact_rank_lists() -> None:
    plan = plan_of("dp_replicate=2,dp_shard=2,tp=2", rank=5)
    assert plan.sharded_ranks == (5, 7)
    assert plan.unsharded_ranks == (1, 5)
    off = plan_of("dp_replicate=2,dp_shard=2,tp=2", rank=5, enable_param_shard=False)
    assert off.sharded_ranks == (5,)
    assert off.unsharded_ranks == (1, 3, 5, 7)
    # Replica axes around a cut ep dim.
    split = plan_of(
        "dp_replicate=2,ep=2,dp_shard=2",
        rank=5,
        roles={"shard": ("dp_shard", "ep")},
        mp={"ep": Shard(0)},
    )
    assert (split.sharded_ranks, split.unsharded_ranks) == ((4, 5), (1, 5))
    assert (split.rank_size, split.batch_ranks) == (4, 8)
    dense = plan_of("dp_replicate=2,ep=2,dp_shard=2", rank=5, roles={"shard": ("dp_shard", "ep")})
    assert (dense.sharded_ranks, dense.unsharded_ranks) == ((4, 5, 6, 7), (1, 5))
    assert (dense.rank_size, dense.batch_ranks) == (8, 8)


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        ("dp_shard=4", None, True),
        ("dp_replicate=4", None, True),
        ("cp=4", None, True),
        ("dp_shard=1,tp=4", None, True),
        ("dp_replicate=2,dp_shard=2,tp=2", None, True),
        ("tp=4", None, False),
        ("tp=2,ep=2", None, False),
        ("dp_shard=4", False, False),
        ("dp_shard=4", True, True),
        ("dp_shard=1,tp=4", True, True),
    ],
)
def test_enable_param_shard(spec: str, value: bool | None, expected: bool) -> None:
    policy = Policy(enable_param_shard=value)
    assert resolve_enable_param_shard(layout_of(spec), policy) is expected


@pytest.mark.parametrize("spec", ["tp=4", "dp_replicate=4", "cp=2,tp=2"])
def test_sharding_without_a_shard_dim_is_an_error(spec: str) -> None:
    layout = layout_of(spec)
    text = (
        f"Policy.enable_param_shard: True needs a mesh dim with role shard, but mesh "
        f"({layout.describe()}) has {layout.roles}; name a dim 'dp_shard', pass "
        f"roles={{'shard': ...}}, or leave enable_param_shard None"
    )
    for build in (
        lambda: plan_of(spec, enable_param_shard=True),
        lambda: plan_params(nn.Linear(2, 2), layout, Policy(enable_param_shard=True)),
    ):
        with pytest.raises(PolicyError) as caught:
            build()
        assert str(caught.value) == text


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            plan_of("dp_shard=4"),
            "FSDP cuts dim 0 over dp_shard(4), and its gradient is reduce-scattered over "
            "dp_shard(4).",
        ),
        (
            plan_of("dp_replicate=2,dp_shard=2,cp=2", roles={"shard": ("dp_shard", "cp")}),
            "FSDP cuts dim 0 over dp_shard(2)×cp(2), and its gradient is reduce-scattered over "
            "dp_shard(2)×cp(2), then all-reduced over dp_replicate(2).",
        ),
        (
            plan_of("dp_replicate=2,dp_shard=2,tp=2", mp=CUT),
            "The tensor-parallel plan cuts dim 0 over tp(2), FSDP cuts dim 0 of that slice over "
            "dp_shard(2), and its gradient is reduce-scattered over dp_shard(2), then all-reduced "
            "over dp_replicate(2).",
        ),
        (
            plan_of("dp_shard=4,ep=2,tp=2", mp={"ep": Shard(0), "tp": Shard(1)}),
            "The expert-parallel plan cuts dim 0 over ep(2), the tensor-parallel plan cuts dim 1 "
            "over tp(2), FSDP cuts dim 0 of that slice over dp_shard(4), and its gradient is "
            "reduce-scattered over dp_shard(4).",
        ),
        (
            plan_of("dp_shard=4,tp=2", sum_axes=("tp",)),
            "FSDP cuts dim 0 over dp_shard(4), and its gradient is summed over tp(2), of which "
            "each rank has a term, then reduce-scattered over dp_shard(4).",
        ),
        (
            plan_of("tp=2", sum_axes=("tp",)),
            "FSDP leaves it whole because the mesh has no data-parallel dim, and its gradient is "
            "summed over tp(2), of which each rank has a term.",
        ),
        (
            plan_of("dp_shard=4,tp=2", mp=CUT, enable_param_shard=False),
            "The tensor-parallel plan cuts dim 0 over tp(2), FSDP leaves it whole because "
            "enable_param_shard is False, and its gradient is all-reduced over dp_shard(4).",
        ),
        (
            plan_of("dp_replicate=4"),
            "FSDP leaves it whole because the mesh has no shard dim, and its gradient is "
            "all-reduced over dp_replicate(4).",
        ),
        (
            plan_of("dp_replicate=2,dp_shard=2", size=()),
            "FSDP leaves it whole because it is a scalar, and its gradient is all-reduced over "
            "dp_replicate(2)×dp_shard(2).",
        ),
        (
            plan_of("dp_shard=2", min_shard_numel=1000),
            "FSDP leaves it whole because its 128 elements are fewer than min_shard_numel=1000, "
            "and its gradient is all-reduced over dp_shard(2).",
        ),
        (
            plan_of("dp_shard=1,tp=2"),
            "FSDP leaves it whole because dp_shard(1) is a single rank, and its gradient stays "
            "local because no other rank sees different data for it.",
        ),
        (
            plan_of("ep=4", roles={"shard": "ep", "ep": "ep"}, mp={"ep": Shard(0)}),
            "The expert-parallel plan cuts dim 0 over ep(4), FSDP leaves it whole because its plan "
            "already uses every shard dim, and its gradient stays local because no other rank sees "
            "different data for it.",
        ),
        (
            plan_of("dp_shard=4", requires_grad=False),
            "FSDP cuts dim 0 over dp_shard(4), and it is frozen, so there is no gradient to "
            "reduce.",
        ),
    ],
)
def test_reasons(plan: ParamPlan, reason: str) -> None:
    assert plan.reason == reason


def test_plans_are_the_same_words_on_every_rank() -> None:
    plans = [plan_of("dp_replicate=2,dp_shard=2,tp=2", rank=rank, mp=CUT) for rank in range(8)]
    for name in ("placements", "reason", "reduction", "lengths", "padded_shard_shape"):
        assert len({getattr(plan, name) for plan in plans}) == 1


def test_frozen_parameters_are_cut_and_never_reduced() -> None:
    plan = plan_of("dp_replicate=2,dp_shard=2", requires_grad=False)
    assert (plan.shard_size, plan.dp_size, plan.reduction) == (2, 2, "none")
    assert plan.requires_grad is False


# ---- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rank", "shard", "padded", "lengths"),
    [
        ((10, 3), 0, (3, 3), (3, 3), (3, 3, 3, 1)),
        ((10, 3), 3, (1, 3), (3, 3), (3, 3, 3, 1)),
        ((2, 3), 3, (0, 3), (1, 3), (1, 1, 0, 0)),
        ((0, 3), 1, (0, 3), (0, 3), (0, 0, 0, 0)),
        ((5,), 2, (1,), (2,), (2, 2, 1, 0)),
        ((1,), 0, (1,), (1,), (1, 0, 0, 0)),
    ],
)
def test_uneven_shapes(size, rank, shard, padded, lengths) -> None:
    plan = plan_of("dp_shard=4", size=size, rank=rank)
    assert plan.shard_size == 4  # never quietly left whole
    assert (plan.shard_shape, plan.padded_shard_shape, plan.lengths) == (shard, padded, lengths)
    assert plan.padded_rows == padded[0]


def test_shapes_of_a_parameter_that_is_whole() -> None:
    plan = plan_of("dp_shard=4", size=())
    assert (plan.shard_dim, plan.lengths, plan.padded_rows) == (None, (), 0)
    assert plan.local_shape == plan.shard_shape == plan.padded_shard_shape == ()
    whole = plan_of("dp_shard=4,tp=2", mp=CUT, enable_param_shard=False)
    assert whole.local_shape == whole.shard_shape == whole.padded_shard_shape == (8, 8)


def test_shapes_with_tp_on_the_same_dim() -> None:
    plan = plan_of("dp_shard=4,tp=2", size=(18, 5), rank=7, mp=CUT)
    assert (plan.shape, plan.local_shape) == ((18, 5), (9, 5))
    assert (plan.lengths, plan.shard_shape) == ((3, 3, 3, 0), (0, 5))


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    ranks=st.integers(1, 6),
    dim=st.integers(0, 1),
)
def test_shards_tile_the_parameter(size: tuple[int, int], ranks: int, dim: int) -> None:
    plans = [
        plan_of(f"dp_shard={ranks}", size=size, rank=r, shard_placement_fn=lambda _: Shard(dim))
        for r in range(ranks)
    ]
    assert sum(plan.shard_shape[dim] for plan in plans) == size[dim]
    assert all(plan.shard_shape[1 - dim] == size[1 - dim] for plan in plans)
    assert all(plan.shard_shape[dim] <= plan.padded_rows for plan in plans)


def test_local_shapes_equal_fully_shard_s() -> None:
    """PyTorch's own FSDP2 on the same meshes cuts the same rows."""
    model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 2))
    for shape, names in (((4,), ("dp_shard",)), ((2, 3), ("dp_replicate", "dp_shard"))):
        for rank in range(math.prod(shape)):
            with fake_world(math.prod(shape), rank):
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                plans = plan_params(model, MeshLayout.from_mesh(mesh), Policy())
                sharded = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 2))
                fully_shard(sharded, mesh=mesh)
                for fqn, param in sharded.named_parameters():
                    assert plans[fqn].placements == param.placements
                    assert plans[fqn].shard_shape == param.to_local().shape


def test_placements_and_shapes_equal_fully_shard_s_beside_tp() -> None:
    """PyTorch's `parallelize_module` and `fully_shard` leave the same combined placements."""
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    for shape, names in (
        ((2, 2), ("dp_shard", "tp")),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp")),
    ):
        for rank in range(math.prod(shape)):
            with fake_world(math.prod(shape), rank):
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
                parallelize_module(model, mesh["tp"], styles, src_data_rank=None)
                plans = plan_params(model, MeshLayout.from_mesh(mesh), Policy())
                fully_shard(model, mesh=mesh[names[:-1]])
                for fqn, param in model.named_parameters():
                    if param.device_mesh.ndim < len(names):  # TP left it a plain tensor
                        assert plans[fqn].placements == (*param.placements, Replicate())
                    else:
                        assert plans[fqn].placements == param.placements
                    assert plans[fqn].shard_shape == param.to_local().shape
                    assert plans[fqn].shape == param.shape


# ---- shard_placement_fn ------------------------------------------------------------------------


def test_shard_placement_fn_chooses_the_dim() -> None:
    seen = []

    def last_dim(param: torch.Tensor) -> Shard:
        seen.append(tuple(param.shape))
        return Shard(-1)

    plan = plan_of("dp_shard=4,tp=2", mp={"tp": Shard(1)}, shard_placement_fn=last_dim)
    assert format_placements(plan.placements) == "[_S(1,2), S(1)]"
    assert (plan.shard_dim, plan.shard_shape, seen) == (1, (16, 1), [(16, 8)])
    assert plan_of("dp_shard=4", shard_placement_fn=lambda _: None).shard_dim == 0


def test_shard_placement_fn_sees_the_parameter() -> None:
    model = nn.Linear(4, 4)
    seen = []
    plan_params(model, layout_of("dp_shard=2"), Policy(shard_placement_fn=seen.append))
    assert [id(param) for param in seen] == [id(model.weight), id(model.bias)]
    # ... and is not asked about what is never cut.
    seen.clear()
    policy = Policy(shard_placement_fn=seen.append, enable_param_shard=False)
    plan_params(model, layout_of("dp_shard=2"), policy)
    assert seen == []


def test_shard_placement_fn_may_limit_the_axes() -> None:
    roles = {"shard": ("dp_shard", "cp")}
    for chosen in ("dp_shard", ("dp_shard",)):
        plan = plan_of(
            "dp_shard=2,cp=4", roles=roles, shard_placement_fn=lambda _, c=chosen: (Shard(1), c)
        )
        assert (plan.shard_size, plan.dp_size, plan.reduction) == (2, 4, "RS+AR")
        assert format_placements(plan.placements) == "[S(1), R]"
        assert plan.replica_axes == ("cp",)
    both = plan_of(
        "dp_shard=2,cp=4",
        roles=roles,
        shard_placement_fn=lambda _: (None, ("cp", "dp_shard")),
    )
    assert (both.shard_axes, both.shard_dim) == (("dp_shard", "cp"), 0)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Replicate(), "w: shard_placement_fn returned Replicate() of type Replicate; expected "),
        (
            0,
            "w: shard_placement_fn returned 0 of type int; expected Shard(dim) with a dim of ",
        ),
        ("Shard(0)", "w: shard_placement_fn returned 'Shard(0)' of type str; expected Shard(dim)"),
        (Shard(2), "w: Shard(2) names no dim of shape (16, 8); legal dims are 0 to 1"),
        (Shard(-3), "w: Shard(-3) names no dim of shape (16, 8); legal dims are 0 to 1"),
        (
            (Shard(0), ("tp",)),
            "w: shard_placement_fn chose the mesh dims ('tp',); the shard dims open to this "
            "parameter are ('dp_shard',)",
        ),
        ((Shard(0), ()), "w: shard_placement_fn chose the mesh dims (); the shard dims open"),
        ((1, "dp_shard"), "w: shard_placement_fn returned (1, 'dp_shard') of type tuple; expected"),
    ],
)
def test_answers_of_shard_placement_fn_that_are_no_shard(answer: object, text: str) -> None:
    with pytest.raises(PlacementError) as caught:
        plan_of("dp_shard=4,tp=2", shard_placement_fn=lambda _: answer)
    assert str(caught.value).startswith(text)


# ---- reshard_after_forward ---------------------------------------------------------------------


def test_integer_reshard_divides_the_shard_axis() -> None:
    for size in (1, 2, 3, 6):
        plan_of("dp_shard=6,tp=2", reshard_after_forward=size)
    with pytest.raises(PolicyError) as caught:
        plan_params(nn.Linear(2, 2), layout_of("dp_shard=6,tp=2"), Policy(reshard_after_forward=4))
    assert str(caught.value) == (
        "Policy.reshard_after_forward: 4 does not divide the shard axis of 6 ranks (dp_shard(6)); "
        "choose one of [1, 2, 3, 6]"
    )
    with pytest.raises(PolicyError, match=r"the shard axis of 1 ranks \(no shard dim\)"):
        plan_params(nn.Linear(2, 2), layout_of("dp_replicate=2"), Policy(reshard_after_forward=2))
    # Without sharding there is nothing to reshard.
    off = Policy(reshard_after_forward=4, enable_param_shard=False)
    assert plan_params(nn.Linear(2, 2), layout_of("dp_shard=6"), off)["weight"].shard_size == 1


def test_integer_reshard_divides_the_shard_axis_of_every_parameter() -> None:
    roles = {"shard": ("dp_shard", "ep")}
    with pytest.raises(
        PolicyError,
        match=r"w: Policy.reshard_after_forward: 4 does not divide the shard axis of 2 ranks "
        r"\(dp_shard\(2\)\); choose one of \[1, 2\]",
    ):
        plan_of("dp_shard=2,ep=2", roles=roles, mp={"ep": Shard(0)}, reshard_after_forward=4)
    plan_of("dp_shard=2,ep=2", roles=roles, mp={"ep": Shard(0)}, reshard_after_forward=2)
    plan_of("dp_shard=2,ep=2", roles=roles, reshard_after_forward=4, size=())


# ---- whole modules -----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)


def test_every_parameter_once_in_registration_order() -> None:
    layout = layout_of("dp_replicate=2,dp_shard=2")
    plans = plan_params(Tied(), layout, Policy())
    assert list(plans) == ["scale", "embed.weight", "norm.weight", "norm.bias"]
    assert {fqn: plan.reduction for fqn, plan in plans.items()} == {
        "scale": "AR",
        "embed.weight": "RS+AR",
        "norm.weight": "RS+AR",
        "norm.bias": "none",
    }
    with torch.device("meta"):
        assert plan_params(Tied(), layout, Policy()) == plans


def test_ignored_parameters_are_listed_and_left_alone() -> None:
    model = Tied()
    layout = layout_of("dp_replicate=2,dp_shard=2,tp=2", rank=5)
    policy = Policy(ignored_params=[model.norm.weight, "head.*"])
    plans = plan_params(model, layout, policy)
    for fqn in ("norm.weight", "embed.weight"):  # the tied weight by its second name
        plan = plans[fqn]
        assert plan.ignored
        assert (plan.rank_size, plan.shard_size, plan.dp_size) == (1, 1, 1)
        assert plan.reduction == "none"
        assert (plan.sharded_ranks, plan.unsharded_ranks) == ((5,), (5,))
        assert (plan.shard_axes, plan.replica_axes, plan.sum_axes) == ((), (), ())
        assert plan.shard_shape == plan.shape
        assert plan.reason == (
            "The policy ignores it: it stays a plain tensor, and its gradient stays local."
        )
    assert not plans["scale"].ignored
    # Identity counts, not equal values.
    other = Policy(ignored_params=[nn.Parameter(torch.ones(4))])
    assert not any(plan.ignored for plan in plan_params(model, layout, other).values())


def test_an_ignored_glob_that_matches_nothing() -> None:
    with pytest.raises(PolicyError) as caught:
        plan_params(Tied(), layout_of("dp_shard=2"), Policy(ignored_params=["*.inv_freq"]))
    assert str(caught.value) == (
        "Policy.ignored_params: '*.inv_freq' matches no parameter; the names are scale, "
        "embed.weight, norm.weight, …"
    )


def test_parallel_plans_of_a_module() -> None:
    layout = layout_of("dp_shard=2,tp=2")
    plans = plan_params(
        Tied(),
        layout,
        Policy(),
        mp={"embed.weight": {"tp": Shard(0)}, "norm.weight": {"tp": Replicate()}},
        sum_axes={"norm.weight": ("tp",)},
    )
    assert format_placements(plans["embed.weight"].placements) == "[_S(0,2), S(0)]"
    assert format_placements(plans["norm.weight"].placements) == "[S(0), R]"
    assert plans["norm.weight"].sum_axes == ("tp",)
    with pytest.raises(
        PlacementError, match=r"head.weight: a TP/EP plan places it, but no parameter has this FQN"
    ):
        plan_params(Tied(), layout, Policy(), mp={"head.weight": {"tp": Shard(0)}})


def test_unsharded_placements_differ_on_shard_dims_only() -> None:
    layout = layout_of("dp_replicate=2,dp_shard=2,ep=2,tp=2")
    mp = {"embed.weight": {"tp": Shard(0), "ep": Shard(1)}}
    for plan in plan_params(Tied(), layout, Policy(), mp=mp).values():
        for axis, before, after in zip(
            layout.dim_names, plan.placements, plan.unsharded_placements, strict=True
        ):
            if axis in plan.shard_axes:
                assert after == Replicate()
            else:
                assert before == after


@pytest.mark.parametrize(
    ("spec", "roles", "mp", "axis", "role"),
    [
        ("dp_shard=2,tp=2", None, None, "dp_shard", "shard"),
        ("dp_shard=2,tp=2", None, CUT, "tp", "tp"),
        ("dp_shard=2,ep=2", {"shard": ("dp_shard", "ep")}, None, "ep", "shard/ep"),
    ],
)
def test_partial_sums_that_cannot_be(spec, roles, mp, axis, role) -> None:
    with pytest.raises(PlacementError) as caught:
        plan_of(spec, roles=roles, mp=mp, sum_axes=(axis,))
    assert str(caught.value) == (
        f"w: its gradient cannot be a partial sum over mesh dim {axis!r} (role {role}); only a tp "
        f"or ep dim that neither cuts the parameter nor splits the batch leaves one"
    )


def test_parameters_that_are_dtensors_already() -> None:
    """What `parallelize_module` left is read from the parameters themselves."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        model = nn.Linear(4, 6)
        model.weight = nn.Parameter(
            distribute_tensor(model.weight.data, mesh["tp"], [Shard(0)], src_data_rank=None)
        )
        layout = MeshLayout.from_mesh(mesh)
        plans = plan_params(model, layout, Policy())
        assert plans["weight"].shape == (6, 4)
        assert format_placements(plans["weight"].placements) == "[_S(0,2), S(0)]"
        assert format_placements(plans["bias"].placements) == "[S(0), R]"
        # The same model once sharded is refused, unless the caller says what TP did.
        model.bias = nn.Parameter(
            distribute_tensor(model.bias.data, mesh, plans["bias"].placements, src_data_rank=None)
        )
        with pytest.raises(
            PlacementError, match="bias: it is a DTensor that is S\\(0\\) on mesh dim"
        ):
            plan_params(model, layout, Policy())
        assert plan_params(model, layout, Policy(), mp={"weight": {"tp": Shard(0)}}) == plans


def test_a_plan_is_a_value() -> None:
    plan = plan_of("dp_shard=4,tp=2", mp=CUT)
    assert plan == plan_of("dp_shard=4,tp=2", mp=CUT)
    assert hash(plan) == hash(plan_of("dp_shard=4,tp=2", mp=CUT))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.reduction = "AR"
