"""Run a plan's programs for all ranks of its mesh in this process, on real data, and compare with one device.

Nothing but the graphs is used of the code under test: weights are cut here, by DTensor's own definition of a placement,
collectives are done by `tests.lockstep`, and the reference is plain autograd on the unsharded module.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hp_compile import Plan
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from passes.base import (
    BufferInput,
    ParamGrad,
    ParamInput,
    SavedInput,
    SavedOutput,
    TangentInput,
    UserInput,
    UserOutput,
    info,
    inputs,
    outputs,
)
from tests import lockstep

#: Flat tensor inputs of the rank group with this number; ranks that differ in tp only share them.
Data = Callable[[int], Sequence[Tensor]]


@dataclasses.dataclass
class Found:
    """What all ranks computed.

    Attributes:
        outputs: flat outputs, one value a rank each.
        grads: by FQN, one local gradient a rank.
        wanted_outputs: the same from one device.
        wanted_grads: the same, cut as the plan says.
    """

    outputs: list[list[Tensor]]
    grads: dict[str, list[Tensor]]
    wanted_outputs: list[list[Tensor]]
    wanted_grads: dict[str, list[Tensor]]

    def check(self, rtol: float = 2e-5, atol: float = 5e-6) -> None:
        """Raises AssertionError where ranks and one device disagree."""
        for index, (found, wanted) in enumerate(
            zip(self.outputs, self.wanted_outputs, strict=True)
        ):
            for rank, (a, b) in enumerate(zip(found, wanted, strict=True)):
                torch.testing.assert_close(
                    a,
                    b,
                    rtol=1.3e-6,
                    atol=1e-5,
                    msg=lambda m, i=index, r=rank: f"output {i}, rank {r}: {m}",
                )
        assert self.grads.keys() == self.wanted_grads.keys()
        for fqn, values in self.grads.items():
            for rank, (a, b) in enumerate(zip(values, self.wanted_grads[fqn], strict=True)):
                torch.testing.assert_close(
                    a, b, rtol=rtol, atol=atol, msg=lambda m, f=fqn, r=rank: f"{f}, rank {r}: {m}"
                )


def run(module: nn.Module, plan: Plan, data: Data, call: Callable[..., Any]) -> Found:
    """Runs one training step on all ranks and on one device.

    Args:
        module: the unsharded module on the CPU.
        plan: its plan, with graphs.
        data: flat tensors of a rank group.
        call: ``call(module, *tensors)`` returns the flat outputs as the plan's programs do.
    """
    layout = plan.layout
    world = len(layout.ranks)
    layouts = [dataclasses.replace(layout, rank=rank) for rank in layout.ranks]
    groups = [data_group(one) for one in layouts]
    forward, backward = plan.graphs["forward"], plan.graphs["backward"]
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    program = info(forward)
    constants = plan._program.captured.constants  # type: ignore[union-attr]
    feed: list[lockstep.Ranks] = []
    role: Any
    for node, role in inputs(forward):
        if isinstance(role, ParamInput):
            full = params[role.fqn].detach()
            cut = [own_part(full, program.params[role.fqn], one, pad=True) for one in layouts]
            assert all(tuple(c.shape) == tuple(node.meta["val"].shape) for c in cut), role.fqn
            feed.append(cut)
        elif isinstance(role, BufferInput):
            value = constants.get(role.fqn)
            feed.append([(buffers[role.fqn] if value is None else value).clone()] * world)
        else:
            assert isinstance(role, UserInput)
            feed.append([data(group)[role.index].clone() for group in groups])
    found = lockstep.run(forward, feed, layout)
    saved: dict[int, lockstep.Ranks] = {}
    outs: dict[int, list[Tensor]] = {}
    for position, _, role in outputs(forward):
        if isinstance(role, SavedOutput):
            saved[role.index] = found[position]
        elif isinstance(role, UserOutput):
            outs[role.index] = found[position]
    grads = _run_backward(backward, saved, layout, groups, outs)
    wanted_outputs, full_grads = _one_device(module, data, call, sorted(set(groups)))
    wanted = {
        fqn: [own_part(full_grads[fqn], program.params[fqn], one, pad=False) for one in layouts]
        for fqn in grads
    }
    return Found(
        [outs[i] for i in sorted(outs)],
        grads,
        [[values[g] for g in groups] for values in wanted_outputs],
        wanted,
    )


def _run_backward(
    backward: Any,
    saved: dict[int, lockstep.Ranks],
    layout: MeshLayout,
    groups: Sequence[int],
    outs: dict[int, list[Tensor]],
) -> dict[str, list[Tensor]]:
    feed: list[lockstep.Ranks] = []
    role: Any
    for _, role in inputs(backward):
        if isinstance(role, SavedInput):
            feed.append(saved[role.index])
        else:
            assert isinstance(role, TangentInput) and isinstance(role.of, UserOutput)
            values = outs[role.of.index]
            feed.append([tangent(v, g, role.of.index) for v, g in zip(values, groups, strict=True)])
    found = lockstep.run(backward, feed, layout)
    program = info(backward)
    grads: dict[str, list[Tensor]] = {}
    for position, node, role in outputs(backward):
        if isinstance(role, ParamGrad) and node is not None:
            plan = program.params[role.fqn]
            grads[role.fqn] = [
                without_padding(value, plan, rank, layout)
                for rank, value in enumerate(found[position])
            ]
    return grads


def tangent(like: Tensor, group: int, index: int) -> Tensor:
    """A gradient of norm one or so of the loss with respect to one output, other for each rank group."""
    generator = torch.Generator().manual_seed(1000 * index + group)
    noise = torch.randn(tuple(like.shape), generator=generator) / max(like.numel(), 1) ** 0.5
    return noise.to(like.dtype)


def _one_device(
    module: nn.Module, data: Data, call: Callable[..., Any], groups: Sequence[int]
) -> tuple[list[dict[int, Tensor]], dict[str, Tensor]]:
    collected: list[dict[int, Tensor]] = []
    total: dict[str, Tensor] = {}
    for group in groups:
        copied = copy.deepcopy(module)
        found = list(call(copied, *(t.clone() for t in data(group))))
        while len(collected) < len(found):
            collected.append({})
        for index, value in enumerate(found):
            collected[index][group] = value.detach()
        torch.autograd.backward(found, [tangent(v, group, i) for i, v in enumerate(found)])
        for fqn, param in copied.named_parameters():
            if param.grad is not None:
                total[fqn] = total.get(fqn, 0) + param.grad / len(groups)
    return collected, total


def data_group(layout: MeshLayout) -> int:
    """Number of the group of ranks that share this rank's data, as `layout` is seen from that rank."""
    index = 0
    for name, size, at in zip(layout.dim_names, layout.shape, layout.coordinate, strict=True):
        if name in layout.batch_dims:
            index = index * size + at
    return index


