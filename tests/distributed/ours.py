"""The run under test: any case of `tests.models` through `hp_compile.shard`, in the loop of the baselines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hp_compile
from hp_compile import MixedPrecisionPolicy, Policy
from tests.baselines import TrainOptions, TrainResult, train
from tests.models import CASES

NAMES = ("dp_replicate", "dp_shard")


def make_mesh(options: TrainOptions, world_size: int) -> DeviceMesh:
    """The mesh that `shard_with_fsdp2` would use."""
    shape = options.mesh_shape or (world_size,)
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def make_policy(options: TrainOptions, **fields: Any) -> Policy:
    """The policy that says what `options` say; `aot_eager` unless told otherwise."""
    fields.setdefault("backend", "aot_eager")
    if "zero_level" not in fields:
        fields.setdefault("reshard_after_forward", options.reshard_after_forward)
    fields.setdefault(
        "mp_policy",
        MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype),
    )
    return Policy(**fields)


def train_ours(
    rank: int,
    world_size: int,
    name: str,
    options: TrainOptions,
    fields: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> TrainResult:
    """Train with `hp_compile.shard`; for `run_ranks`.

    Args:
        rank: This rank.
        world_size: All ranks.
        name: Key of `CASES`.
        options: How to train; also mesh, resharding and precision.
        fields: Further policy fields.
        prepare: Called with the plain model before it is sharded.
    """
    case = CASES[name]
    model: Any = case.make()
    if prepare is not None:
        prepare(model)
    policy = make_policy(options, **(fields or {}))
    model = hp_compile.shard(model, make_mesh(options, world_size), policy)

    def before_micro(last: bool) -> None:
        model.set_requires_gradient_sync(last or options.sync_every_micro)

    return train(
        model, functools.partial(case.batch, rank), case.loss, options, before_micro=before_micro
    )
