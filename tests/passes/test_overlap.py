"""Where the overlap pass puts collectives and waits: one unit ahead for weights, one bucket in flight for gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from passes.base import WAIT, is_collective
from tests.passes.outline import outline
from tests.passes.programs import plan_blocks


def test_forward_gathers_one_unit_ahead() -> None:
    text = outline(plan_blocks().graphs["forward"])
    assert_expected_inline(
        text,
        """\
start all_gather blocks.0
wait  all_gather blocks.0
start all_gather blocks.1
      addmm
wait  all_gather blocks.1
start all_gather blocks.2
      addmm
wait  all_gather blocks.2
start all_gather (root)
      addmm
wait  all_gather (root)
      mm""",
    )


def test_backward_gathers_ahead_and_keeps_one_reduction_in_flight() -> None:
    text = outline(plan_blocks().graphs["backward"])
    assert_expected_inline(
        text,
        """\
start all_gather (root)
      mm
wait  all_gather (root)
start all_gather blocks.2
      mm
start reduce_scatter (root)
wait  all_gather blocks.2
start all_gather blocks.1
      mm
      mm
wait  reduce_scatter (root)
start reduce_scatter blocks.2
wait  all_gather blocks.1
      mm
      mm
wait  reduce_scatter blocks.2
start reduce_scatter blocks.1
      mm
wait  reduce_scatter blocks.1
start reduce_scatter blocks.0
wait  reduce_scatter blocks.0""",
    )


def test_all_reduce_starts_when_its_reduce_scatter_is_waited_for() -> None:
    text = outline(plan_blocks((2, 2)).graphs["backward"], compute=())
    reductions = "\n".join(line for line in text.splitlines() if "gather" not in line)
    assert_expected_inline(
        reductions,
        """\
start reduce_scatter (root)
wait  reduce_scatter (root)
start all_reduce (root)
start reduce_scatter blocks.2
wait  reduce_scatter blocks.2
wait  all_reduce (root)
start all_reduce blocks.2
start reduce_scatter blocks.1
wait  reduce_scatter blocks.1
wait  all_reduce blocks.2
start all_reduce blocks.1
start reduce_scatter blocks.0
wait  all_reduce blocks.1
wait  reduce_scatter blocks.0
start all_reduce blocks.0
wait  all_reduce blocks.0""",
    )


def test_integer_reshard_gathers_ahead_in_backward() -> None:
    text = outline(plan_blocks((4,), reshard_after_forward=2).graphs["backward"])
    starts = text.splitlines().index("start all_gather blocks.1")
    assert starts < text.splitlines().index("wait  all_gather blocks.2") + 2
    assert text.splitlines()[starts + 1].strip() == "mm"


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("bucket_mb", [None, 1e-4, 1e6, 0])
def test_at_most_one_unit_of_each_reduction_is_in_flight(
    shape: tuple[int, ...], bucket_mb: float | None
) -> None:
    backward = plan_blocks(shape, count=5, bucket_mb=bucket_mb).graphs["backward"]
    flying: dict[str, Counter[str]] = {}
    for node in backward.graph.nodes:
        if is_collective(node):
            comm = node.meta["comm"]
            units = flying.setdefault(comm.kind, Counter())
            units[comm.unit] += 1
            assert len(+units) <= 2 if comm.kind == "all_gather" else len(+units) <= 1, node
        elif node.target is WAIT:
            comm = node.args[0].meta["comm"]
            flying[comm.kind][comm.unit] -= 1
    assert not any(+units for units in flying.values())


def test_full_gradients_are_released_before_the_next_are_packed() -> None:
    nodes = list(plan_blocks().graphs["backward"].graph.nodes)
    packs: list[Any] = [
        n for n in nodes if n.target is torch.ops.aten.cat.default and n.meta.get("packs")
    ]
    scatters = [n for n in nodes if is_collective(n) and n.meta["comm"].kind == "reduce_scatter"]
    waits = [next(u for u in n.users if u.target is WAIT) for n in scatters]
    position = {n: i for i, n in enumerate(nodes)}
    packs = [n for n in packs if any(position[n] < position[s] for s in scatters)][-2:]
    for pack in packs:
        earlier = [w for s, w in zip(scatters, waits, strict=True) if position[s] < position[pack]]
        assert all(position[w] < position[pack] for w in earlier)
