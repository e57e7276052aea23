"""Partition: split the joint program into a forward and a backward program.

Contract: needs a joint program whose weight chains are tagged (``unshard``). Provides two programs, with roles on every
input and output; the forward returns ``outputs + saved values``, the backward takes ``saved values + tangents``.

The min-cut partitioner decides what activations to save. The tags decide about weights: with resharding no full weight,
nor a view or cast of one, is saved, and its gather is issued again in backward; without, the full weight is saved.
Regions under ``torch.utils.checkpoint`` are recomputed, except for random operators in them, whose results are saved so
that dropout agrees between forward and recompute on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from hyper_parallel.errors import VerificationError
from hyper_parallel.torch_compat import graph as compat
from passes.base import (
    WAIT,
    BufferUpdate,
    InputUpdate,
    Other,
    OutputRole,
    SavedInput,
    SavedOutput,
    UserOutput,
    aten,
    emit,
    finish,
    info,
    output_node,
    remove_dead,
    set_info,
)


def partition(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint program.

    Args:
        gm: joint program; consumed.

    Returns:
        ``(forward, backward)``.

    Raises:
        VerificationError: the partitioner returned programs whose inputs cannot be identified.
    """
    program = info(gm)
    roles: Sequence[OutputRole] = output_node(gm).meta["roles"]
    forward_roles = [r for r in roles if isinstance(r, UserOutput | BufferUpdate | InputUpdate)]
    input_roles = {n.name: n.meta["role"] for n in gm.graph.nodes if n.op == "placeholder"}
    _tag_checkpoint_regions(gm)
    forward, backward = compat.min_cut_partition(gm, num_fwd_outputs=len(forward_roles))
    remove_dead(backward)
    _drop_unused_saved(forward, backward, len(forward_roles))
    remove_dead(forward)
    for half in (forward, backward):
        _wait_once(half)
    saved = _saved_names(forward, len(forward_roles))
    _assign_inputs(forward, input_roles, {})
    _assign_inputs(backward, input_roles, {name: i for i, name in enumerate(saved)})
    output_node(forward).meta["roles"] = (
        *forward_roles,
        *(SavedOutput(i) for i in range(len(saved))),
    )
    output_node(backward).meta["roles"] = tuple(roles[len(forward_roles) :])
    for half, stage in ((forward, "forward"), (backward, "backward")):
        set_info(half, program)
        finish(half, "partition", stage=stage)
    set_info(backward, info(backward).with_facts(forward=Other(forward)))
    return forward, backward


def _wait_once(half: fx.GraphModule) -> None:
    """Makes later waits for a collective copies of the first.

    The partitioner merges equal collectives (two parameters with one gradient, say), but not waits that are outputs.
    """
    first: dict[fx.Node, fx.Node] = {}
    for node in list(half.graph.nodes):
        if node.target is not WAIT:
            continue
        (source,) = node.all_input_nodes
        if source in first:
            with half.graph.inserting_before(node):
                copied = emit(half.graph, aten.clone.default, first[source], like=node)
            node.replace_all_uses_with(copied)
            half.graph.erase_node(node)
        first.setdefault(source, node)


def _drop_unused_saved(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Unpairs saved values that backward does not read: they would only hold memory."""
    unused = {n.name for n in backward.graph.nodes if n.op == "placeholder" and not n.users}
    out = output_node(forward)
    flat: Any = out.args[0]
    dropped = {node.name for node in flat[num_outputs:] if node.name in unused}
    kept = [node for node in flat[num_outputs:] if node.name not in dropped]
    out.args = ((*flat[:num_outputs], *kept),)
    for node in list(backward.graph.nodes):
        if node.op == "placeholder" and node.name in dropped:
            backward.graph.erase_node(node)


def _saved_names(forward: fx.GraphModule, num_outputs: int) -> list[str]:
    flat: Any = output_node(forward).args[0]
    return [node.name for node in flat[num_outputs:]]


def _assign_inputs(half: fx.GraphModule, known: dict[str, object], saved: dict[str, int]) -> None:
    """Gives every placeholder a fresh meta dict (the partitioner shares them) and its role."""
    for node in half.graph.nodes:
        if node.op != "placeholder":
            continue
        node.meta = dict(node.meta)
        if node.name in saved:
            node.meta["role"] = SavedInput(saved[node.name])
        elif node.name in known:
            node.meta["role"] = known[node.name]
        else:
            raise VerificationError(
                f"partition: input {node.name!r} of a half is neither saved by forward nor an input of the joint program"
            )


def _tag_checkpoint_regions(gm: fx.GraphModule) -> None:
    """Turns the region numbers that capture recorded into the partitioner's recompute tags."""
    for node in gm.graph.nodes:
        region = compat.checkpoint_region(node)
        if region is None or node.op != "call_function" or "recompute" in node.meta:
            continue
        if node.meta.get("partitioner_tag") == "is_backward":
            continue
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        source = node.args[0] if node.args else None
        of_random = isinstance(source, fx.Node) and source.meta.get("random_in_region", False)
        if random or (of_random and isinstance(node.meta.get("val"), torch.Tensor)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta["random_in_region"] = random
        else:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = region
