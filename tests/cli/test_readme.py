"""The output of the command line in the README is what the command prints."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.runner import hp

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n(\$ hp-compile (.*?)\n.*?)^```", re.M | re.S)


@pytest.mark.slow
def test_output_in_readme_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = README.read_text("utf-8")
    (found,) = BLOCK.finditer(text)
    ran = hp(*shlex.split(found[2]))
    assert ran.code == 0, ran.err
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        README.write_text(text.replace(found[1], ran.out), "utf-8")
        return
    assert found[1] == ran.out, "run the test with EXPECTTEST_ACCEPT=1 and read the difference"
