"""Tensor parallel on real ranks: losses, gradients and updated weights against the dense model on one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import Policy
from tests.dist_pool import run_ranks
from tests.models import CASES

LM_PLAN = {
    "*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise",
    "*.gate": "colwise", "*.up": "colwise", "*.down": "rowwise",
}  # fmt: skip


def first_try(rank: int, world: int) -> Any:
    case = CASES["lm"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dense = case.make()
    model: Any = hp_compile.shard(case.make(), mesh, Policy(tp_plan=LM_PLAN, backend="aot_eager"))
    batches = [case.batch(r, 0) for r in range(2)]
    mine = batches[rank // 2]
    loss = case.loss(model(*mine[:-1]), mine[-1])
    loss.backward()
    total = sum(case.loss(dense(*b[:-1]), b[-1]) for b in batches) / 2
    total.backward()
    worst = 0.0
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name
        g = p.grad.full_tensor()
        worst = max(worst, (g - q.grad).abs().max().item())
    return worst, loss.item(), total.item()


def test_first() -> None:
    print(run_ranks(first_try, 4))
