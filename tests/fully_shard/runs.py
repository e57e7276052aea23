"""Training runs of the eager path, to compare with the baselines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel import HSDPModule, MixedPrecisionPolicy, fully_shard
from tests.baselines import TrainOptions, TrainResult, train
from tests.models import CASES, ModelCase


def data_mesh(shape: tuple[int, ...] | None = None) -> DeviceMesh:
    """Return (dp_shard) or (dp_replicate, dp_shard) over all ranks."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(
        "cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]
    )


def shard(model: nn.Module, case: ModelCase, options: TrainOptions, **changes: Any) -> HSDPModule:
    """Apply the eager `fully_shard` as `shard_with_fsdp2` applies PyTorch's."""
    policy = MixedPrecisionPolicy(
        param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype
    )
    settings: dict[str, Any] = {
        "mesh": data_mesh(options.mesh_shape),
        "mp_policy": policy,
        "reshard_after_forward": options.reshard_after_forward,
        **changes,
    }
    for module in [*(model.get_submodule(unit) for unit in case.units), model]:
        fully_shard(module, **settings)
    assert isinstance(model, HSDPModule)
    return model


def train_eager(
    rank: int,
    world_size: int,
    name: str,
    options: TrainOptions,
    changes: dict[str, Any] | None = None,
    before: Callable[[HSDPModule, bool], None] | None = None,
) -> TrainResult:
    """Train with the eager path; for `run_ranks`."""
    case = CASES[name]
    model = case.make()
    sharded = shard(model, case, options, **(changes or {}))

    def before_micro(last: bool) -> None:
        sharded.set_requires_gradient_sync(last or options.sync_every_micro)
        if before is not None:
            before(sharded, last)

    return train(
        model, functools.partial(case.batch, rank), case.loss, options, before_micro=before_micro
    )


def record_events(model: nn.Module) -> list[str]:
    """Return a list that grows by "start UNIT", "use UNIT" and "reduce UNIT" while `model` runs."""
    events: list[str] = []
    for module in model.modules():
        if isinstance(module, HSDPModule):
            _trace(module._hsdp_unit_state, events)
    return events


def _trace(unit: Any, events: list[str]) -> None:
    if "post_backward" in vars(unit):  # a unit of several modules, met before
        return
    unshard, wait, post = unit.unshard, unit.wait_for_unshard, unit.post_backward

    def traced_unshard(async_op: bool = False) -> None:
        idle = unit._gathers is None
        unshard(async_op)
        if idle and unit._gathers:
            events.append(f"start {unit.name or 'root'}")

    def traced_wait() -> None:
        if unit._gathers:
            events.append(f"use {unit.name or 'root'}")
        wait()

    def traced_post(ends: bool = False) -> None:
        events.append(f"reduce {unit.name or 'root'}")
        post(ends)

    unit.unshard, unit.wait_for_unshard = traced_unshard, traced_wait
    unit.post_backward = traced_post
