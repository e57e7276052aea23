"""Ranks agree on what they run, or say how they differ: compared once, before the first step, and it cannot hang.

Ranks talk through the process group's key-value store only: each writes what it built, then reads what the others wrote, with
a time-out. No collective runs before all of them agree.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hyper_parallel.checksum import Checksum
from hyper_parallel.errors import VerificationError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.replicas import VARIABLE, checks_every_step
from hyper_parallel.torch_compat.distributed import default_store

if TYPE_CHECKING:
    from hp_compile.program import Program
    from hp_compile.runtime import Runtime

#: How long a rank waits for the others' descriptions before its first step.
TIMEOUT_SECONDS = 300.0

#: Models that were sharded over each set of ranks so far; all of its ranks count alike.
_boards: Counter[tuple[int, ...]] = Counter()

_FAILED = "failed: "

#: Makes the text of an error from a rank, its lines, another rank and that one's lines.
Difference = Callable[[int, list[str], int, list[str]], str]


class Board:
    """Where the ranks of one sharded model put what they built.

    Args:
        layout: the mesh.
    """

    def __init__(self, layout: MeshLayout) -> None:
        self.rank = layout.rank
        self.ranks = sorted(layout.ranks)
        members = tuple(self.ranks)
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:8]
        self._prefix = f"hyper_parallel/agree/{digest}/{_boards[members]}"
        self._tries: Counter[str] = Counter()
        _boards[members] += 1

    @property
    def silent(self) -> bool:
        """Nobody to compare with."""
        return len(self.ranks) == 1 or not dist.is_initialized() or dist.get_backend() == "fake"

    def post(self, topic: str, lines: Sequence[str]) -> None:
        """Writes this rank's description; returns at once."""
        if self.silent:
            return
        store = default_store()
        key = self._key(topic)
        store.set(f"{key}/lines/{self.rank}", json.dumps(list(lines)))
        store.set(f"{key}/digest/{self.rank}", _digest(lines))

    def post_failure(self, topic: str, error: BaseException) -> None:
        """Tells the others that this rank will not come, and why."""
        if not self.silent:
            text = f"{_FAILED}{type(error).__name__}: {error}"
            default_store().set(f"{self._key(topic)}/digest/{self.rank}", text)
            self._tries[topic] += 1

    def compare(
        self,
        topic: str,
        lines: Sequence[str],
        *,
        ranks: Sequence[int] | None = None,
        difference: Difference | None = None,
    ) -> None:
        """Waits for every rank's description, as posted, and compares it with this rank's.

        Args:
            topic: what is compared.
            lines: this rank's description.
            ranks: the ranks to compare with; by default all.
            difference: makes the text of the error from rank, lines, other rank and its lines.

        Raises:
            VerificationError: ranks differ (the first difference is shown), one failed, or did not arrive in time.
        """
        if self.silent:
            return
        key, store = self._key(topic), default_store()
        self._tries[topic] += 1
        names = {rank: f"{key}/digest/{rank}" for rank in ranks or self.ranks}
        self._wait(store, names)
        own = _digest(lines)
        for rank, digest in zip(names, store.multi_get(list(names.values())), strict=True):
            text = digest.decode()
            if text.startswith(_FAILED):
                raise VerificationError(
                    f"rank {rank} could not build its program, so rank {self.rank} stops too; its error is\n"
                    f"{text.removeprefix(_FAILED)}"
                )
            if text != own:
                theirs = json.loads(store.get(f"{key}/lines/{rank}").decode())
                raise VerificationError(
                    (difference or _difference)(self.rank, list(lines), rank, theirs)
                )

    def _key(self, topic: str) -> str:
        return f"{self._prefix}/{topic}/{self._tries[topic]}"

    def _wait(self, store: dist.Store, names: dict[int, str]) -> None:
        try:
            store.wait(list(names.values()), timedelta(seconds=TIMEOUT_SECONDS))
        except (RuntimeError, ValueError) as error:
            missing = [rank for rank, name in names.items() if not store.check([name])]
            shown = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
            plural = "s" if len(missing) != 1 else ""
            raise VerificationError(
                f"rank{plural} {shown} did not report a program within {TIMEOUT_SECONDS:.0f} s: failed before the first step, "
                f"still busy, or never called the model. Look at the log of rank {missing[0] if missing else '?'} first"
            ) from error


def compare_ranks(runtime: Runtime, program: Program) -> None:
    """Compares the description of the first program over all ranks of the mesh.

    Args:
        runtime: runtime of the module.
        program: its first program.

    Raises:
        VerificationError: ranks differ (the first difference is shown), one failed, or did not arrive in time.
    """
    if runtime.board.silent:
        return
    lines = describe(runtime, program)
    runtime.board.post("program", lines)
    runtime.board.compare("program", lines)


def compare_inputs(runtime: Runtime, tensors: Sequence[torch.Tensor]) -> None:
    """Compares the inputs of the first call over the ranks that differ in tp only, which must be given the same batch.

    Args:
        runtime: runtime of the module.
        tensors: flat tensor inputs.

    Raises:
        VerificationError: ranks of one tensor-parallel group were given different inputs.
    """
    axes = runtime.layout.roles.tp
    if runtime.board.silent or runtime.layout.size(axes) == 1:
        return
    checksum = Checksum()
    lines = [
        f"input {i}: {t.dtype}{list(t.shape)}, checksum {int(checksum(t))}"
        for i, t in enumerate(tensors)
    ]
    runtime.board.post("inputs", lines)
    runtime.board.compare(
        "inputs",
        lines,
        ranks=runtime.layout.ranks_along(axes),
        difference=partial(_other_inputs, runtime.layout),
    )


def _other_inputs(
    layout: MeshLayout, rank: int, mine: list[str], other: int, theirs: list[str]
) -> str:
    axes = "×".join(layout.roles.tp)
    a, b = next((a, b) for a, b in itertools.zip_longest(mine, theirs) if a != b)
    dims = [d for d in layout.batch_dims if layout.size(d) > 1]
    rank_of = f"mesh[{dims[0]!r}].get_local_rank()" if dims else "0"
    return (
        f"ranks {rank} and {other} differ on mesh dim {axes!r} only and must be given the same batch, but a tensor input "
        f"differs:\n  rank {rank}: {a or '(none)'}\n  rank {other}: {b or '(none)'}\n"
        f"Give the data loader the rank along the data dims, such as {rank_of}, and not the global rank"
    )


def describe(runtime: Runtime, program: Program) -> list[str]:
    """What must be equal on all ranks, one fact a line; sizes of inputs are not among them."""
    from hp_compile.plan import program_facts

    facts = program_facts(runtime.layout, runtime.policy, program)
    return [*facts, f"{VARIABLE}={int(checks_every_step())}"]


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _difference(rank: int, mine: list[str], other: int, theirs: list[str]) -> str:
    for a, b in itertools.zip_longest(mine, theirs, fillvalue="(nothing)"):
        if a != b:
            return (
                f"ranks built different programs; first difference:\n  rank {rank}: {a}\n  rank {other}: {b}\n"
                "All ranks must build the same model, mesh and policy and call it with the same kinds of inputs (sizes may "
                "differ)"
            )
    return f"ranks {rank} and {other} built different programs"


__all__ = ["TIMEOUT_SECONDS", "Board", "compare_inputs", "compare_ranks", "describe"]
