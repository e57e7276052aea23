"""Ranks agree on what they run, or say how they differ: compared once, before the first step, and it cannot hang."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING

import torch.distributed as dist

from hyper_parallel.errors import VerificationError
from hyper_parallel.torch_compat.distributed import default_store

if TYPE_CHECKING:
    from hp_compile.program import Program
    from hp_compile.runtime import Runtime

TIMEOUT_SECONDS = 300.0


def compare_ranks(runtime: Runtime, program: Program) -> None:
    """Compares the description of the first program over all ranks of the mesh.

    Every rank writes its description to the process group's key-value store and reads the others' with a time-out, so a
    rank that never arrives is named instead of waited for.

    Raises:
        VerificationError: ranks differ (the first difference is shown), or a rank did not arrive in time.
    """
    ranks = sorted(runtime.layout.ranks)
    if len(ranks) == 1 or not dist.is_initialized() or dist.get_backend() == "fake":
        return
    lines = describe(runtime, program)
    store = default_store()
    prefix = f"hyper_parallel/agree/{runtime.layout.digest}/{runtime.index}"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    store.set(f"{prefix}/lines/{runtime.layout.rank}", json.dumps(lines))
    store.set(f"{prefix}/digest/{runtime.layout.rank}", digest)
    for rank in ranks:
        if rank == runtime.layout.rank:
            continue
        other = _read(store, f"{prefix}/digest/{rank}", rank)
        if other != digest:
            theirs = json.loads(_read(store, f"{prefix}/lines/{rank}", rank))
            raise VerificationError(_difference(runtime.layout.rank, lines, rank, theirs))


def _read(store: dist.Store, key: str, rank: int) -> str:
    from datetime import timedelta

    try:
        store.wait([key], timedelta(seconds=TIMEOUT_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise VerificationError(
            f"rank {rank} did not report its plan within {TIMEOUT_SECONDS:.0f} s: it failed before its first step, or never "
            "called the model. Look at that rank's log first"
        ) from error
    return store.get(key).decode()


def describe(runtime: Runtime, program: Program) -> list[str]:
    """What must be equal on all ranks, one fact a line; sizes of inputs are not among them."""
    from hp_compile.plan import program_facts

    return program_facts(runtime.layout, runtime.policy, program)


def _difference(rank: int, mine: list[str], other: int, theirs: list[str]) -> str:
    for a, b in itertools.zip_longest(mine, theirs, fillvalue="(nothing)"):
        if a != b:
            return (
                f"ranks built different programs; first difference:\n  rank {rank}: {a}\n  rank {other}: {b}\n"
                "All ranks must build the same model, mesh and policy and call it with the same kinds of inputs (sizes may "
                "differ)"
            )
    return f"ranks {rank} and {other} built different programs"
