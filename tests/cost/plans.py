"""Plans of the small models on meshes that are not there, and what a step really allocates."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile.cost import CostModel
from tests.dist_pool import fake_world
from tests.models import CASES

NAMES = ("dp_replicate", "dp_shard")
MESHES = ((2, 4), (1, 7), (4, 1), (3, 8), (1, 1))


@functools.cache
def plan_on(
    shape: tuple[int, ...], name: str, *, names: tuple[str, ...] = NAMES, **policy: Any
) -> hp_compile.Plan:
    """Plan one of `CASES` on a fake mesh, once; without a symbolic batch unless asked for, which is much faster."""
    case = CASES[name]
    policy = {"dynamic": False, **policy}
    return make_plan(case.make(), (case.batch(0, 0)[0],), shape, names=names, **policy)


@functools.cache
def cost_of(shape: tuple[int, ...], name: str, **policy: Any) -> CostModel:
    """Return the cost model of one of `CASES`, which keeps the programs that it has made."""
    return CostModel(plan_on(shape, name, **policy))


def make_plan(
    model: nn.Module,
    args: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    *,
    names: tuple[str, ...] = NAMES,
    **policy: Any,
) -> hp_compile.Plan:
    """Plan a model on a fake mesh."""
    with fake_world(math.prod(shape)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])
        options = hp_compile.Policy(**{"backend": "aot_eager", **policy})
        plan = hp_compile.plan(model, mesh, options, args=args)
        plan.collectives  # noqa: B018  the graphs are made now
    return plan


def counted(plan: hp_compile.Plan) -> dict[tuple[str, str], int]:
    """Return the bytes of the collectives in a plan's own graphs, by phase and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for c in plan.collectives:
        found[c.phase, c.kind] += c.nbytes
    return dict(found)


def peak_bytes(run: Callable[[], Any], folder: Path) -> int:
    """Return what `run` allocates at its peak above what was there before, as torch's allocator says."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    total = peak = 0
    for _, nbytes in memory:
        total += nbytes
        peak = max(peak, total)
    return peak
