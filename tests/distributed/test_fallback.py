"""``Policy(fallback="eager")``: a model that cannot be captured trains through ``fully_shard`` and says so once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hyper_parallel import HSDPModule
from tests.dist_pool import run_ranks

pytestmark = pytest.mark.dist


class Branching(nn.Module):
    """Forward decides on the value of a tensor, which no capture can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = torch.tanh(x)
        return self.head(x)


def train(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = Branching()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    policy = hp_compile.Policy(backend="aot_eager", fallback="eager")
    model = hp_compile.shard(copy.deepcopy(reference), mesh, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.1)
    before = [id(p) for p in model.parameters()]
    messages, differences = [], []
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(x).square().mean().backward()
        messages += [str(w.message) for w in caught if "runs eagerly" in str(w.message)]
        reference(x).square().mean().backward()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert other.grad is not None and other.grad.abs().sum() > 0
            dist.all_reduce(other.grad)
            other.grad /= world_size
            differences.append(float((param.grad.full_tensor() - other.grad).abs().max()))
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    weights = [
        float((p.full_tensor() - q).abs().max())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    return {
        "messages": messages,
        "gradients": max(differences),
        "weights": max(weights),
        "same": before == [id(p) for p in model.parameters()],
        "kinds": (isinstance(model, Branching), isinstance(model, HSDPModule)),
    }


def test_a_model_that_cannot_be_captured_trains_eagerly() -> None:
    for result in run_ranks(train, 2):
        assert len(result["messages"]) == 1
        assert "Branching runs eagerly through hyper_parallel.fully_shard" in result["messages"][0]
        assert "cannot capture" in result["messages"][0]
        assert result["gradients"] < 1e-6
        assert result["weights"] < 1e-5
        assert result["same"]
        assert result["kinds"] == (True, True)


def refuse(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    model = hp_compile.shard(Branching(), mesh, hp_compile.Policy(backend="aot_eager"))
    try:
        model(torch.randn(4, 5))
    except hp_compile.CaptureError as error:
        return str(error)
    return "no error"


def test_without_the_policy_it_is_an_error() -> None:
    for text in run_ranks(refuse, 2):
        assert "cannot capture" in text
        assert "Policy(fallback='eager')" in text
