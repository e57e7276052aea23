"""A small model and its planned programs, for tests of passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from tests.dist_pool import fake_world


class Block(nn.Module):
    """One unit with a weight and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Blocks(nn.Module):
    """Units in a row, and a head whose three rows no even number of ranks divides."""

    def __init__(self, count: int = 3, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plan_blocks(shape: tuple[int, ...] = (2,), *, count: int = 3, **policy: Any) -> hp_compile.Plan:
    """Plans :class:`Blocks` on a fake mesh: ``(shard,)`` or ``(replicate, shard)``; graphs are made."""
    options = {"backend": "aot_eager", "reshard_after_forward": True, "dynamic": False, **policy}
    world = 1
    for size in shape:
        world *= size
    with fake_world(world):
        mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]
        )
        plan = hp_compile.plan(
            Blocks(count), mesh, hp_compile.Policy(**options), args=(torch.zeros(2, 4),)
        )
        plan.collectives  # noqa: B018  the graphs are made while the groups exist
    return plan
