"""Low-rank adapters beside frozen weights that tensor parallelism cuts: gradients and steps of the unsharded model."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import hp_compile
from hp_compile import Policy
from tests import all_ranks
from tests.baselines import full, full_weights
from tests.dist_pool import fake_world, run_ranks
from tests.distributed.test_tensor_parallel import MEGATRON, SEQUENCE, VOCABULARY
from tests.models import CASES

CASE = CASES["lm"]
SHARD_TP = ("dp_shard", "tp")


@functools.cache
def example(name: str) -> Any:
    """A module of the examples, which are scripts and no package."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make() -> nn.Module:
    """Adapters on column-parallel layers (q, k, v, gate) and row-parallel ones (o, down); B is not zero."""
    lora = example("lora")
    model = CASE.make()
    names = lora.add_adapters(model, ["q", "k", "v", "o", "gate", "down"], 3, 2.0)
    assert len(names) == 2 * 6 * 2
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in names:
            param = model.get_parameter(name)
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return model


PLANS = pytest.mark.parametrize(
    "plan", [MEGATRON, VOCABULARY, SEQUENCE], ids=["megatron", "vocabulary", "sequence"]
)


@PLANS
def test_gradients_of_all_ranks_in_one_process(plan: dict[str, Any]) -> None:
    module = make()
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=SHARD_TP)
        policy = Policy(backend="aot_eager", tp_plan=plan)
        found = hp_compile.plan(module, mesh, policy, args=CASE.batch(0, 0)[:1])
        found.verify()
        for fqn, param in found.params.items():
            adapter = "lora_" in fqn
            assert param.requires_grad == adapter and (param.reduction == "RS") == adapter, fqn
            if adapter:  # whole on tp, cut by FSDP
                assert param.placements[1] == Replicate() and param.shard_size == 2, fqn
        results = all_ranks.run(
            module, found, lambda group: CASE.batch(group, 0)[:1], lambda m, x: [m(x)]
        )
        assert len(results.grads) == 2 * 6 * 2
        results.check()


def steps(model: Any, batch: Any) -> tuple[list[float], list[dict[str, Tensor]]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    losses, grads = [], []
    for index in range(2):
        inputs, targets = batch(index)
        loss = CASE.loss(model(inputs), targets)
        loss.backward()
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
        assert all(model.get_parameter(n).grad is None for n in frozen)
        grads.append({n: full(p.grad) for n, p in model.named_parameters() if p.requires_grad})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grads


def train(
    rank: int, world_size: int, plan: dict[str, Any]
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=SHARD_TP)
    model: Any = hp_compile.shard(make(), mesh, Policy(backend="aot_eager", tp_plan=plan))
    losses, grads = steps(model, functools.partial(CASE.batch, rank // 2))
    weights = full_weights(model)
    output = model(CASE.batch(0, 5)[0])
    example("lora").merge(model)
    torch.testing.assert_close(model(CASE.batch(0, 5)[0]), output, rtol=1e-5, atol=1e-5)
    return losses, grads, weights, full_weights(model)


@pytest.mark.dist
@pytest.mark.slow
@PLANS
def test_steps_equal_the_unsharded_ones(plan: dict[str, Any]) -> None:
    dense = make()
    before = {n: p.detach().clone() for n, p in dense.named_parameters()}
    losses, grads = steps(dense, functools.partial(CASE.joined_batch, 2))
    results = run_ranks(train, 4, plan, timeout=500)
    mean = [sum(values) / 4 for values in zip(*(r[0] for r in results), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-5)
    for _, ours, weights, merged in results:
        for step, expected in enumerate(grads):
            assert ours[step].keys() == expected.keys()
            for name, grad in expected.items():
                torch.testing.assert_close(ours[step][name], grad, rtol=1e-5, atol=5e-6, msg=name)
        for name, param in dense.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=2e-5, atol=2e-6)
            if not param.requires_grad:
                assert torch.equal(weights[name], before[name]), name
        assert not torch.equal(
            merged["blocks.0.attention.q.weight"], before["blocks.0.attention.q.weight"]
        )
        assert not merged["blocks.0.attention.q.lora_b"].any()
