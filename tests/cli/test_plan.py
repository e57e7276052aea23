"""`hp-compile plan`: its text, its files, and what it says about wrong requests."""

from __future__ import annotations

import io
import json
from pathlib import Path

import expecttest
import pytest
from rich.console import Console

import hp_compile
from hp_compile import serial
from tests.cli.runner import TINY, hp, plain


class TestText(expecttest.TestCase):
    """Accept an intended change with EXPECTTEST_ACCEPT=1."""

    def test_plan(self) -> None:
        ran = hp("plan", *TINY, "--mesh", "dp_replicate=2,dp_shard=4,tp=2", "--world-rank", "5")
        assert ran.code == 0, ran.err
        self.assertExpectedInline(
            plain(ran.out),
            """\
$ hp-compile plan tests.models:TinyBlocks --mesh dp_replicate=2,dp_shard=4,tp=2 --world-rank 5 --inputs 'float32[batch,8]'
plan cdfab807fbf8396e
mesh    dp_replicate=2 x dp_shard=4 x tp=2: 16 ranks, seen from rank 5
roles   replicate: dp_replicate, shard: dp_shard, tp: tp
policy  (defaults)
inputs  [0]: float32[2, 8]

Parameters: 9, 648 elements, 162 on this rank
parameter      dtype  shape    placement   reduction
----------------------------------------------------
enter.weight   f32    [8, 8]   R, S(0), R  RS+AR (1)
enter.bias     f32    [8]      R, S(0), R  RS+AR (1)
leave.weight   f32    [4, 8]   R, S(0), R  RS+AR (1)
blocks.{0..1}
  up.weight    f32    [16, 8]  R, S(0), R  RS+AR (1)
  up.bias      f32    [16]     R, S(0), R  RS+AR (1)
  down.weight  f32    [8, 16]  R, S(0), R  RS+AR (1)
(1) FSDP cuts dim 0 over dp_shard(4), and its gradient is reduce-scattered
    over dp_shard(4), then all-reduced over dp_replicate(2). 9 parameters.

What one unit costs a step, on this rank
unit        collectives       over             dtype  sends  for
---------------------------------------------------------------------------
(root)
  forward   1 all_gather      dp_shard(4)      f32    312 B  unshard
  backward  1 reduce_scatter  dp_shard(4)      f32    312 B  reduce_grad
  backward  1 all_reduce      dp_replicate(2)  f32    104 B  replicate_grad
blocks.{0..1}: 2 units, each
  forward   1 all_gather      dp_shard(4)      f32    816 B  unshard
  backward  1 all_gather      dp_shard(4)      f32    768 B  unshard
  backward  1 reduce_scatter  dp_shard(4)      f32    816 B  reduce_grad
  backward  1 all_reduce      dp_replicate(2)  f32    272 B  replicate_grad

A step, on this rank
collectives         over             dtype  for             bytes sent
----------------------------------------------------------------------
forward
  3 all_gather      dp_shard(4)      f32    unshard              1,944
backward
  2 all_gather      dp_shard(4)      f32    unshard              1,536
  3 reduce_scatter  dp_shard(4)      f32    reduce_grad          1,944
  3 all_reduce      dp_replicate(2)  f32    replicate_grad         648
in all 11 collectives; this rank sends 6,072 bytes, 6.1 kB

note: mesh dim 'tp' of (dp_replicate=2, dp_shard=4, tp=2) cuts no parameter:
its ranks repeat each other's work on the same data; say in Policy.tp_plan
what it cuts, or leave it out of the mesh
""",
        )

    def test_parameters_only(self) -> None:
        ran = hp("plan", "tests.models:UnevenMLP", "--mesh", "dp_shard=4", "--params-only")
        assert ran.code == 0, ran.err
        self.assertExpectedInline(
            plain(ran.out),
            """\
$ hp-compile plan tests.models:UnevenMLP --mesh dp_shard=4 --params-only
plan e2a5bbe4e87905a2
mesh    dp_shard=4: 4 ranks, seen from rank 0
roles   shard: dp_shard
policy  (defaults)

Parameters: 8, 191 elements, 59 on this rank
parameter  dtype  shape    placement  reduction
-----------------------------------------------
layers.0
  weight   f32    [10, 6]  S(0)       RS (1)
  bias     f32    [10]     S(0)       RS (1)
layers.1
  weight   f32    [7, 10]  S(0)       RS (1)
  bias     f32    [7]      S(0)       RS (1)
layers.2
  weight   f32    [3, 7]   S(0)       RS (1)
  bias     f32    [3]      S(0)       RS (1)
layers.3
  weight   f32    [5, 3]   S(0)       RS (1)
  bias     f32    [5]      S(0)       RS (1)
(1) FSDP cuts dim 0 over dp_shard(4), and its gradient is reduce-scattered
    over dp_shard(4). 8 parameters.

Collectives: not known, the plan was made without a program

note: shards of layers.{0..3}.weight, layers.{0..3}.bias are padded to equal
rows; bytes include it
""",
        )

    def test_equal_layers_are_one_row(self) -> None:
        ran = hp("plan", "tests.models:TransformerLM", "--mesh", "dp_shard=2", "--params-only")
        names = [line.partition("  f32")[0].rstrip() for line in ran.out.splitlines()]
        assert "blocks.{0..1}" in names and "  attention.q.weight" in names
        assert names.count("  attention.q.weight") == 1


