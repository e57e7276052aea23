"""Compiled code is found again on disk: by a second start of the same program, and by rank 1 in what rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# One training step of one rank, and how often Inductor's graph cache was asked.
ONE_STEP = """
import json, sys, torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
import hp_compile
from tests.passes.programs import Blocks

rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("fake", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
model = hp_compile.shard(Blocks(), mesh)
model(torch.randn(4, 4)).sum().backward()
asked = counters["inductor"]
print(json.dumps({kind: asked[f"fxgraph_cache_{kind}"] for kind in ("hit", "miss", "bypass")}))
"""


def run_step(cache: Path, rank: int, world: int) -> dict[str, int]:
    """Train one step in a fresh process that keeps compiled code in ``cache``."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", ONE_STEP, str(rank), str(world)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return asked


@pytest.mark.slow
def test_second_start_and_other_ranks_generate_no_code(tmp_path: Path) -> None:
    """Forward and backward are two graphs: two misses at the first start, two hits at any other."""
    assert run_step(tmp_path, 0, 2) == {"hit": 0, "miss": 2, "bypass": 0}
    assert run_step(tmp_path, 0, 2) == {"hit": 2, "miss": 0, "bypass": 0}
    assert run_step(tmp_path, 1, 2) == {"hit": 2, "miss": 0, "bypass": 0}
