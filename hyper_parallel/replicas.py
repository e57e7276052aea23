"""Whether ranks that should hold the same bytes of a parameter do.

Ranks are replicas of a parameter along every mesh dim where its placement is ``Replicate``: ``dp_replicate``, ``tp`` for a
parameter that the plan does not cut, copies over ``ep``, and every dim of plain data parallelism. Nothing makes them agree
again once they differ, and no loss curve shows it at once.

A check costs one pass over the local shards, one all-gather of 8 bytes a parameter along each mesh dim, and one number that
is reduced over the mesh, so that all of its ranks raise together. Only when something differs is more exchanged, to say what.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from hyper_parallel.checksum import Checksum, bit_patterns, layout_number
from hyper_parallel.errors import PolicyError, ReplicaError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.placement import format_placements
from hyper_parallel.torch_compat.distributed import local_tensor
from hyper_parallel.torch_compat.eager import all_gather_flat

__all__ = [
    "VARIABLE",
    "Replica",
    "check_replicas",
    "checks_every_step",
    "gradients_of",
    "parameters_of",
]

#: The environment variable that turns on a check in every step.
VARIABLE = "HP_COMPILE_CHECK_REPLICAS"

# How many ranks, and how many other parameters, a message lists.
_SHOWN = 4

_LIKELY = {
    "parameter": "other initial values on these ranks (seed them alike; Policy(sync_weights=True) makes them "
    "equal), an optimizer step that one of them skipped or did differently, or a change in place on one",
    "gradient": "a reduction that is missing, other data on ranks that should see the same, or a kernel that is not "
    "deterministic where every rank computes this gradient for itself",
}


@dataclass(frozen=True)
class Replica:
    """What this rank holds of one parameter or gradient.

    Attributes:
        fqn: The parameter.
        placements: Its combined placement, one entry a mesh dim.
        value: This rank's part without padding, a plain tensor on any device; None if it has none.
        kind: ``"parameter"`` or ``"gradient"``.
    """

    fqn: str
    placements: tuple[Placement, ...]
    value: Tensor | None
    kind: str = "parameter"


def checks_every_step() -> bool:
    """Whether the environment asks for a check in every step: ``HP_COMPILE_CHECK_REPLICAS=1``.

    Raises:
        PolicyError: The variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise PolicyError(f"{VARIABLE}: expected 0 or 1, got {value!r}")
    return value == "1"


def parameters_of(held: Mapping[str, Tensor]) -> list[Replica]:
    """What this rank holds of parameters.

    Args:
        held: The DTensors that a module holds, by FQN.
    """
    return [_replica(fqn, param, param, "parameter") for fqn, param in held.items()]


def gradients_of(held: Mapping[str, Tensor]) -> list[Replica]:
    """What this rank holds in ``.grad`` of parameters.

    Args:
        held: The DTensors that a module holds, by FQN.
    """
    return [_replica(fqn, param, param.grad, "gradient") for fqn, param in held.items()]


def _replica(fqn: str, param: Any, value: Tensor | None, kind: str) -> Replica:
    local = local_tensor(value) if isinstance(value, DTensor) else value
    return Replica(fqn, param.placements, local, kind)


@torch.no_grad()
def check_replicas(
    mesh: DeviceMesh, layout: MeshLayout, replicas: Sequence[Replica], device: torch.device
) -> None:
    """Compares replicas along every mesh dim, bit by bit.

    Collective over the mesh: all ranks call it with the same parameters in the same order. Either all of them return or all
    of them raise the same error.

    Args:
        mesh: The mesh of the placements.
        layout: The mesh as a value.
        replicas: What this rank holds; the first difference in this order is reported.
        device: Where collectives run: this rank's device on the mesh.

    Raises:
        ReplicaError: Replicas differ.
    """
    comparison = _Comparison(mesh, layout, device)
    if comparison.alone or not any(comparison.rows(replicas, dim) for dim in comparison.dims):
        return
    differs = comparison.differences(replicas)
    if not comparison.reduce_max(differs.any().to(torch.int64)).item():
        return
    everywhere = comparison.reduce_max(differs.to(torch.int64)).cpu().tolist()
    found = [index for index, dims in enumerate(everywhere) if any(dims)]
    raise ReplicaError(
        comparison.report(replicas[found[0]], everywhere[found[0]].index(1))
        + _others([replicas[index] for index in found[1:]])
        + f"\n  likely:   {_LIKELY[replicas[found[0]].kind]}"
    )


