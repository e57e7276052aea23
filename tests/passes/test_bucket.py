"""What the bucket pass does to a program: few collectives, and casts and scales once for a bucket."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from passes.base import REDUCE, WAIT, collectives
from tests.dist_pool import fake_world
from tests.models import TinyBlocks
from tests.passes.programs import plan_blocks

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
MIXED = hp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNITS = 4  # three blocks and the root


def count(gm: fx.GraphModule) -> Counter[object]:
    return Counter(node.target for node in gm.graph.nodes)


def test_one_collective_for_each_unit_kind_and_phase() -> None:
    plan = plan_blocks((2, 2))
    kinds = Counter((c.phase, c.kind) for c in plan.collectives)
    assert kinds == {
        ("forward", "all_gather"): UNITS,
        ("backward", "all_gather"): UNITS - 1,  # no gradient flows below the first block
        ("backward", "reduce_scatter"): UNITS,
        ("backward", "all_reduce"): UNITS,
    }


def test_members_are_packed_in_registration_order() -> None:
    for gm in plan_blocks().graphs.values():
        for _, comm in collectives(gm):
            assert list(comm.params) == sorted(comm.params, reverse=True)


def test_a_bucket_is_scaled_once() -> None:
    assert count(plan_blocks().graphs["backward"])[aten.div.Tensor] == UNITS
    assert count(plan_blocks(bucket_mb=1e6).graphs["backward"])[aten.div.Tensor] == 1
    assert count(plan_blocks(bucket_mb=0).graphs["backward"])[aten.div.Tensor] == 7


def test_a_bucket_is_cast_once_and_on_the_smaller_side() -> None:
    backward = plan_blocks((2, 2), mp_policy=MIXED).graphs["backward"]
    for node, comm in collectives(backward):
        source = node.args[0]
        if comm.kind == "reduce_scatter":
            assert source.target is CONVERT
            packed = source.args[0]
            assert packed.meta["val"].dtype is torch.bfloat16
            assert packed.meta["val"].numel() == source.meta["val"].numel()
        if comm.kind == "all_gather":
            assert source.meta["val"].dtype is torch.bfloat16


def test_an_all_reduce_takes_the_buffer_of_its_reduce_scatter() -> None:
    backward = plan_blocks((2, 2)).graphs["backward"]
    reduces = [n for n in backward.graph.nodes if n.target is REDUCE]
    assert [n.args[0].target for n in reduces] == [WAIT] * UNITS
    for node, comm in collectives(backward):
        if node.target is REDUCE:
            scatter = node.args[0].args[0]
            assert scatter.meta["comm"].kind == "reduce_scatter"
            assert scatter.meta["comm"].params == comm.params


def test_an_all_reduce_of_several_buffers_joins_whole_buffers() -> None:
    """An all-reduce moves a shard, a reduce-scatter the whole gradient: one limit makes unlike buckets of them."""
    mb = 100 / (1 << 20)  # bytes: one block's gradients, or the shards of more
    backward = plan_blocks((2, 2), bucket_mb=mb).graphs["backward"]
    counts = Counter(comm.kind for _, comm in collectives(backward))
    assert counts["all_reduce"] < counts["reduce_scatter"]
    for node, _ in collectives(backward):
        if node.target is REDUCE and node.args[0].target is aten.cat.default:
            assert all(n.args[0].target is WAIT or n.target is WAIT for n in node.args[0].args[0])


def test_a_late_cast_does_not_hold_up_its_bucket() -> None:
    """The root's bucket holds the first and the last weight; the cast of the last one stands at the end of forward."""
    order = {}
    for dtype in (None, torch.bfloat16):
        with fake_world(2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
            policy = hp_compile.Policy(
                backend="aot_eager",
                dynamic=False,
                mp_policy=hp_compile.MixedPrecisionPolicy(param_dtype=dtype),
            )
            plan = hp_compile.plan(TinyBlocks(), mesh, policy, args=(torch.zeros(2, 8),))
            order[dtype] = [c.params[0] for c in plan.collectives if c.phase == "forward"]
            plan.verify()
    assert order[None] == ["enter.weight", "blocks.0.up.weight", "blocks.1.up.weight"]
    assert order[torch.bfloat16] == order[None]
