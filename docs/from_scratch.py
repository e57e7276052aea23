"""Run the code of a Markdown page on several ranks: `python docs/from_scratch.py [ranks] [page]`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def code_of(page: Path) -> str:
    """Returns the Python blocks of a page as one script."""
    return "\n\n".join(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    )


def main() -> int:
    """Runs the page and returns the exit code."""
    ranks = sys.argv[1] if len(sys.argv) > 1 else "4"
    page = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_suffix(".md")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, page.stem + ".py")
        script.write_text(code_of(page), encoding="utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return subprocess.call([*torchrun, f"--nproc-per-node={ranks}", str(script)])


if __name__ == "__main__":
    sys.exit(main())
