"""`hp-compile cost` and `hp-compile sweep`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.runner import TINY, hp, plain

MESH = ("--mesh", "dp_replicate=2,dp_shard=4")


def test_cost_of_a_step() -> None:
    ran = hp("cost", *TINY, *MESH)
    assert ran.code == 0, ran.err
    text = plain(ran.out)
    assert text.startswith(
        "$ hp-compile cost tests.models:TinyBlocks --mesh dp_replicate=2,dp_shard=4"
    )
    amounts = dict(re.findall(r"^sent by (\w+) +([\d,]+) B$", text, re.M))
    totals: dict[str, int] = {}
    for line in plain(hp("plan", *TINY, *MESH).out).split("A step, on this rank")[1].splitlines():
        words = line.split()
        if words and words[0].isdigit():
            totals[words[1]] = totals.get(words[1], 0) + int(words[-1].replace(",", ""))
    assert {kind: int(sent.replace(",", "")) for kind, sent in amounts.items()} == totals
    assert "estimated time on NVIDIA H100 SXM" in text


def test_expressions_and_trace(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    ran = hp("cost", *TINY, *MESH, "--expressions", "--trace", str(trace), "--streams", "2")
    assert ran.code == 0, ran.err
    assert re.search(r"sent by reduce_scatter: .*dp_shard - 1", plain(ran.out))
    assert json.loads(trace.read_text())["traceEvents"]


def test_sweep_lists_every_data_mesh() -> None:
    ran = hp("sweep", *TINY, "--devices", "4")
    assert ran.code == 0, ran.err
    rows = [
        line.split()[1:3] for line in plain(ran.out).splitlines() if line.strip()[:1].isdigit()
    ][1:]
    assert sorted(rows) == [["1", "4"], ["2", "2"], ["4", "1"]]


def test_sweep_over_tensor_parallel_sizes(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[tp_plan]\n"*.up" = "colwise"\n"*.down" = "rowwise"\n')
    ran = hp("sweep", *TINY, "--devices", "4", "--tp", "2,4", "--policy", str(policy), "--top", "2")
    assert ran.code == 0, ran.err
    rows = [line.split() for line in plain(ran.out).splitlines() if line.strip()[:1].isdigit()][1:]
    assert len(rows) == 2 and {row[0] for row in rows} <= {"2", "4"}
    assert "at most 80 GB a rank" in plain(ran.out)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("cost", *TINY, *MESH, "--profile", "abacus"), "abacus"),
        (("sweep", *TINY, "--devices", "6", "--tp", "4"), "--tp 4: 4 does not divide 6 devices"),
        (("sweep", *TINY, "--devices", "8", "--tp", "two"), "expected sizes such as 1,2,4,8"),
        (("sweep", *TINY, "--devices", "8", "--tp", "1,2"), "say how the model is cut"),
    ],
)
def test_wrong_requests(words: tuple[str, ...], text: str) -> None:
    ran = hp(*words)
    assert ran.code == 2
    assert text in ran.err
