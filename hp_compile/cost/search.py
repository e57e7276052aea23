"""Sweep: every mesh that a number of devices can form, priced from one capture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hp_compile.cost.hardware import Profile, load_profile
from hp_compile.cost.model import CostModel
from hp_compile.plan import Plan
from hyper_parallel.errors import HPCompileError, PolicyError


@dataclass(frozen=True)
class SweepRow:
    """One mesh.

    Attributes:
        sizes: size of every mesh dim.
        inputs: size of every dynamic input dim, of one rank.
        fits: whether the peak is within the limit.
        peak_bytes: peak memory of a rank: shards, optimizer state and the most that a step allocates.
        sent_bytes: bytes that a rank sends in a step.
        step_seconds: estimated time of a step.
        exposed_seconds: seconds of it in which the rank waits for a collective.
        devices: ranks of the mesh.
        data_ranks: ranks with different data; a step does the work of so many ranks' inputs.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[str, int]
    fits: bool
    peak_bytes: int
    sent_bytes: int
    step_seconds: float
    exposed_seconds: float
    devices: int
    data_ranks: int

    @property
    def rate(self) -> float:
        """Inputs of one rank that the mesh gets through in a second: what meshes are ranked by."""
        return self.data_ranks / self.step_seconds


def meshes(model: CostModel, devices: int) -> Iterator[dict[str, int]]:
    """Sizes of all meshes of a number of devices that a captured model can run on.

    The dims whose size the captured graph depends on (tp, ep) keep theirs; the rest of the devices is split over replicas
    and shards in every way.

    Args:
        model: cost model of a plan.
        devices: number of ranks.

    Raises:
        HPCompileError: the devices do not divide by the captured dims, or the mesh has a dim that a sweep cannot size.
    """
    layout = model.plan.layout
    roles = layout.roles
    fixed = {axis: layout.size(axis) for axis in (*roles.tp, *roles.ep, *roles.cp)}
    replicate = roles.replicate or ("dp_replicate",)
    shard = tuple(a for a in roles.shard if a not in fixed) or ("dp_shard",)
    if len(replicate) > 1 or len(shard) > 1:
        raise HPCompileError(
            f"sweep: the mesh ({layout.describe()}) has several replicate or shard dims; plan the model on a mesh with one of "
            "each"
        )
    used = 1
    for size in fixed.values():
        used *= size
    if devices < 1 or devices % used:
        raise HPCompileError(
            f"sweep: {devices} devices cannot hold the captured dims {fixed}; choose a multiple of {used}"
        )
    data = devices // used
    for size in range(1, data + 1):
        if data % size == 0:
            yield {**fixed, replicate[0]: data // size, shard[0]: size}


def sweep(
    plans: Plan | CostModel | Sequence[Plan | CostModel],
    devices: int,
    *,
    profile: str | Profile = "h100",
    memory_bytes: float | None = None,
    inputs: Mapping[str, int] | None = None,
    streams: int = 1,
) -> list[SweepRow]:
    """Prices every mesh of a number of devices; the model is not captured again.

    Every rank gets inputs of the same size on every mesh. With more tensor parallelism fewer ranks have data of their own, so
    a step does less work: meshes are compared by what they get through in a second, not by the time of a step.

    Args:
        plans: a plan of the model on any mesh, or one for each size of tensor or expert parallel that is to be tried (those
            sizes are part of the captured graph).
        devices: number of ranks.
        profile: the machine (see ``load_profile``).
        memory_bytes: limit for the peak of a rank; the machine's memory by default.
        inputs: size of a dynamic input dim (``batch``, of one rank); as captured by default.
        streams: communication streams, 1 or 2.

    Returns:
        One row a mesh: those that fit first, the highest ``rate`` first among them. A mesh that the policy does not allow (an
        integer reshard that does not divide the shard dim) has no row.

    Raises:
        HPCompileError: the devices do not divide by the captured dims, or the profile does not exist.

    Example:
        >>> rows = sweep(plan, 64, profile="h100")  # doctest: +SKIP
        >>> print(table(rows))  # doctest: +SKIP
    """
    machine = load_profile(profile)
    limit = machine.memory_bytes if memory_bytes is None else memory_bytes
    given = plans if isinstance(plans, Sequence) else [plans]
    rows = []
    for item in given:
        model = item if isinstance(item, CostModel) else CostModel(item)
        for sizes in meshes(model, devices):
            try:
                estimate = model.at(sizes, inputs)
            except PolicyError:
                continue
            step = model.timeline(machine, sizes, inputs, streams=streams)
            rows.append(
                SweepRow(
                    sizes=sizes,
                    inputs={k: v for k, v in estimate.sizes.items() if k not in sizes},
                    fits=estimate.memory.peak <= limit,
                    peak_bytes=estimate.memory.peak,
                    sent_bytes=sum(estimate.sent.values()),
                    step_seconds=step.seconds,
                    exposed_seconds=step.exposed,
                    devices=devices,
                    data_ranks=math.prod(sizes.get(a, 1) for a in model.plan.layout.batch_dims),
                )
            )
    return ranked(rows)


def ranked(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Rows that fit first, and the highest rate first among them.

    Args:
        rows: of any sweeps over the same number of devices.
    """
    return sorted(rows, key=lambda row: (not row.fits, -row.rate, row.peak_bytes))


def table(rows: Sequence[SweepRow], most: int = 20) -> str:
    """The rows of a sweep as text.

    Args:
        rows: what :func:`sweep` returned.
        most: how many to show.
    """
    if not rows:
        return "no mesh\n"
    names = list(rows[0].sizes)
    cells = [[*names, "fits", "peak GB", "sends GB", "step ms", "exposed ms", "inputs/s"]]
    for row in rows[:most]:
        cells.append(
            [
                *(str(row.sizes.get(name, 1)) for name in names),
                "yes" if row.fits else "no",
                f"{row.peak_bytes / 1e9:.2f}",
                f"{row.sent_bytes / 1e9:.2f}",
                f"{row.step_seconds * 1e3:.1f}",
                f"{row.exposed_seconds * 1e3:.1f}",
                f"{row.rate:.1f}",
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(lines) + "\n"


__all__ = ["SweepRow", "meshes", "ranked", "sweep", "table"]
