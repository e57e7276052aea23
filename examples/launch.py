"""Starting the ranks where torchrun has not, and ending them without a page of tracebacks."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def launch(script: str, argv: Sequence[str], processes: int) -> int:
    """Runs the script under torchrun on this machine; returns the exit code.

    Args:
        script: Path of the script.
        argv: Its arguments.
        processes: Ranks to start.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would say so, at length
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said below, shorter
    try:
        torchrun(["--standalone", f"--nproc-per-node={processes}", script, *argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        why = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
        print(f"{Path(script).name}: rank {rank} ended first, with {why}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    return 0
