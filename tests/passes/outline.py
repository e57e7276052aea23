"""The skeleton of a program as text: collectives, waits, and compute between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from passes.base import WAIT, is_collective

#: Operators that stand for the compute of one unit.
COMPUTE = {
    torch.ops.aten.addmm.default: "addmm",
    torch.ops.aten.mm.default: "mm",
    torch.ops.aten.cat.default: "cat",
    torch.ops.aten.div.Tensor: "div",
    torch.ops.aten.split_with_sizes.default: "split",
    torch.ops.prims.convert_element_type.default: "convert",
}


def outline(gm: fx.GraphModule, *, compute: Iterable[str] = ("addmm", "mm")) -> str:
    """One line for each collective, its wait, and each operator named in ``compute``."""
    wanted = {target for target, name in COMPUTE.items() if name in set(compute)}
    lines = []
    for node in gm.graph.nodes:
        if is_collective(node):
            comm = node.meta["comm"]
            lines.append(f"start {comm.kind} {comm.unit}")
        elif node.target is WAIT:
            comm = node.args[0].meta["comm"]
            lines.append(f"wait  {comm.kind} {comm.unit}")
        elif node.target in wanted:
            lines.append(f"      {COMPUTE[node.target]}")
    return "\n".join(lines)
