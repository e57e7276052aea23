"""Ranks that do not fit together say so, on every rank, before the first collective."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import Policy, agree
from tests.dist_pool import run_ranks
from tests.fake_dist import fake_world
from tests.hp_compile.single import Net

X = torch.ones(2, 6)


class Labelled(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.body(x)


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.o = nn.Linear(6, 16), nn.Linear(16, 5)


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if x.sum() > 0 else x


def _call(make: Any, mesh: Any, *args: Any, **policy: Any) -> str:
    """The text of the error that a first call raises."""
    try:
        model = hp_compile.shard(make(), mesh, Policy(**{"backend": "aot_eager", **policy}))
        model(*args)
    except hp_compile.HPCompileError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def differing_ranks(rank: int, world_size: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    first = rank == 0
    found = {
        "width": _call(Net if first else Wide, mesh, X),
        "policy": _call(Net, mesh, X, reduce_op="avg" if first else "sum"),
        "dtype": _call(Net, mesh, X if first else X.double().float()[None]),
        "labels": _call(Labelled, mesh, *((X,) if first else (X, torch.ones(2)))),
        "broken": _call(Net if first else Broken, mesh, X),
        # One rank would make a process group that the other never makes, and wait for it forever.
        "groups": _call(Net, mesh, X, reshard_after_forward=2 if first else True),
        "refused": _call(Net, mesh, X, min_shard_numel=0, units=("o",) if first else ("none",)),
    }
    agree.TIMEOUT_SECONDS = 3.0
    start = time.monotonic()
    found["absent"] = _call(Net, mesh, X) if first else "never called"
    assert time.monotonic() - start < 60
    agree.TIMEOUT_SECONDS = 60.0
    # Models count in the order they are sharded: rank 1 makes the one that it has not called.
    if not first:
        hp_compile.shard(Net(), mesh, Policy(backend="aot_eager"))
    # Other sizes on every rank are no difference, and later calls compare nothing.
    model = hp_compile.shard(Net(), mesh, Policy(backend="aot_eager"))
    model(torch.ones(2 + rank, 6)).sum().backward()
    agree.TIMEOUT_SECONDS = 0.01
    model(torch.ones(7 - rank, 6)).sum().backward()
    grad: Any = model.o.bias.grad
    found["sizes"] = str(grad.full_tensor().tolist())
    return found


def test_every_rank_reports_the_first_difference() -> None:
    found = run_ranks(differing_ranks, 2, timeout=300)
    for rank, texts in enumerate(found):
        for name, line in (
            ("width", "parameter l.weight"),
            ("policy", "policy.reduce_op"),
            ("dtype", "input"),
            ("labels", "input"),
            ("groups", "policy.reshard_after_forward"),
        ):
            assert "VerificationError: ranks built different programs" in texts[name], texts[name]
            assert line in texts[name], texts[name]
            assert f"rank {rank}:" in texts[name] and f"rank {1 - rank}:" in texts[name]
        # mean over ranks of the sums over both calls: ((2 + 3) + (7 + 6)) / 2
        assert texts["sizes"] == str([9.0] * 5)
    assert "[8, 6]" in found[0]["width"] and "[16, 6]" in found[0]["width"]
    assert "VerificationError: rank 1 could not build its program" in found[0]["broken"]
    assert "test_agree.py" in found[0]["broken"] and "torch.where" in found[0]["broken"]
    assert found[1]["broken"].startswith("CaptureError")
    assert "VerificationError: rank 1 could not build its program" in found[0]["refused"]
    assert found[1]["refused"].startswith("PolicyError")
    assert "rank 1 did not report a program within 3 s" in found[0]["absent"]


def _plan(make: Any, args: tuple[Any, ...], shape: tuple[int, ...], **policy: Any) -> str:
    names = ("dp_shard",) if len(shape) == 1 else ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return hp_compile.plan(make(), mesh, Policy(**policy), args=args).fingerprint


def test_fingerprint_is_of_what_will_run() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Net()

    with fake_world(4):
        base = _plan(Net, (X,), (4,), backend="aot_eager")
        assert _plan(on_meta, (X,), (4,), backend="aot_eager") == base
        assert _plan(Net, (torch.ones(5, 6),), (4,), backend="inductor") == base
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        sharded: Any = hp_compile.shard(Net(), mesh, Policy(backend="aot_eager"))
        assert sharded.plan(X).fingerprint == base
        others = {
            _plan(Wide, (X,), (4,)),
            _plan(Net, (X[None],), (4,)),
            _plan(Net, (X,), (2, 2)),
            _plan(Net, (X,), (4,), reshard_after_forward=False),
            _plan(Net, (X,), (4,), reduce_op="sum"),
        }
        assert base not in others and len(others) == 5
    with fake_world(4, rank=3):
        assert _plan(Net, (X,), (4,), backend="aot_eager") == base
