"""The main job, run as users run it: as a script that starts its own ranks."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train.py"
FINETUNE = ROOT / "examples" / "finetune.py"
SMALL = (
    "--dim",
    "32",
    "--layers",
    "1",
    "--seq-len",
    "16",
    "--batch-size",
    "2",
    "--backend",
    "aot_eager",
)


def start(
    *flags: str, cwd: Path, script: Path = SCRIPT, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), *flags],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def train(
    *flags: str, cwd: Path, code: int = 0, script: Path = SCRIPT, **environment: str
) -> tuple[str, str]:
    process = start(*flags, cwd=cwd, script=script, **environment)
    try:
        output, errors = process.communicate(timeout=800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, output + errors
    return output, errors


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--mesh", "dp_shard"], {}, "--mesh: expected name=size"),
        (["--mesh", "dp_shard=2,dp_shard=2"], {}, "named twice"),
        (["--mesh", "dp_shard=0"], {}, "--mesh: expected name=size"),
        (["--mesh", "dp_shard=2", "--dp-replicate-size", "2"], {}, "give one of them"),
        (["--mesh", "dp_replicate=2,dp_shard=2", "--ranks", "3"], {}, "has 4 ranks, but 3"),
        (["--mesh", "dp_shard=4"], {"WORLD_SIZE": "2", "RANK": "0"}, "--nproc-per-node 4"),
        (["--dp-replicate-size", "3", "--ranks", "4"], {}, "use one of 1, 2, 4"),
        (["--dp-replicate-size", "0"], {}, "expected 1 or more, got 0"),
        (["--mesh", "rows=2,columns=2"], {}, "--mesh: "),
        (
            ["--mesh", "dp_shard=2,tp=2"],
            {},
            "tp is a tp dim; say how it cuts the model with --tp-plan",
        ),
        (["--mesh", "dp_shard=2,ep=2"], {}, "ep is a ep dim"),
        (["--mesh", "dp_shard=2", "--tp-plan", "auto"], {}, "--tp-plan: the mesh has no tp dim"),
        (
            ["--mesh", "tp=2", "--tp-plan", "no.json"],
            {},
            "--tp-plan no.json: neither auto nor a JSON",
        ),
        (["--steps", "0"], {}, "--steps: expected 1 or more"),
        (["--lr", "-1"], {}, "--lr: expected a number above 0"),
        (["--model", "hf:bert"], {}, "--model: invalid choice"),
        (["--dim", "48"], {}, "multiple of 32"),
        (["--resume", "--overwrite"], {}, "give one of them"),
        (["--resume"], {}, "--resume: no complete checkpoint"),
    ],
)
def test_bad_flags_are_one_line_before_anything_starts(
    flags: list[str],
    environment: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, errors = refused(flags, environment, tmp_path, monkeypatch, capsys)
    assert message in errors and "Traceback" not in errors and output == ""
    assert errors.count("\n") <= 2 or errors.startswith("usage:")
    assert list(tmp_path.iterdir()) == []


def refused(
    flags: Sequence[str],
    environment: dict[str, str],
    cwd: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[str, str]:
    """What the script prints when it ends with exit code 2, run in this process: it starts no other."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr()


def test_other_ranks_do_not_repeat_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"WORLD_SIZE": "2", "RANK": "1"}
    for flags in (("--steps", "0"), ("--mesh", "dp_shard=4")):
        assert refused(flags, environment, tmp_path, monkeypatch, capsys) == ("", "")


def test_resume_with_another_model_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000002" / ".metadata").touch()
    written = {"model": "byte", "dim": 32, "layers": 1, "seq_len": 16, "seed": 0}
    (tmp_path / "run" / "options.json").write_text(json.dumps(written), "utf-8")
    _, errors = train("--output", "run", *SMALL, cwd=tmp_path, code=2)
    assert "run holds a run, up to step_000002; --resume goes on" in errors
    flags = ("--resume", "--output", "run", *SMALL, "--seed", "1")
    _, errors = refused(flags, {}, tmp_path, monkeypatch, capsys)
    assert "run was written with --seed 0, this run says 1" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.dist
def test_resumed_run_goes_on_bit_for_bit_and_on_other_ranks(tmp_path: Path) -> None:
    flags = ("--mesh", "dp_replicate=1,dp_shard=2", "--grad-accum", "2", *SMALL)
    saving = ("--checkpoint-every", "2", "--output", "whole")
    output, _ = train(*flags, "--steps", "6", "--compare", *saving, cwd=tmp_path)
    assert "plan " in output and "proved" in output
    assert "equal: largest relative" in output and "of 6 compared" in output
    whole = losses(tmp_path / "whole")
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6]
    assert whole[-1][1] < whole[0][1]
    for name in ("options.json", "plan.txt", "metrics.jsonl", "loss.png"):
        assert (tmp_path / "whole" / name).stat().st_size > 0

    # As a run that died after step 5 leaves it.
    kept = tmp_path / "whole" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["step_000004", "step_000006"]
    shutil.rmtree(kept / "step_000006")
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "whole" / "metrics.jsonl").write_text("".join(lines[:5]), "utf-8")
    output, _ = train(*flags, "--steps", "6", "--resume", "--output", "whole", cwd=tmp_path)
    assert "resumed from whole/checkpoints/step_000004: step 4" in output
    assert losses(tmp_path / "whole") == whole

    # The order of the data does not depend on the ranks: 2 ranks x 2 sequences are 1 rank x 4.
    one = ("--ranks", "1", "--grad-accum", "2", *SMALL, "--batch-size", "4", "--steps", "8")
    output, _ = train(*one, "--resume", "--compare", "--output", "whole", cwd=tmp_path)
    assert "equal: largest relative" in output and "of 8 compared" in output