def test_files_have_the_format_of_their_suffix(tmp_path: Path) -> None:
    for name in ("plan.json", "plan.txt"):
        ran = hp("plan", *TINY, "--mesh", "dp_shard=2", "--output", str(tmp_path / name))
        assert (ran.code, ran.out) == (0, ""), ran.err
    saved = serial.load(tmp_path / "plan.json")
    assert saved.request is not None and saved.request["model"] == TINY[0]
    assert saved.collectives is not None and len(saved.collectives) == 8
    text = (tmp_path / "plan.txt").read_text("utf-8")
    assert text.startswith("$ cd ") and "\x1b" not in text
    assert saved.fingerprint in text
    # the file of a plan stands for its own arguments
    ran = hp("plan", str(tmp_path / "plan.json"), "--mesh", "dp_shard=4", "--format", "json")
    other = serial.loads(ran.out)
    assert other.mesh.dims == (("dp_shard", 4),) and other.inputs == saved.inputs


def test_dump_has_a_line_for_everything() -> None:
    ran = hp("plan", *TINY, "--mesh", "dp_shard=2", "--format", "dump")
    assert "blocks.1.down.weight  f32" in ran.out and "collectives: 8 a step" in ran.out


def llama(folder: Path, **changes: object) -> Path:
    """A config of a tiny Llama."""
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        **changes,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    return path


@pytest.mark.parametrize("directory", [False, True])
def test_hugging_face_config(tmp_path: Path, directory: bool) -> None:
    path = llama(tmp_path)
    spec = f"hf:{tmp_path if directory else path}"
    ran = hp("plan", spec, "--mesh", "dp_replicate=2,dp_shard=2", "--format", "json")
    assert ran.code == 0, ran.err
    saved = serial.loads(ran.out)
    assert saved.inputs == (
        "input_ids: int64[2, 16]",
        "labels: int64[2, 16]",
        "use_cache: False",
    )
    units = {c.unit for c in saved.collectives or ()}
    assert units == {"(root)", "model.layers.0", "model.layers.1"}


def test_hugging_face_errors(tmp_path: Path) -> None:
    mesh = ("--mesh", "dp_shard=2")
    missing = hp("plan", f"hf:{tmp_path}/none.json", *mesh)
    assert missing.code == 2 and "there is no such file" in missing.err
    path = llama(tmp_path, model_type="no_such_family")
    unknown = hp("plan", f"hf:{path}", *mesh)
    assert unknown.code == 2 and "no config could be read" in unknown.err
    path.write_text("{", "utf-8")
    broken = hp("plan", f"hf:{path}", *mesh)
    assert broken.code == 2 and "no config could be read" in broken.err


