"""The process behind one rank of a worker pool (see `tests.dist_pool`).

A worker serves cases one after another. Each case gets a process group of its own, made from a
fresh prefix of one store and destroyed afterwards, so neither a group nor a mesh nor a cache
survives into the next case.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SEED = 1234
# Longer than any case: the pool cuts a hang, because it can say where each rank was standing.
GLOO_TIMEOUT = timedelta(hours=1)
LOCALS_WIDTH = 160
_LRU_CACHE = type(functools.cache(repr))


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """What one worker has to know, fixed for its life."""

    rank: int
    world_size: int
    store_port: int
    output: Path  # stdout and stderr of the worker
    stacks: Path  # where the Python stacks go on SIGUSR1


@dataclasses.dataclass(frozen=True)
class Case:
    """One function to run on every rank; `call` is a pickled (fn, args)."""

    number: int
    call: bytes
    path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a rank reports: a pickled value, or the text of what it raised."""

    value: bytes | None = None
    error: str | None = None


def reset_state() -> None:
    """Put everything that outlives a test into a known state."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def clear_mesh_caches() -> None:
    """Forget results that hold a DeviceMesh, and with it the groups of a case and their threads.

    Threads of gloo poll, so a leak slows everything that comes after it. And meshes with the same
    ranks and names compare equal even when the groups of one are gone.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for value in list(vars(module).values()):
                if isinstance(value, _LRU_CACHE) and value.__module__ == name:
                    value.cache_clear()
    random_state = sys.modules.get("torch.distributed.tensor._random")
    if random_state is not None:
        random_state._rng_tracker = None


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a broken __repr__ must not hide the failure being reported
        text = f"<repr raised {type(error).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= LOCALS_WIDTH else text[: LOCALS_WIDTH - 3] + "..."


def describe_failure(error: BaseException) -> str:
    """Return the traceback; for a bare assert also the locals of the frame that failed."""
    text = "".join(traceback.format_exception(error))
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if isinstance(error, AssertionError) and frames is not None:
        values = frames.tb_frame.f_locals.items()
        text += "locals: " + "; ".join(f"{k} = {_shorten(v)}" for k, v in values) + "\n"
    return text


def _run_case(config: WorkerConfig, case: Case, store: dist.Store, cleaner: _Cleaner) -> Answer:
    reset_state()
    try:
        sys.path[:] = case.path  # the modules of the tests may have been put there after the fork
        fn, args = pickle.loads(case.call)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"case{case.number}", store),
            rank=config.rank,
            world_size=config.world_size,
            timeout=GLOO_TIMEOUT,
        )
        value = pickle.dumps(fn(config.rank, config.world_size, *args))
        dist.barrier()  # a rank that left a collective open is found here, not in the next case
        cleaner.clean()
    except BaseException as error:  # SystemExit and pytest.fail too: a rank must always answer
        return Answer(error=describe_failure(error))
    return Answer(value=value)


class _Cleaner:
    """Drops what a case left. Modules are kept out of garbage collection, which they would slow."""

    def __init__(self) -> None:
        self.modules = 0
        self.freeze_modules()

    def freeze_modules(self) -> None:
        """Freeze what is alive, if many modules were imported since the last time."""
        if len(sys.modules) > self.modules + 50:
            self.modules = len(sys.modules)
            gc.freeze()

    def clean(self) -> None:
        """Return to the state before the first case."""
        if dist.is_initialized():
            dist.destroy_process_group()
        groups = sys.modules.get("hyper_parallel.groups")
        if groups is not None:
            groups.clear_group_cache()
        clear_mesh_caches()
        gc.collect()
        self.freeze_modules()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def worker_main(config: WorkerConfig, connection: Connection) -> None:
    """Serve cases until the pool closes the connection."""
    os.setsid()  # what this rank starts (compiler workers) can then be ended together with it
    output = os.open(config.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    stacks = config.stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(
        target=_exit_with_parent, args=(os.getppid(),), name="exit_with_parent", daemon=True
    ).start()

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", config.store_port, is_master=False, wait_for_workers=False)
    cleaner = _Cleaner()
    connection.send("ready")
    while True:
        try:
            case: Case = connection.recv()
        except EOFError:
            break
        answer = _run_case(config, case, store, cleaner)
        _flush()
        connection.send(answer)


def _flush() -> None:
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
