"""Mixed precision in every combination, bit for bit against PyTorch's `fully_shard`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hp_compile
from hp_compile import Policy
from tests.baselines import full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.models import build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Combination = tuple[torch.dtype, dict[str, Any]]
COMBINATIONS: list[Combination] = [
    (stored, {"param_dtype": used, "reduce_dtype": reduced})
    for stored, used, reduced in itertools.product(DTYPES, DTYPES, DTYPES)
]
COMBINATIONS += [
    (torch.float32, {"param_dtype": torch.bfloat16}),
    (torch.bfloat16, {"param_dtype": torch.float32}),
    (torch.bfloat16, {"reduce_dtype": torch.float32}),
    (torch.float32, {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}),
    (torch.float32, {"param_dtype": torch.bfloat16, "cast_forward_inputs": False}),
]


class Net(nn.Module):
    """Its output has the dtype of its input or of its weights, whichever is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.leave = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x.to(self.enter.weight.dtype))
        return self.leave(torch.tanh(h)) + x


Run = tuple[Tensor, list[Tensor], set[torch.dtype]]


def step(model: nn.Module, rank: int) -> Run:
    """Output, gradients, and the dtypes that gathers and reductions had on the wire."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    with count_collectives() as calls:
        out = model(x)
        out.float().square().mean().backward()
    wire = {(c.kind, c.dtype) for c in calls}
    return out.detach(), [full(p.grad) for p in model.parameters()], wire


def both(rank: int, world_size: int, combinations: list[Combination]) -> list[tuple[Run, Run]]:
    mesh = init_device_mesh("cpu", (world_size,))
    runs = []
    for stored, fields in combinations:
        precision = MixedPrecisionPolicy(**fields)
        policy = Policy(backend="aot_eager", mp_policy=precision, reshard_after_forward=True)
        ours = hp_compile.shard(build(Net).to(stored), mesh, policy)
        theirs = build(Net).to(stored)
        fully_shard(theirs, mesh=mesh, mp_policy=precision)
        runs.append((step(ours, rank), step(theirs, rank)))
    return runs


@pytest.mark.slow
@pytest.mark.dist
def test_combinations_equal_fsdp2() -> None:
    for rank_runs in run_ranks(both, 2, COMBINATIONS, timeout=600):
        for (stored, fields), (ours, theirs) in zip(COMBINATIONS, rank_runs, strict=True):
            label = f"{stored} {fields}"
            assert ours[0].dtype == theirs[0].dtype, label
            assert torch.equal(ours[0], theirs[0]), label
            used = fields.get("param_dtype", stored)
            reduced = fields.get("reduce_dtype", used)
            assert (("all_gather", used)) in ours[2], label
            assert {d for kind, d in ours[2] if kind == "reduce_scatter"} == {reduced}, label
            for grad, expected in zip(ours[1], theirs[1], strict=True):
                assert grad.dtype == stored, label
                assert expected.count_nonzero() > 0, label
                assert torch.equal(grad, expected), label
