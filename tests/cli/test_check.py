"""`hp-compile check` in a repository of somebody who keeps a plan in it, and `hp-compile diff`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import expecttest
import pytest

from hp_compile import serial
from tests.cli.runner import TINY, hp, plain

MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x
"""
POLICY = "reshard_after_forward = true\nmin_shard_numel = 0\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model, a policy, and plans that are kept beside them in a folder."""
    (tmp_path / "sample_model.py").write_text(MODEL, "utf-8")
    (tmp_path / "policy.toml").write_text(POLICY, "utf-8")
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("plans/golden.json", "plans/golden.txt"):
        ran = hp(
            *("plan", "sample_model:Model", "--mesh", "dp_replicate=2,dp_shard=2", "--seq", "4"),
            *("--policy", "policy.toml", "--output", name),
        )
        assert ran.code == 0, ran.err
    yield tmp_path
    sys.modules.pop("sample_model", None)


@pytest.mark.parametrize("golden", ["golden.json", "golden.txt"])
def test_a_line_of_the_policy_is_caught(
    repository: Path, monkeypatch: pytest.MonkeyPatch, golden: str
) -> None:
    monkeypatch.chdir(repository / "plans")  # it runs from anywhere
    same = hp("check", golden)
    assert (same.code, same.out) == (0, f"as in {golden}\n"), same.err

    policy = repository / "policy.toml"
    policy.write_text(POLICY.replace("min_shard_numel = 0", "min_shard_numel = 64"), "utf-8")
    found = hp("check", golden)
    assert found.code == 1, found.err
    assert f"the plan is not the one in {golden}" in found.out
    assert "min_shard_numel" in found.out and "64" in found.out
    assert "blocks.{0..1}" in found.out and "up.bias" in found.out
    assert f"accept it with: hp-compile check {golden} --update" in found.out

    accepted = hp("check", golden, "--update")
    assert accepted.code == 0 and f"written: {golden}" in accepted.out
    assert hp("check", golden).code == 0
    assert hp("check", golden, "--update").out == f"unchanged: {golden}\n"


def test_options_stand_in_for_those_of_the_file(repository: Path) -> None:
    ran = hp("check", "plans/golden.json", "--mesh", "dp_shard=4")
    assert ran.code == 1
    assert "dp_replicate=2, dp_shard=2" in ran.out and "dp_shard=4" in ran.out