@pytest.mark.slow
@pytest.mark.dist
def test_tensor_parallel_run_equals_the_unsharded_one_and_goes_on_without(tmp_path: Path) -> None:
    small = (*SMALL, "--dim", "128", "--output", "run")  # four heads and two of keys and values
    flags = ("--mesh", "dp_shard=2,tp=2", "--tp-plan", "auto", "--compare")
    output, _ = train(*flags, *small, "--steps", "3", cwd=tmp_path)
    assert "proved" in output and "equal: largest relative" in output and "of 3 compared" in output
    assert "gathered for" not in output  # everything runs on parts
    # 2 data ranks x 2 sequences are 1 x 4; the ranks of tp share theirs.
    one = ("--ranks", "1", "--batch-size", "4", "--resume", "--compare", "--steps", "4")
    output, _ = train(*small, *one, cwd=tmp_path)
    assert "resumed from run/checkpoints/step_000003" in output
    assert "equal: largest relative" in output and "of 4 compared" in output


@pytest.mark.slow
@pytest.mark.dist
def test_a_plan_from_a_file_cuts_a_hugging_face_model(tmp_path: Path) -> None:
    plan = {
        "*.q_proj": "colwise",
        "*.k_proj": "colwise",
        "*.v_proj": "colwise",
        "*.o_proj": "rowwise",
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan), "utf-8")
    flags = ("--model", "hf:llama", "--mesh", "tp=2", "--tp-plan", "plan.json", "--compare")
    output, _ = train(*flags, *SMALL, "--dim", "128", "--steps", "2", cwd=tmp_path)
    assert "equal: largest relative" in output and "of 2 compared" in output


@pytest.mark.slow
@pytest.mark.dist
def test_finetuning_learns_keeps_the_base_and_is_read_by_transformers(tmp_path: Path) -> None:
    flags = ("--mesh", "dp_shard=2,tp=2", "--tp-plan", "auto", "--steps", "8", "--seq-len", "32")
    output, _ = train(*flags, "--output", "tuned", cwd=tmp_path, script=FINETUNE)
    assert "7,168 of 138,560 parameters are trained" in output
    assert "21 of 21 frozen parameters are bit for bit as they were" in output
    assert "loaded with transformers: logits of the merged model differ by" in output
    assert (tmp_path / "tuned" / "merged" / "config.json").is_file()
    assert (tmp_path / "tuned" / "adapters" / "model.safetensors").stat().st_size < 40_000
    # What it wrote is a checkpoint to start from, on another mesh.
    again = ["--checkpoint", "tuned/merged", "--mesh", "dp_shard=2", "--steps", "8", "--lr", "3e-3"]
    again += ["--seq-len", "32", "--output", "again"]
    continued, _ = train(*again, cwd=tmp_path, script=FINETUNE)
    losses = [
        loss
        for text in (output, continued)
        for loss in map(float, re.findall(r"held-out text (\S+) -> (\S+);", text)[0])
    ]
    assert losses[0] > losses[1] == losses[2] > losses[3]


def test_finetuning_with_wrong_flags_is_one_line(tmp_path: Path) -> None:
    _, errors = train("--checkpoint", "nowhere", cwd=tmp_path, script=FINETUNE, code=2)
    assert errors == "finetune.py: error: --checkpoint nowhere: holds no config.json\n"


@pytest.mark.slow
@pytest.mark.dist
def test_a_hugging_face_model_equals_the_unsharded_run(tmp_path: Path) -> None:
    flags = ("--model", "hf:gpt2", "--zero", "2", "--grad-accum", "2", "--precision", "bf16")
    output, _ = train(*flags, *SMALL, "--ranks", "2", "--steps", "3", "--compare", cwd=tmp_path)
    assert "equal: largest relative" in output and "of 3 compared" in output


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("victim", ["all", "one"])
def test_interrupt_and_a_dead_rank_end_the_run(victim: str, tmp_path: Path) -> None:
    flags = ("--ranks", "2", *SMALL, "--steps", "100000")
    process = start(*flags, "--output", "run", cwd=tmp_path)
    _wait_for(tmp_path / "run" / "metrics.jsonl", process)
    if victim == "all":
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        expected = "train.py: interrupted; no checkpoint was written yet"
    else:
        os.kill(_ranks_of(process.pid)[1], signal.SIGKILL)
        expected = "ended first, with SIGKILL"
    output, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "step" in output
    assert expected in errors and "Traceback" not in errors, errors


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        if path.is_file() and path.stat().st_size:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"no {path}")


def _ranks_of(launcher: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(launcher)],
        text=True,
        capture_output=True,
        check=True,
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "train.py" in line]