class _Comparison:
    """Collectives of one check, all of them on int64 and along one mesh dim each, so no process group is made."""

    def __init__(self, mesh: DeviceMesh, layout: MeshLayout, device: torch.device) -> None:
        self.mesh, self.layout, self.device = mesh, layout, device
        self.dims = [dim for dim, size in enumerate(layout.shape) if size > 1]
        self.alone = not dist.is_initialized() or dist.get_backend() == "fake"

    def rows(self, replicas: Sequence[Replica], dim: int) -> list[int]:
        """Which replicas must agree along a mesh dim."""
        return [i for i, r in enumerate(replicas) if isinstance(r.placements[dim], Replicate)]

    def differences(self, replicas: Sequence[Replica]) -> Tensor:
        """Which replicas differ along which mesh dim, as this rank sees it: bool of shape (replicas, dims)."""
        checksum = Checksum()
        own = torch.stack([checksum(r.value).to(self.device) for r in replicas])
        differs = torch.zeros((len(replicas), len(self.layout.shape)), dtype=torch.bool)
        differs = differs.to(self.device)
        for dim in self.dims:
            rows = self.rows(replicas, dim)
            if rows:
                theirs = self._gather(own[rows], dim)
                differs[rows, dim] = (theirs != theirs[0]).any(0)
        return differs

    def reduce_max(self, value: Tensor) -> Tensor:
        """The largest value on any rank of the mesh."""
        for dim in self.dims:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.mesh.get_group(dim))
        return value

    def _gather(self, value: Tensor, dim: int) -> Tensor:
        """Every rank's ``value`` along a mesh dim, stacked in front."""
        size = self.layout.shape[dim]
        out = value.new_empty(size * value.numel())
        all_gather_flat(
            out, value.contiguous().reshape(-1), self.mesh.get_group(dim), async_op=False
        )
        return out.reshape(size, *value.shape)

    def _table(self, value: list[int]) -> list[tuple[int, ...]]:
        """Every rank's numbers, in the order of the mesh's ranks."""
        table = torch.tensor(value, device=self.device)
        for dim in reversed(range(len(self.layout.shape))):
            table = self._gather(table, dim) if dim in self.dims else table[None]
        return [tuple(row) for row in table.reshape(-1, len(value)).cpu().tolist()]

    # What a message says

    def report(self, replica: Replica, dim: int) -> str:
        """Describes how one parameter differs along a mesh dim; the text is the same on all ranks."""
        value = replica.value
        facts = [int(Checksum()(value)), layout_number(value)]
        table = dict(zip(self.layout.ranks, self._table(facts), strict=True))
        lines = self._lines(dim)
        references: dict[int, int] = {}
        for line in lines:
            references.update(dict.fromkeys(line, _reference(line, table)))
        amounts = self._amounts(replica, dim, table, references)
        wrong = [
            f"rank {rank} {_difference(references[rank], table, amounts, rank, replica.kind)}"
            for line in lines
            for rank in line
            if table[rank] != table[references[rank]]
        ]
        name, size = self.layout.dim_names[dim], self.layout.shape[dim]
        placement = format_placements(replica.placements)
        text = (
            f"{replica.fqn}: ranks that should hold the same bytes of this {replica.kind} do not\n"
            f"  mesh dim: {name}({size}); placement {placement} on ({', '.join(self.layout.dim_names)})"
        )
        text += "\n  found:    " + "\n            ".join(wrong[:_SHOWN])
        if len(wrong) > _SHOWN:
            text += f"\n            … {len(wrong)} ranks in all"
        return text

    def _lines(self, dim: int) -> list[tuple[int, ...]]:
        """The ranks of the mesh in groups that differ in their place along one dim only."""
        ranks = torch.tensor(self.layout.ranks).reshape(self.layout.shape)
        lines = ranks.movedim(dim, -1).reshape(-1, self.layout.shape[dim])
        return [tuple(line) for line in lines.tolist()]

    def _amounts(
        self,
        replica: Replica,
        dim: int,
        table: Mapping[int, tuple[int, ...]],
        references: Mapping[int, int],
    ) -> dict[int, tuple[int, float]]:
        """By rank, in how many elements it differs from its reference and by how much at most."""
        rank = self.layout.rank
        line = self.layout.ranks_along((self.layout.dim_names[dim],))
        alike = len({table[r][1] for r in line}) == 1
        count, most = 0, 0.0
        if replica.value is not None and alike:
            mine = replica.value.to(self.device).resolve_conj().contiguous()
            theirs = mine.clone()
            wire = theirs.reshape(-1).view(torch.uint8)  # backends do not know every dtype
            dist.broadcast(wire, src=references[rank], group=self.mesh.get_group(dim))
            count, most = _compare(mine.cpu(), theirs.cpu())
        bits = int(torch.tensor(most, dtype=torch.float64).view(torch.int64))
        found = self._table([count, bits])
        largest = [float(torch.tensor(b).view(torch.float64)) for _, b in found]
        return {
            r: (n, most) for r, (n, _), most in zip(self.layout.ranks, found, largest, strict=True)
        }


def _reference(line: Sequence[int], table: Mapping[int, tuple[int, ...]]) -> int:
    """The rank that others are compared with: the first of those that most agree with."""
    ((content, _),) = Counter(table[rank] for rank in line).most_common(1)
    return next(rank for rank in line if table[rank] == content)


def _difference(
    reference: int,
    table: Mapping[int, tuple[int, ...]],
    amounts: Mapping[int, tuple[int, float]],
    rank: int,
    kind: str,
) -> str:
    mine, theirs = table[rank][1], table[reference][1]
    if mine != theirs:
        none = layout_number(None)
        if mine == none:
            return f"has no {kind}, rank {reference} has one"
        if theirs == none:
            return f"has a {kind}, rank {reference} has none"
        return f"has another shape or dtype than rank {reference}"
    count, most = amounts[rank]
    plural = "s" if count != 1 else ""
    by = f", by up to {most:.6g}" if most else ""  # NaN and signs of zero have no size
    return f"differs from rank {reference} in {count:,} element{plural}{by}"


def _compare(mine: Tensor, theirs: Tensor) -> tuple[int, float]:
    """In how many elements two tensors differ bit by bit, and the largest difference of finite ones."""
    if mine.numel() == 0:
        return 0, 0.0
    unequal = (bit_patterns(mine) != bit_patterns(theirs)).reshape(mine.numel(), -1).any(1)
    wide = torch.complex128 if mine.is_complex() else torch.float64
    apart = (mine.to(wide) - theirs.to(wide)).abs()
    apart = apart[apart.isfinite()]
    return int(unequal.sum()), float(apart.max()) if apart.numel() else 0.0


def _others(replicas: Sequence[Replica]) -> str:
    if not replicas:
        return ""
    names = [f"{r.fqn} ({r.kind})" for r in replicas[:_SHOWN]]
    more = f", … ({len(replicas)} in all)" if len(replicas) > _SHOWN else ""
    return f"\n  also:     {', '.join(names)}{more}"
