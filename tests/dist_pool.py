"""Run test functions on several ranks, in worker processes that are started once per session.

    def sum_of_ranks(rank, world_size, factor):
        value = torch.tensor(float(rank * factor))
        dist.all_reduce(value)
        return value.item()

    def test_sum_of_ranks():
        assert run_ranks(sum_of_ranks, 2, 10) == [10.0, 10.0]

The function is module-level and finds a gloo process group ready. What it returns is pickled, so
return plain tensors (`dtensor.full_tensor()`), numbers, texts. Every case has its own process
group; all ranks start with the same seeds.

A failure is one `RanksFailed` with the traceback of every rank that raised. Ranks that do not
answer in time are named with their Python stacks. After a failure the workers are ended and the
next case gets new ones, because the collectives of the old ones may be out of step.

Without processes: `fake_world(1024)` gives a fake process group for planning at any world size, and
`local_ranks(4)` computes with the real data of four ranks in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.dist_worker import Answer, Case, WorkerConfig, worker_main
from tests.fake_dist import fake_world, local_ranks

__all__ = ["RanksFailed", "close_pools", "fake_world", "local_ranks", "run_ranks"]

DEFAULT_TIMEOUT = 180.0
START_TIMEOUT = 180.0
# How long the others may still answer after one rank failed: most then wait in a collective.
GRACE = 3.0
STACK_LINES = 80
OUTPUT_LINES = 40
# Fork from a process that has imported torch and nothing else: a new worker costs milliseconds.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor.debug", "tests.dist_worker"]


class RanksFailed(RuntimeError):
    """At least one rank raised, died, or did not answer.

    Attributes:
        errors: The traceback of each rank that raised, by rank.
        died: The exit code of each rank whose process ended, by rank.
        silent: The Python stacks of each rank that had not answered, by rank.
    """

    def __init__(
        self,
        case: str,
        world_size: int,
        errors: Mapping[int, str],
        died: Mapping[int, int | None],
        silent: Mapping[int, str],
        output: Mapping[int, str],
        timeout: float,
    ) -> None:
        self.errors, self.died, self.silent = dict(errors), dict(died), dict(silent)
        facts = [
            f"{what} {sorted(ranks)}"
            for what, ranks in (("raised on ranks", errors), ("process died on ranks", died))
            if ranks
        ]
        if silent:
            why = "after another rank failed" if facts else f"within {timeout:g} s"
            facts.append(f"no answer {why} from ranks {sorted(silent)}")
        parts = [f"{case} on {world_size} ranks: {'; '.join(facts)}"]
        for rank, text in sorted(errors.items()):
            parts.append(f"---- rank {rank} raised\n{text.rstrip()}")
        for rank, code in sorted(died.items()):
            parts.append(f"---- rank {rank} died, exit code {code}")
        for rank, text in sorted(silent.items()):
            parts.append(f"---- rank {rank} did not answer; its Python stacks\n{text.rstrip()}")
        for rank, text in sorted(output.items()):
            if text:
                parts.append(f"---- last output of rank {rank}\n{text.rstrip()}")
        super().__init__("\n".join(parts))


class WorkerPool:
    """The worker processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = Path()  # of output and stacks; one for each set of workers
        self._numbers = itertools.count()
        self._read = [0] * world_size  # how much of each rank's output was already shown
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Run `fn` on every rank; see `run_ranks`."""
        case = Case(next(self._numbers), _pickle_call(fn, args), tuple(sys.path))
        if not self._processes:
            self._start()
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by _collect
                connection.send(case)
        try:
            answers, died = self._collect(timeout)
        except BaseException:  # an interrupt or the limit of the test: the workers are still busy
            self.close()
            raise
        if len(answers) == self.world_size and not any(a.error for a in answers.values()):
            self._show_output()
            return [pickle.loads(answers[rank].value or b"") for rank in range(self.world_size)]
        missing = [r for r in range(self.world_size) if r not in answers and r not in died]
        failure = RanksFailed(
            case=f"{fn.__module__}.{getattr(fn, '__qualname__', fn)}",
            world_size=self.world_size,
            errors={r: a.error for r, a in answers.items() if a.error is not None},
            died={r: self._exit_code(r) for r in died},
            silent=self._stacks(missing),
            output={r: self._new_output(r) for r in range(self.world_size)},
            timeout=timeout,
        )
        self.close()
        raise failure

    def close(self) -> None:
        """End all workers and whatever they started; the next `run` starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.join(10.0)
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._store = [], [], None
        self._read = [0] * self.world_size

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hyper_parallel_ranks_"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        with _worker_environment():
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                config = WorkerConfig(
                    rank,
                    self.world_size,
                    self._store.port,
                    self._folder / f"output{rank}",
                    self._folder / f"stacks{rank}",
                )
                process = context.Process(
                    target=worker_main, args=(config, theirs), name=f"rank{rank}", daemon=False
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        for rank, connection in enumerate(self._connections):
            try:
                ready = connection.poll(START_TIMEOUT) and connection.recv() == "ready"
            except (EOFError, ConnectionError):
                ready = False
            if not ready:
                text = self._new_output(rank)
                self.close()
                raise RuntimeError(f"worker for rank {rank} did not start:\n{text}")

    def _collect(self, timeout: float) -> tuple[dict[int, Answer], set[int]]:
        answers: dict[int, Answer] = {}
        died: set[int] = set()
        pending = dict(zip(self._connections, range(self.world_size), strict=True))
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank] = connection.recv()
                    failed = answers[rank].error is not None
                except (EOFError, ConnectionError):
                    died.add(rank)
                    failed = True
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers, died

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(5.0)
        return self._processes[rank].exitcode

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        return {rank: self._stack(rank) for rank in ranks}

    def _stack(self, rank: int) -> str:
        path = self._folder / f"stacks{rank}"
        size = -1
        for _ in range(20):  # until the dump has come and stopped growing
            time.sleep(0.1)
            before, size = size, path.stat().st_size if path.exists() else 0
            if size > 0 and size == before:
                break
        lines = path.read_text(errors="replace").splitlines() if size > 0 else ["(no stacks)"]
        return "\n".join(lines[:STACK_LINES])

    def _new_output(self, rank: int) -> str:
        path = self._folder / f"output{rank}"
        if not path.exists():
            return ""
        with path.open(errors="replace") as file:
            file.seek(self._read[rank])
            text = file.read()
            self._read[rank] = file.tell()
        return "\n".join(text.splitlines()[-OUTPUT_LINES:])

    def _show_output(self) -> None:
        for rank in range(self.world_size):
            for line in self._new_output(rank).splitlines():
                print(f"[rank {rank}] {line}")


_pools: dict[int, WorkerPool] = {}


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = DEFAULT_TIMEOUT
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on every rank of a gloo process group.

    Args:
        fn: A module-level function. It must not destroy the default process group.
        world_size: The number of ranks; the first case of each size starts its workers.
        *args: Given to every rank, pickled.
        timeout: Seconds until ranks that have not answered are reported and ended.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: A rank raised, died, or did not answer in time.
        TypeError: `fn` or an argument cannot be pickled.
    """
    if world_size not in _pools:
        _pools[world_size] = WorkerPool(world_size)
    return _pools[world_size].run(fn, args, timeout)


def close_pools() -> None:
    """End the workers of every pool."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


atexit.register(close_pools)


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks cannot send {getattr(fn, '__qualname__', fn)!r} and its arguments to the "
            f"workers: {error}. Use a module-level function and arguments that pickle."
        ) from error


@contextlib.contextmanager
def _worker_environment() -> Iterator[None]:
    """Set the environment that workers inherit: one thread each, loopback only."""
    root = str(Path(__file__).resolve().parent.parent)
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if Path("/sys/class/net/lo").exists():
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    wanted["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