MODEL = "tests.models:UnevenMLP"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MODEL], "--mesh is missing"),
        ([MODEL, "--mesh", "dp_shard"], "expected name=size"),
        ([MODEL, "--mesh", "dp_shard=0"], "expected name=size"),
        ([MODEL, "--mesh", "dp_shard=2,dp_shard=2"], "named twice"),
        ([MODEL, "--mesh", "rows=2"], "dim 'rows' has no role"),
        ([MODEL, "--mesh", "dp_shard=2", "--world-rank", "2"], "has the ranks 0 to 1"),
        ([MODEL, "--mesh", "dp_shard=2", "--format", "pdf"], "the formats are text, json"),
        ([MODEL, "--mesh", "dp_shard=2", "--build-on", "gpu"], "expected meta or cpu"),
        ([MODEL, "--mesh", "dp_shard=2"], "cannot guess the inputs of UnevenMLP.forward(x)"),
        ([MODEL, "--mesh", "dp_shard=2", "--inputs", "float32[a]"], "the size 'a' is no number"),
        ([MODEL, "--mesh", "dp_shard=2", "--inputs", "float3[2]"], "expected package.module:"),
        ([MODEL, "--mesh", "dp_shard=2", "--inputs", "tests.models:LMConfig"], "got LMConfig"),
        ([MODEL, "--mesh", "dp_shard=2", "--inputs", "float32[2,7]"], "cannot capture"),
        (
            [MODEL, "--mesh", "dp_shard=2", "--inputs", "y=float32[2,6]"],
            "does not take them: missing",
        ),
        ([MODEL, "--mesh", "dp_shard=2", "--policy", "none.toml"], "cannot read the policy"),
        ([MODEL, "--mesh", "dp_shard=2,tp=2", "--tp-plan", "colwise"], "Policy.tp_plan: expected"),
        (["uneven", "--mesh", "dp_shard=2"], "expected package.module:factory"),
        (["tests.nowhere:x", "--mesh", "dp_shard=2"], "there is no module 'tests.nowhere'"),
        (["tests.models:UnevnMLP", "--mesh", "dp_shard=2"], "did you mean UnevenMLP?"),
        (["tests.models:Block", "--mesh", "dp_shard=2"], "it needs arguments (config)"),
        (["tests.models:lm_batch", "--mesh", "dp_shard=2"], "it needs arguments (rank, index)"),
        (["tests.models:LMConfig", "--mesh", "dp_shard=2"], "it returned LMConfig"),
        (["tests.models:CASES", "--mesh", "dp_shard=2"], "got dict"),
        (["none.json", "--mesh", "dp_shard=2"], "cannot read the saved plan"),
    ],
)
def test_wrong_requests_are_one_message(words: list[str], message: str) -> None:
    ran = hp("plan", *words)
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith("error: ") and message in ran.err
    assert "Traceback" not in ran.err


def test_a_model_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_model.py").write_text(
        "import torch\ndef build():\n    return torch.ones(2).sum().item()\nraise_ = 1 / 1\n",
        "utf-8",
    )
    (tmp_path / "failing_import.py").write_text("1 / 0\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    ran = hp("plan", "failing_model:build", "--mesh", "dp_shard=2")
    assert ran.code == 2 and "failing_model.py:3" in ran.err and "--build-on cpu" in ran.err
    ran = hp("plan", "failing_import:build", "--mesh", "dp_shard=2")
    assert ran.code == 2 and "ZeroDivisionError" in ran.err and "failing_import.py:1" in ran.err


def test_tp_plan_is_a_field_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(model: object, mesh: object, policy: hp_compile.Policy, **call: object) -> None:
        raise hp_compile.PolicyError(f"seen {policy.tp_plan}, bucket_mb {policy.bucket_mb}")

    monkeypatch.setattr(hp_compile, "plan", plan)
    words = ("plan", MODEL, "--mesh", "dp_shard=2,tp=2", "--inputs", "float32[2,6]")
    assert hp(*words, "--tp-plan", "auto").err == "error: seen auto, bucket_mb None\n"
    assert hp(*words).err == "error: seen None, bucket_mb None\n"


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    ran = hp(
        *("plan", "tests.models:UnevenMLP", "--mesh", "dp_shard=2", "--params-only"),
        *("--output", str(tmp_path / "no" / "plan.json")),
    )
    assert ran.code == 2 and "No such file" in ran.err


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", MODEL, "--mesh", "dp_shard=2", "--inputs", "float32[2,6]")
    assert hp(*words).err == ""
    screen = io.StringIO()
    monkeypatch.setattr(
        "hp_compile.cli.progress.stderr", lambda: Console(file=screen, force_terminal=True)
    )
    ran = hp(*words)
    assert ran.err == "" and ran.out.startswith("$ hp-compile plan")
    assert "capturing the model" in screen.getvalue() or "passes" in screen.getvalue()
    assert "done in" in screen.getvalue()
    screen.truncate(0)
    assert hp(*words, "--quiet").code == 0
    assert screen.getvalue() == ""
