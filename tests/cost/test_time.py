"""Time: machines as files, the simulated timeline, its trace, and the sweep over meshes."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import sympy
import torch

from hp_compile import capture
from hp_compile.cost import (
    BUILT_IN,
    Link,
    Profile,
    chrome_trace,
    load_profile,
    sweep,
    table,
    write_trace,
)
from hp_compile.cost.simulate import Op, simulate
from hyper_parallel.errors import HPCompileError
from passes.base import Comm
from tests.cost.plans import cost_of, plan_on

ROUND = Profile(
    name="round numbers",
    flops={"float32": 2e12},
    achievable=0.5,
    launch=1e-6,
    memory_bytes=1e9,
    memory_bandwidth=1e12,
    ranks_per_node=2,
    intra=Link(bandwidth=1e9, latency=0.0),
    inter=Link(bandwidth=1e8, latency=0.5),
)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_machines(name: str) -> None:
    profile = load_profile(name)
    assert profile.flop_rate(torch.bfloat16) > profile.flop_rate(torch.float32)
    assert profile.intra.bandwidth > profile.inter.bandwidth
    assert profile.flop_rate(torch.int64) == profile.flop_rate(torch.float32)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_number_names_its_source(name: str) -> None:
    text = (
        Path(__file__).parents[2] / "hp_compile" / "cost" / "profiles" / f"{name}.toml"
    ).read_text()
    lines = [
        line for line in text.splitlines() if "=" in line and not line.startswith(("#", "name"))
    ]
    unsourced = [line for line in lines if "#" not in line]
    assert all(line.startswith("float8") for line in unsourced)  # as the line before


def test_the_user_s_own_machine(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "hp_compile" / "cost" / "profiles" / "h100.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(source.read_text().replace("ranks_per_node = 8", "ranks_per_node = 4"))
    assert load_profile(mine) == dataclasses.replace(load_profile("h100"), ranks_per_node=4)
    mine.write_text(source.read_text().replace("launch = 5e-6", "lunch = 5e-6"))
    with pytest.raises(
        HPCompileError, match=r"missing keys \['launch'\], unknown keys \['lunch'\]"
    ):
        load_profile(mine)
    with pytest.raises(HPCompileError, match="neither one of h100"):
        load_profile("h1000")
    mine.write_text("name = ")
    with pytest.raises(HPCompileError, match=r"mine\.toml"):
        load_profile(mine)


def test_links_follow_the_ranks() -> None:
    assert ROUND.link((0, 1)) is ROUND.intra
    assert ROUND.link((0, 2)) is ROUND.inter


def _op(name: str, *, waits: int = -1, gathers: bool = False) -> Op:
    zero = sympy.Integer(0)
    comm = Comm("all_gather", ("dp_shard",), "unshard") if gathers else None
    return Op(name, "forward", name, "", zero, zero, torch.float32, comm=comm, waits=waits)


def test_a_collective_hides_behind_compute_and_a_wait_blocks() -> None:
    layout = plan_on((1, 2), "tiny").layout
    ops = [
        _op("g0", gathers=True),
        _op("w0", waits=0),
        _op("g1", gathers=True),
        _op("mm"),
        _op("w1", waits=2),
        _op("mm"),
    ]
    numbers = [(0, 0, 1e6), (0, 0, 0), (0, 0, 3e6), (2e9, 1, 0), (0, 0, 0), (0, 5e9, 0)]
    step = simulate(ops, numbers, profile=ROUND, layout=layout)
    spans = [(s.name, s.stream, round(s.start, 9), round(s.seconds, 9)) for s in step.spans]
    assert spans == [
        ("g0", "communication", 0.0, 0.001),
        ("g1", "communication", 0.001, 0.003),
        ("mm", "compute", 0.001, 0.002),  # 2e9 FLOPs at half of 2e12 a second
        ("mm", "compute", 0.004, 0.005),  # 5e9 bytes at 1e12 a second
    ]
    assert step.exposed == pytest.approx(0.001 + 0.001)
    assert step.seconds == pytest.approx(0.009)
    assert step.busy == pytest.approx({"compute": 0.007, "communication": 0.004})


def test_two_streams_are_never_slower() -> None:
    model = cost_of((2, 2), "lm")
    one, two = (model.timeline(ROUND, streams=n) for n in (1, 2))
    assert set(two.busy) == {"compute", "gathers", "reductions"}
    assert two.seconds <= one.seconds
    assert two.busy["compute"] == pytest.approx(one.busy["compute"])


def test_trace_opens_in_perfetto(tmp_path: Path) -> None:
    step = cost_of((2, 2), "lm").timeline("h100")
    write_trace(step, tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace == json.loads(json.dumps(chrome_trace(step)))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in events} >= {"all_gather", "reduce_scatter", "all_reduce", "aten.mm"}
    assert max(e["ts"] + e["dur"] for e in events) <= step.seconds * 1e6 + 1e-3
    for thread in {e["tid"] for e in events}:  # nothing overlaps on a stream
        mine = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == thread)
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in pairwise(mine))


def test_sweep_prices_every_mesh_from_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cost_of((2, 2), "tiny", dynamic=None)
    monkeypatch.setattr(capture, "joint_trace", None)
    rows = sweep(model, 8, profile=ROUND, memory_bytes=10_000)
    assert {tuple(r.sizes.values()) for r in rows} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    assert [r.fits for r in rows] == sorted((r.fits for r in rows), reverse=True)
    assert any(r.fits for r in rows) and not all(r.fits for r in rows)
    fitting = [r.rate for r in rows if r.fits]
    assert fitting == sorted(fitting, reverse=True)
    assert {r.data_ranks for r in rows} == {8}
    assert {r.inputs["batch"] for r in rows} == {4}
    text = table(rows)
    assert len(text.splitlines()) == 5 and "peak GB" in text


def test_sweep_on_captured_tp_and_bad_numbers() -> None:
    plan = plan_on((2, 2), "tiny", names=("dp_shard", "tp"))
    rows = sweep([plan], 8)
    assert {(r.sizes["tp"], r.sizes["dp_shard"]) for r in rows} == {(2, 1), (2, 2), (2, 4)}
    with pytest.raises(HPCompileError, match="7 devices cannot hold"):
        sweep(plan, 7)


def test_sweep_leaves_out_what_the_policy_forbids() -> None:
    rows = sweep(plan_on((1, 4), "tiny", reshard_after_forward=2), 8)
    assert {r.sizes["dp_shard"] for r in rows} == {2, 4, 8}
