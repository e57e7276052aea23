"""Plans of the small models on meshes that are not there, and what a step really allocates."""

from __future__ import annotations

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
from tests.dist_pool import fake_world
from tests.models import CASES

NAMES = ("dp_replicate", "dp_shard")
MESHES = ((2, 4), (1, 7), (4, 1), (3, 8), (1, 1))


def plan_on(
    shape: tuple[int, ...],
    model: nn.Module | str,
    args: tuple[torch.Tensor, ...] | None = None,
    *,
    names: tuple[str, ...] = NAMES,
    **policy: Any,
) -> hp_compile.Plan:
    """Plan a model, or one of `CASES`, on a fake mesh."""
    if isinstance(model, str):
        case = CASES[model]
        model, args = case.make(), (case.batch(0, 0)[0],)
    with fake_world(math.prod(shape)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])
        options = hp_compile.Policy(**{"backend": "aot_eager", **policy})
        plan = hp_compile.plan(model, mesh, options, args=args or ())
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
