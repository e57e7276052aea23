"""A program is captured with the casts of ``torch.autocast``; eager autocast is the reference."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from passes.base import SavedOutput, outputs
from tests.dist_pool import fake_world


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_selects_the_program(backward_inside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    reference = copy.deepcopy(model)
    inputs = torch.randn(4, 8)
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
        model = hp_compile.shard(model, mesh, hp_compile.Policy(backend="aot_eager"))
        for enabled in (False, True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                ours, expected = model(inputs), reference(inputs)
                assert ours.dtype is (torch.bfloat16 if enabled else torch.float32)
                assert torch.equal(ours, expected)
                if backward_inside:
                    ours.float().square().sum().backward()
                    expected.float().square().sum().backward()
            if not backward_inside:
                ours.float().square().sum().backward()
                expected.float().square().sum().backward()
            for param, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert other.grad is not None and other.grad.abs().sum() > 0
                assert torch.equal(param.grad.to_local(), other.grad)


@pytest.mark.parametrize("reshard", [True, None, False])
def test_weights_cast_by_autocast_are_freed_in_forward(reshard: bool | None) -> None:
    """The cast of a weight is as large as the weight: it is made again in backward, not kept."""
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )
    inputs = torch.randn(5, 8)
    with fake_world(2), torch.autocast("cpu", dtype=torch.bfloat16):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        policy = hp_compile.Policy(
            backend="aot_eager", reshard_after_forward=reshard, units=("2",), dynamic=False
        )
        plan = hp_compile.plan(model, mesh, policy, args=(inputs,))
        plan.verify()
        hp_compile.shard(model, mesh, policy)
        model(inputs).float().sum().backward()
    full = {tuple(p.shape) for p in plan.params.values()} - {(16,), (4,)}
    saved = [
        tuple(node.meta["val"].shape)
        for _, node, role in outputs(plan.graphs["forward"])
        if isinstance(role, SavedOutput) and node is not None and node.op != "placeholder"
    ]
    kept = [s for s in saved if s in full or s[::-1] in full]
    assert bool(kept) == (reshard is not True) and (reshard is not None or (16, 16) not in kept)
