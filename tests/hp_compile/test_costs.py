"""What running and planning cost: memory of saved values, Python work, and tracing that is fast without a difference."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import pipeline
from hp_compile.dump import graph_text
from hp_compile.program import Program
from hyper_parallel.torch_compat import graph as compat
from tests.dist_pool import fake_world
from tests.passes.programs import Blocks, plan_blocks


def sharded() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    return hp_compile.shard(Blocks(), mesh, hp_compile.Policy(backend="aot_eager"))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backward_owns_what_forward_saved(
    retain_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_backward = Program.run_backward
    alive: list[int] = []

    def spy(self: Program, reduction: Any, values: list[Any], sizes: Any) -> Sequence[Any]:
        held = [weakref.ref(v) for v in values if isinstance(v, torch.Tensor) and v.dim() == 2]
        copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
        values.clear()
        alive.append(sum(ref() is not None for ref in held))
        return run_backward(self, reduction, copies, sizes)

    monkeypatch.setattr(Program, "run_backward", spy)
    with fake_world(2):
        model = sharded()
        loss = model(torch.randn(4, 4)).sum()
        for _ in range(2 if retain_graph else 1):
            loss.backward(retain_graph=retain_graph)
    shards = 2  # the module holds them: weights whose value backward reads
    if retain_graph:
        assert alive[0] == alive[1] > shards
    else:
        assert alive == [shards]


def test_boxed_forward_empties_its_list() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.add, (x, y)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    values = [torch.ones(2), torch.ones(2)]
    (result,) = compat.boxed_forward(gm)(values)
    assert values == []
    assert torch.equal(result, torch.full((2,), 2.0))
    assert torch.equal(gm(torch.ones(2), torch.ones(2))[0], result)  # gm itself did not change


def test_fast_tracing_changes_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes stay symbolic, and the programs are the same as without it."""
    fast = plan_blocks(dynamic=None)
    monkeypatch.setattr(compat, "fast_tracing", contextlib.nullcontext)
    plain = plan_blocks(dynamic=None)
    for phase in ("forward", "backward"):
        assert graph_text(fast.graphs[phase]) == graph_text(plain.graphs[phase])
    assert "s" in str(next(iter(fast._require_program().captured.input_shapes))[0])


def test_fast_tracing_leaves_nothing_behind() -> None:
    before = (gc.get_threshold(), vars(compat.SymNode)["_add"])
    with pytest.raises(ZeroDivisionError), compat.fast_tracing():
        raise ZeroDivisionError
    assert (gc.get_threshold(), vars(compat.SymNode)["_add"]) == before


def test_pass_table_adds_up_every_pass() -> None:
    table = pipeline.PassTable()
    with pipeline.observe(table):
        plan_blocks()
    rows = {(row.name, row.stage): row for row in table.rows()}
    assert [name for name, stage in rows if stage == "forward"] == [
        "partition",
        "bucket",
        "overlap",
    ]
    assert [name for name, stage in rows if stage == "backward"] == [
        "partition",
        "reduce_grads",
        "bucket",
        "overlap",
    ]
    assert all(row.runs == 1 and row.nodes > 0 for row in rows.values())
    assert str(table).splitlines()[-1].startswith("total")
