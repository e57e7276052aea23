"""`hp-compile explain` and `hp-compile verify`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest

from hp_compile import pipeline
from passes.base import REDUCE, SCATTER
from tests.cli.runner import TINY, hp, plain

MESH = ("--mesh", "dp_replicate=2,dp_shard=4")
ROOT = Path(__file__).parents[2]


class TestText(expecttest.TestCase):
    """Accept an intended change with EXPECTTEST_ACCEPT=1."""

    def test_explain(self) -> None:
        ran = hp("explain", *TINY[:1], "blocks.1.up.weight", *TINY[1:], *MESH)
        assert ran.code == 0, ran.err
        self.assertExpectedInline(
            plain(ran.out),
            """\
blocks.1.up.weight
  stored     f32 [16, 8], placement dp_replicate R, dp_shard S(0)
             this rank (0) keeps [4, 8]
  gather     with unit blocks.1, freed after forward (reshard_after_forward)
             forward #2: all_gather over dp_shard(4) in f32, this rank sends 816
               B, in a bucket of 3 (blocks.1.up.weight, blocks.1.up.bias, ...)
             backward #3: all_gather over dp_shard(4) in f32, this rank sends
               768 B, in a bucket of 2 (blocks.1.up.weight,
               blocks.1.down.weight)
  use        forward: aten.addmm in blocks.1.up (tests/models.py:132)
             backward: aten.mm in blocks.1.up (tests/models.py:132)
  gradient   f32 [16, 8] from aten.mm, for blocks.1.up (tests/models.py:132)
  reduction  RS+AR: mean over the 8 ranks with different data, kept as f32
             backward #5: reduce_scatter over dp_shard(4) in f32, this rank
               sends 816 B, in a bucket of 3 (blocks.1.up.weight,
               blocks.1.up.bias, ...)
             backward #6: all_reduce over dp_replicate(2) in f32, this rank
               sends 272 B, in a bucket of 3 (blocks.1.up.weight,
               blocks.1.up.bias, ...)
  ranks      FSDP cuts it over ranks 0, 1, 2, 3
             data-parallel replicas of this slice: ranks 0, 4
  why        FSDP cuts dim 0 over dp_shard(4), and its gradient is
               reduce-scattered over dp_shard(4), then all-reduced over
               dp_replicate(2).

""",
        )

    def test_verify(self) -> None:
        ran = hp("verify", *TINY, *MESH)
        assert ran.code == 0, ran.err
        lines = ran.out.splitlines()
        lines[1] = lines[1].partition(", in ")[0]  # seconds
        self.assertExpectedInline(
            plain("\n".join(lines) + "\n"),
            """\
proved: plan ff6baf823e2dba5c on dp_replicate=2, dp_shard=4
forward and backward, 209 nodes

proved                                                                                       of
-----------------------------------------------------------------------------------------------
gradient is summed once over dp_replicate(2) and dp_shard(4), divided by 8, kept as float32   9
forward all-gather over dp_shard(4) joins the right shards, element by element                3
backward all-gather over dp_shard(4) joins the right shards, element by element               2
backward reduce-scatter over dp_shard(4) sends each rank its own rows                         3
backward all-reduce over dp_replicate(2) sums values that differ on these ranks               3
output is computed as in the captured model                                                   1
value saved for backward is computed as captured                                             11
""",
        )


def test_globs_and_frozen_and_unused() -> None:
    words = ("--inputs", "float32[batch,6]", "--mesh", "dp_shard=2")
    ran = hp("explain", "tests.models:FrozenNet", "base.*", "outer.bias", *words)
    assert [line for line in ran.out.splitlines() if line[:1].isalpha()] == [
        "base.weight",
        "base.bias",
        "outer.bias",
    ]
    assert ran.out.count("gradient   none: it is frozen") == 3
    ran = hp("explain", "tests.models:UnusedNet", "unused.*", *words, "--most", "1")
    assert "use        nothing reads it" in ran.out
    assert "none: no output depends on it" in ran.out
    assert "… and 1 more match; --most 2 shows all" in ran.out


def test_close_names() -> None:
    ran = hp("explain", *TINY[:1], "blocks.0.upp.weight", *TINY[1:], *MESH)
    assert ran.code == 2 and "close are blocks.0.up.weight" in ran.err
    ran = hp("explain", *TINY[:1], "*.xyz", *TINY[1:], *MESH)
    assert ran.code == 2 and "the parameters are enter.weight" in ran.err


def test_a_wrong_program_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    original = pipeline.schedule_steps

    def drop_reductions(gm, **options):
        for node in gm.graph.nodes:
            if node.target is REDUCE:
                (wait,) = node.users
                wait.replace_all_uses_with(node.args[0])
        gm.graph.eliminate_dead_code(lambda n: n.target is not SCATTER and n.is_impure())
        return gm

    monkeypatch.setenv("HP_COMPILE_VERIFY", "1")
    monkeypatch.setattr(
        pipeline, "schedule_steps", lambda p: [pipeline.Step(drop_reductions), *original(p)]
    )
    ran = hp("verify", *TINY, *MESH)
    assert ran.code == 1
    assert ran.out.startswith("not proved: ") and "dp_replicate" in ran.out


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hp_compile", "plan", "x:y", "--mesh", "dp_shard=2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: MODEL x:y: there is no module 'x'")


@pytest.mark.parametrize("command", ["plan", "diff", "check", "explain", "verify"])
def test_help(command: str) -> None:
    ran = hp(command, "--help")
    assert ran.code == 0 and "--mesh" in ran.out
