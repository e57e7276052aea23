"""What the documents print is what happens: their code runs, their output is current, their links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text("utf-8")) if kind == language]


def run(*command: str, cwd: Path, timeout: float = 800) -> str:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        timeout=timeout,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def readme_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two scripts of the README, saved under the names that it gives them, and what it adds to the second."""
    folder = tmp_path_factory.mktemp("readme")
    text = README.read_text("utf-8")
    names = re.findall(r"Save this as `(\w+\.py)`", text)
    codes = blocks(README, "python")
    assert names == ["quickstart.py", "show_plan.py"] and len(codes) == 3
    assert "These lines continue `show_plan.py`" in text
    codes[2] = codes[1] + codes[2]
    for name, code in zip([*names, "price_plan.py"], codes, strict=True):
        (folder / name).write_text(code, "utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.dist
def test_quick_start_runs_as_printed(readme_scripts: Path) -> None:
    command = re.search(r"^    torchrun (.* quickstart\.py)$", README.read_text("utf-8"), re.M)
    assert command is not None
    output = run("-m", "torch.distributed.run", *command[1].split(), cwd=readme_scripts)
    losses = [float(x) for x in re.findall(r"^step \d  loss (\S+)$", output, re.M)]
    assert len(losses) == 5 and all(5 < loss < 9 for loss in losses)


@pytest.mark.slow
def test_dump_in_readme_is_current(readme_scripts: Path) -> None:
    output = run("show_plan.py", cwd=readme_scripts).rstrip("\n") + "\n"
    (printed,) = blocks(README, "text")
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        text = README.read_text("utf-8")
        README.write_text(text.replace(f"```text\n{printed}```", f"```text\n{output}```"), "utf-8")
        return
    assert printed == output, "run the test with EXPECTTEST_ACCEPT=1 and read the difference"


@pytest.mark.slow
def test_prices_in_readme_are_printed(readme_scripts: Path) -> None:
    pytest.importorskip("bokeh", reason="the extra `page` is not installed")
    output = run("price_plan.py", cwd=readme_scripts)
    assert "(dp_shard - 1)" in output and "step ms" in output
    page = readme_scripts / "plan.html"
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.slow
@pytest.mark.dist
def test_from_scratch_runs() -> None:
    output = run("docs/from_scratch.py", "2", cwd=ROOT)
    assert "refused, as it should be: the gradient of embed.weight is never reduced" in output
    assert "2 ranks, 14 parameters: 14 gathers in forward" in output
    assert "14 reduce-scatters; gradients equal the unsharded model's" in output


def test_pass_of_the_contributors_page() -> None:
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "CONTRIBUTING.md", "python"):
        exec(code, names)
    assert "sweep" in names
    names["test_sweep_removes_what_nobody_uses"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for name in re.findall(
        r"`((?:docs|examples|hp_compile|hyper_parallel|passes|tests)/[\w/.]*)`", text
    ):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_tests_named_on_the_parity_page_exist() -> None:
    folder = ROOT / "tests" / "fully_shard"
    named = re.findall(
        r"`(test_\w+)\.(test_\w+)`", (ROOT / "docs" / "parity.md").read_text("utf-8")
    )
    assert len(named) > 80
    texts = {path.stem: path.read_text("utf-8") for path in folder.glob("test_*.py")}
    for module, test in named:
        assert f"def {test}(" in texts.get(module, ""), f"docs/parity.md names {module}.{test}"
