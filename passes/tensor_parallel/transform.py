"""The tensor-parallel pass: one walk that decides, one that writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from passes.tensor_parallel.follow import Boundary, Layouts
from passes.tensor_parallel.layout import Layout
from passes.tensor_parallel.write import Gathered, Parallelised, Writer


def tensor_parallel(
    forward: fx.GraphModule,
    *,
    params: Mapping[str, Layout],
    boundaries: Mapping[str, Boundary],
    size: int,
    group: str,
    mode: Any,
    keep_outputs: bool = False,
) -> Parallelised:
    """Makes the forward of one tensor-parallel rank.

    Args:
        forward: exported forward with fake parameters; consumed.
        params: layout of every parameter that is cut, by name in ``forward``.
        boundaries: what the plan asks for at modules, by FQN in ``forward``.
        size: ranks of the tensor-parallel dim.
        group: alias of their group.
        mode: the fake mode of ``forward``'s values.
        keep_outputs: leave outputs cut that are cut on their last dim; else all are gathered.

    Raises:
        CaptureError: forward changes in place a value that cannot be changed part by part.
    """
    facts = Layouts(forward, params, boundaries, size, group).decide()
    return Writer(facts, mode, keep_outputs).write()


__all__ = ["Boundary", "Gathered", "Parallelised", "tensor_parallel"]