def test_a_new_file_needs_a_model(repository: Path) -> None:
    ran = hp("check", "plans/new.json")
    assert ran.code == 2 and "there is no such file" in ran.err
    ran = hp("check", "plans/new.json", "--update")
    assert ran.code == 2 and "give MODEL and --mesh" in ran.err
    words = ("check", "plans/new.json", "sample_model:Model", "--mesh", "dp_shard=2", "--seq", "4")
    assert hp(*words, "--update").code == 0
    assert hp("check", "plans/new.json").code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is no JSON"),
        ("[]", "not a saved plan"),
        ('{"format": "hp_compile.plan", "version": 99}', "has version 99"),
        ('{"format": "hp_compile.plan", "version": 1}', "is damaged (KeyError: 'groups')"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    golden = tmp_path / "plan.json"
    golden.write_text(text, "utf-8")
    for words in (["check", str(golden)], ["diff", str(golden), str(golden)]):
        ran = hp(*words)
        assert ran.code == 2 and message in ran.err, ran.err


def test_broken_requests(repository: Path) -> None:
    golden = repository / "plans" / "golden.json"
    document = json.loads(golden.read_text("utf-8"))
    for request, message in (
        (None, "does not say what it was made from"),
        ({"mesh": "dp_shard=2"}, "is damaged"),
        ({"model": "m:f", "mesh": "dp_shard=2", "seed": 1}, "unknown key 'seed'"),
        ({"model": "m:f", "mesh": "dp_shard=2", "root": "gone"}, "does not exist"),
    ):
        golden.write_text(json.dumps({**document, "request": request}), "utf-8")
        ran = hp("check", str(golden))
        assert ran.code == 2 and message in ran.err, ran.err
    text = repository / "plans" / "golden.txt"
    text.write_text("plan 1234\n", "utf-8")
    ran = hp("check", str(text))
    assert ran.code == 2 and "the first line is not the command" in ran.err
    text.write_text("$ hp-compile plan a:b --no-such-flag\n", "utf-8")
    ran = hp("check", str(text))
    assert ran.code == 2 and "no valid command" in ran.err


class TestDiff(expecttest.TestCase):
    """Accept an intended change with EXPECTTEST_ACCEPT=1."""

    def test_two_meshes(self) -> None:
        words = ("diff", *TINY, "--mesh", "dp_shard=4", "--mesh", "dp_replicate=2,dp_shard=2")
        ran = hp(*words, "--exit-code")
        assert ran.code == 1, ran.err
        self.assertExpectedInline(
            plain(ran.out),
            """\
plan 69c41b2ee760d80d -> 9da1c3246c405362

Mesh, policy and inputs
field       before          after
------------------------------------------------------------------
mesh        dp_shard=4      dp_replicate=2, dp_shard=2
mesh roles  shard=dp_shard  replicate=dp_replicate, shard=dp_shard

Parameters: 9 change
all 9
  placement  dim 0 over dp_shard(4) -> dim 0 over dp_shard(2)
  reduction  RS -> RS+AR

Collectives a step, on this rank
collectives       over          dtype  for                before      after
---------------------------------------------------------------------------
forward
~ all_gather      dp_shard      f32    unshard         3, 1.9 kB  3, 1.3 kB
backward
~ all_gather      dp_shard      f32    unshard         2, 1.5 kB  2, 1.0 kB
~ reduce_scatter  dp_shard      f32    reduce_grad     3, 1.9 kB  3, 1.3 kB
+ all_reduce      dp_replicate  f32    replicate_grad          -  3, 1.3 kB
in all 8 -> 11 collectives; this rank sends 5.4 kB -> 4.9 kB
""",
        )


def test_two_files(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("a.json", "b.json")]
    policy = tmp_path / "policy.toml"
    policy.write_text('[mp_policy]\nparam_dtype = "bf16"\n', "utf-8")
    hp("plan", *TINY, "--mesh", "dp_shard=2", "--output", names[0])
    hp("plan", *TINY, "--mesh", "dp_shard=2", "--policy", str(policy), "--output", names[1])
    same = hp("diff", names[0], names[0], "--exit-code")
    assert same.code == 0 and same.out.startswith("no difference: plan ")
    ran = hp("diff", *names)
    assert ran.code == 0
    assert "policy.mp_policy.param_dtype" in ran.out and "bfloat16" in ran.out
    assert hp("diff", *names, "--exit-code").code == 1
    # a saved plan and another mesh for it
    ran = hp("diff", names[0], "--mesh", "dp_shard=4")
    assert ran.code == 0 and "dp_shard=2" in ran.out and "dp_shard=4" in ran.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.json"], "something to compare a.json with"),
        (["a.json", "b.json", "c.json"], "compares two plans, got 3"),
        (["m:f", *["--mesh", "dp_shard=2"] * 3], "--mesh is given 3 times"),
        (["m:f", "--mesh", "dp_shard=2", "--mesh", "dp_shard=2"], "something to compare"),
    ],
)
def test_diff_needs_two_plans(words: list[str], message: str) -> None:
    ran = hp("diff", *words)
    assert ran.code == 2 and message in ran.err


def test_a_plan_of_the_library_has_no_request(tmp_path: Path) -> None:
    saved = serial.loads(hp("plan", *TINY, "--mesh", "dp_shard=2", "-f", "json").out)
    path = tmp_path / "plan.json"
    path.write_text(serial.dumps(saved.content()), "utf-8")
    ran = hp("check", str(path), *TINY, "--mesh", "dp_shard=2")
    assert ran.code == 0, ran.out + ran.err
