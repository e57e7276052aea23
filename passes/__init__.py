"""Graph transforms: one transform a module, one public function each, contracts as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.annotate import annotate
from passes.bucket import bucket
from passes.cleanup import cleanup
from passes.overlap import overlap
from passes.partition import partition
from passes.reduce_grads import reduce_grads
from passes.unshard import unshard


@dataclass(frozen=True)
class Contract:
    """Where a pass may stand in a pipeline.

    Attributes:
        after: passes that must have run.
        before: passes that must not have run yet.
        stages: stages of a program it accepts; empty for any.
    """

    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


CONTRACTS: Mapping[str, Contract] = {
    "annotate": Contract(before=("annotate",)),
    "cleanup": Contract(after=("annotate",), before=("bucket",)),
    "unshard": Contract(after=("annotate",), before=("unshard", "partition"), stages=("captured",)),
    "partition": Contract(after=("unshard",), before=("partition", "bucket"), stages=("sharded",)),
    "reduce_grads": Contract(before=("reduce_grads", "bucket"), stages=("backward", "reduction")),
    "bucket": Contract(before=("bucket", "overlap")),
    "overlap": Contract(after=("bucket",)),
}

__all__ = [
    "CONTRACTS",
    "Contract",
    "annotate",
    "bucket",
    "cleanup",
    "overlap",
    "partition",
    "reduce_grads",
    "unshard",
]
