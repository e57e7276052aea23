"""Memory: the walk over the programs beside what a step really allocates, and beside the programs of other meshes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile.cost import GLOO, CostModel, replan
from hp_compile.cost.liveness import CATEGORIES, lifetimes
from passes.base import aten, hint
from tests.cost.plans import MESHES, NAMES, cost_of, peak_bytes, plan_on
from tests.dist_pool import fake_world
from tests.models import LMConfig, TransformerLM, lm_batch, lm_loss


class WithLoss(nn.Module):
    """A model that returns its loss, so that all of the step's memory is in the programs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TransformerLM(LMConfig(dim=64, hidden=128, blocks=2, vocab=128))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return lm_loss(self.net(tokens), targets)


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_measured_peak(reshard: bool, tmp_path: Path) -> None:
    """A step's measured peak: within a tenth, and never below by more than the loss itself."""
    batch = lm_batch(0, 0, size=4, length=16, vocab=128)
    policy = hp_compile.Policy(
        backend="aot_eager", reshard_after_forward=reshard, units=("net.blocks.*",), dynamic=False
    )
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        model = hp_compile.shard(WithLoss(), mesh, policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step() -> None:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        measured = peak_bytes(step, tmp_path)
        estimated = CostModel(model.plan(*batch)).at().memory.step
    assert 0.999 * measured <= estimated <= 1.1 * measured


def test_gloo_copies_what_is_gathered_and_what_is_scattered() -> None:
    plan = plan_on((1, 2), "lm")
    gloo = CostModel(plan, transport=GLOO)
    _, live = gloo.live()
    # On two ranks a collective sends half of what a gather returns, or a scatter takes.
    assert max(live["transport"]) >= 2 * max(c.nbytes for c in plan.collectives)
    assert not any(cost_of((1, 2), "lm").live()[1]["transport"])
    assert gloo.at().memory.step > cost_of((1, 2), "lm").at().memory.step


@pytest.mark.parametrize("shape", MESHES[:3], ids=str)
def test_expressions_agree_with_a_walk_over_the_programs_of_that_mesh(
    shape: tuple[int, int],
) -> None:
    """Only buffers that padding adds are missing: a hundredth of a step at most."""
    plan = plan_on((2, 2), "lm")
    sizes = dict(zip(NAMES, shape, strict=True))
    memory = cost_of((2, 2), "lm").at(sizes).memory
    there = replan(plan, sizes)
    temporary = 4 * sum(math.prod(p.padded_shard_shape) for p in there.params.values())
    walked = _walk(there.graphs, temporary)
    assert memory.step == pytest.approx(walked, rel=0.01)
    shards = there.params.values()
    assert memory.params == sum(math.prod(p.padded_shard_shape) * 4 for p in shards)
    assert memory.optimizer == 2 * memory.params
    assert memory.gradients == memory.params


def test_saved_grows_with_the_batch() -> None:
    model = cost_of((2, 2), "tiny", dynamic=None)
    small, large = (model.at(inputs={"batch": n}).memory for n in (2, 20))
    assert 9 * small.saved < large.saved <= 10 * small.saved
    assert small.params == large.params
    assert large.peak == large.params + large.optimizer + large.step


def test_categories_add_up() -> None:
    model = cost_of((2, 2), "lm")
    places, live = model.live()
    assert set(live) == set(CATEGORIES)
    total = [sum(values) for values in zip(*live.values(), strict=True)]
    assert len(total) == len(places)
    assert max(total) == model.at().memory.step
    assert places[-1] == ("optimizer", "optimizer")
    assert live["weights"][0] == 0 and live["gradients"][-1] == model.at().memory.gradients


def test_views_have_no_memory_and_values_die() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    value = graph.call_function(aten.mul.Tensor, (x, 2))
    view = graph.call_function(aten.view.default, (value, [8]))
    total = graph.call_function(aten.sum.default, (view,))
    again = graph.call_function(aten.neg.default, (total,))
    out = graph.output((again,))
    for node, shape in ((x, (2, 4)), (value, (2, 4)), (view, (8,)), (total, ()), (again, ())):
        node.meta["val"] = torch.empty(shape, device="meta")
    out.meta["roles"] = (None,)
    found = lifetimes({"forward": fx.GraphModule(nn.Module(), graph)}, _nbytes)
    assert [(b.name, int(b.nbytes), b.born, b.dies) for b in found.buffers] == [
        ("mul_tensor", 32, 1, 3),
        ("sum_default", 4, 3, 4),
        ("neg_default", 4, 4, 4),
    ]


def _nbytes(node: fx.Node, value: Tensor) -> sympy.Expr:
    return sympy.Integer(hint(value.numel()) * value.element_size())


def _walk(graphs: Mapping[str, fx.GraphModule], temporary: int) -> float:
    found = lifetimes(graphs, _nbytes, optimizer_bytes=temporary)
    return max(found.live([int(b.nbytes) for b in found.buffers]))
