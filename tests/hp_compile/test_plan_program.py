"""A sharded model's plan is the program that its next call runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import pipeline
from tests.dist_pool import fake_world


def test_call_after_plan_runs_the_planned_program_without_another_capture() -> None:
    seen: list[str] = []
    with fake_world(2), pipeline.observe(lambda report: seen.append(report.name)):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = hp_compile.shard(nn.Linear(4, 4), mesh, hp_compile.Policy(backend="aot_eager"))
        plan = model.plan(torch.ones(3, 4))
        plan.verify()
        planned = list(seen)
        assert planned.count("annotate") == 1
        model(torch.ones(5, 4)).sum().backward()
        assert seen.count("annotate") == 1, "the call captured the model again"
        assert model.plan(torch.ones(3, 4)).graphs["forward"] is plan.graphs["forward"]


def test_plan_with_another_policy_is_its_own_and_leaves_the_model_alone() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = hp_compile.shard(nn.Linear(4, 4), mesh, hp_compile.Policy(backend="aot_eager"))
        own = model.plan(torch.ones(3, 4))
        other = hp_compile.plan(
            model, mesh, hp_compile.Policy(reduce_op="sum"), args=(torch.ones(3, 4),)
        )
        assert other.fingerprint != own.fingerprint
        assert model.plan(torch.ones(3, 4)).fingerprint == own.fingerprint