def own_part(full: Tensor, plan: ParamPlan, layout: MeshLayout, *, pad: bool) -> Tensor:
    """A rank's part of a full tensor under the plan's combined placement.

    Args:
        full: the full tensor.
        plan: plan of the parameter.
        layout: the mesh, seen from the rank.
        pad: with the padding of programs, whose contents do not matter.
    """
    local = full
    for placement, size, at in zip(
        plan.unsharded_placements, layout.shape, layout.coordinate, strict=True
    ):
        dim = getattr(placement, "dim", None)
        if dim is None or size == 1:
            continue
        blocks = getattr(placement, "split_factor", 1)
        pieces = [block.chunk(size, dim)[at] for block in local.chunk(blocks, dim)]
        local = torch.cat(pieces, dim)
    if plan.shard_dim is None or plan.shard_size == 1:
        return local.clone()
    index = layout.ranks_along(plan.shard_axes).index(layout.rank)
    start = min(sum(plan.lengths[:index]), local.size(plan.shard_dim))
    rows = local.narrow(plan.shard_dim, start, plan.lengths[index])
    if not pad:
        return rows.clone()
    padded = torch.full(plan.padded_shard_shape, 7.0, dtype=full.dtype)
    padded.narrow(plan.shard_dim, 0, rows.size(plan.shard_dim)).copy_(rows)
    return padded


def without_padding(value: Tensor, plan: ParamPlan, rank: int, layout: MeshLayout) -> Tensor:
    """A gradient as a program returns it, without the rows that only fill the shard up."""
    if plan.shard_dim is None or plan.shard_size == 1:
        return value
    one = dataclasses.replace(layout, rank=layout.ranks[rank])
    index = one.ranks_along(plan.shard_axes).index(one.rank)
    return value.narrow(plan.shard_dim, 0, plan.lengths[index])


__all__ = ["Data", "Found", "data_group", "own_part", "run", "tangent", "without_padding"]
