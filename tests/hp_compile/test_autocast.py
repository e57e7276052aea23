"""A program is captured with the casts of ``torch.autocast``; eager autocast is the reference."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
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
