"""HSDPModule: every method, and that nothing is shared between models or left by a failure."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel import (
    HSDPCell,
    HSDPModule,
    HSDPParam,
    MeshError,
    PlacementError,
    PolicyError,
    ShardedState,
    ShardedStateError,
    fully_shard,
    hsdp,
    register_fsdp_forward_method,
)
from tests.baselines import TrainOptions, full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, record_events, shard
from tests.models import CASES, LMConfig, TransformerLM, UnevenMLP, build

LM = CASES["lm"]


def step(model: nn.Module, rank: int, index: int = 0) -> Tensor:
    inputs, targets = LM.batch(rank, index)
    loss = LM.loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def names_and_classes(rank: int, world_size: int) -> None:
    model = UnevenMLP()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    first = hsdp(model.layers[0], mesh=data_mesh())
    assert first is model.layers[0]
    both = fully_shard([model.layers[1], model.layers[2]], mesh=data_mesh())
    assert both == [model.layers[1], model.layers[2]]
    assert fully_shard(model, mesh=data_mesh()) is model
    assert HSDPCell is HSDPModule
    assert isinstance(model, HSDPModule) and isinstance(model, UnevenMLP)
    assert type(model).__name__ == "HSDPUnevenMLP"
    assert isinstance(first, nn.Linear) and type(first).__name__ == "HSDPLinear"
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert all(isinstance(param, DTensor) for param in model.parameters())
    params = model.layers[0].hsdp_params()
    assert all(isinstance(param, HSDPParam) for param in params)
    assert [param.fqn for param in params] == ["weight", "bias"]
    assert len(model.layers[1].hsdp_params()) == 4 == len(model.layers[2].hsdp_params())
    assert len(model.hsdp_params()) == 2
    model(torch.zeros(1, 6))
    assert [param.fqn for param in params] == ["layers.0.weight", "layers.0.bias"]
    with pytest.raises(ShardedStateError, match="deepcopy of a sharded HSDPUnevenMLP"):
        copy.deepcopy(model)
    with pytest.raises(ShardedStateError, match="cannot be pickled"):
        pickle.dumps(model)
    sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    fully_shard(sequence, mesh=data_mesh())
    assert type(sequence[:2]) is nn.Sequential


@pytest.mark.dist
def test_names_and_classes() -> None:
    run_ranks(names_and_classes, 2)


def bad_arguments(rank: int, world_size: int) -> None:
    mesh = data_mesh()
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([], {}, PolicyError, "non-empty list of modules"),
        ("x", {}, PolicyError, "expected an nn.Module"),
        (nn.ModuleList([nn.Linear(2, 2)]), {}, PolicyError, "ModuleList has no forward"),
        (nn.Linear(2, 2), {"reshard_after_forward": "x"}, PolicyError, "reshard_after_forward"),
        (nn.Linear(2, 2), {"reshard_after_forward": 3}, PolicyError, "3 does not divide"),
        (nn.Linear(2, 2), {"mp_policy": 1}, PolicyError, "mp_policy"),
        (nn.Linear(2, 2), {"offload_policy": 1}, PolicyError, "offload_policy"),
        (nn.Linear(2, 2), {"ignored_params": ["*.x"]}, PolicyError, "matches no parameter"),
        (nn.Linear(2, 2), {"mesh": "x"}, MeshError, "expected a DeviceMesh"),
        (nn.Linear(2, 2), {"enable_param_shard": 1}, PolicyError, "enable_param_shard"),
        (
            nn.Linear(2, 2),
            {"shard_placement_fn": lambda p: Shard(7)},
            PlacementError,
            r"weight: Shard\(7\) names no dim",
        ),
        (
            nn.Linear(2, 2),
            {"shard_placement_fn": lambda p: "dim 0"},
            PlacementError,
            "weight: shard_placement_fn returned 'dim 0'",
        ),
    ]
    for module, changes, kind, text in cases:
        before = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
        with pytest.raises(kind, match=text):
            fully_shard(module, **{"mesh": mesh, **changes})
        if isinstance(module, nn.Module):
            assert not isinstance(module, HSDPModule)
            assert all(p is before[n] for n, p in module.named_parameters()), "nothing is touched"
    module = nn.Linear(2, 2)
    fully_shard(module, mesh=mesh)
    with pytest.raises(ShardedStateError, match="Linear is sharded already"):
        fully_shard(module, mesh=mesh)
    with pytest.raises(PolicyError, match="expected True or False, got 2 of type int"):
        module.set_reshard_after_forward(2)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="expected 'avg' or 'sum', got 'max'"):
        module.set_reduce_op_type("max")
    with pytest.raises(PolicyError, match="expected a positive number, got 0"):
        module.set_gradient_divide_factor(0)
    with pytest.raises(PolicyError, match="fully_shard was applied to, got Linear"):
        module.set_modules_to_forward_prefetch([nn.Linear(2, 2)])  # type: ignore[list-item]


@pytest.mark.dist
def test_bad_arguments_leave_the_module_alone() -> None:
    run_ranks(bad_arguments, 2)


def unshard_and_reshard(rank: int, world_size: int) -> None:
    model = build(UnevenMLP)
    plain = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model.layers[0], mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    layer = model.layers[0]
    assert isinstance(layer, HSDPModule) and isinstance(model, HSDPModule)
    handle = layer.unshard(async_op=True)
    assert isinstance(layer.weight, DTensor), "not before it is waited for"
    assert handle is not None
    handle.wait()
    handle.wait()
    assert torch.equal(layer.weight, plain["layers.0.weight"])
    assert isinstance(model.layers[1].weight, DTensor), "not recursive"
    (weight, _) = layer.hsdp_params()
    storage = weight.unsharded_param.untyped_storage()
    assert storage.nbytes() >= plain["layers.0.weight"].nbytes
    layer.reshard()
    layer.reshard()
    assert storage.nbytes() == 0
    assert weight.sharded_state is ShardedState.SHARDED
    handle = layer.unshard(async_op=True)
    with count_collectives() as calls:
        model(torch.zeros(1, 6))
    assert calls.kinds() == {"all_gather": 1}, "forward waits for the pending one"
    assert layer.unshard() is None
    with torch.no_grad():
        assert torch.equal(layer.weight, plain["layers.0.weight"])
    layer.reshard()
    layer.unshard(async_op=True)
    layer.reshard()  # a gather that nobody waited for
    assert isinstance(layer.weight, DTensor)


@pytest.mark.dist
def test_unshard_and_reshard() -> None:
    run_ranks(unshard_and_reshard, 2)


def two_models(rank: int, world_size: int) -> None:
    first, second = LM.make(0), LM.make(1)
    alone: list[dict[str, Tensor]] = []
    for seed in (0, 1):
        model = LM.make(seed)
        shard(model, LM, TrainOptions())
        step(model, rank)
        alone.append(grads(model))
    one = shard(first, LM, TrainOptions())
    two = shard(second, LM, TrainOptions())
    two.set_reduce_op_type("sum")
    one.set_is_last_backward(False)
    inputs, targets = LM.batch(rank, 0)
    losses = [LM.loss(m(inputs), targets) for m in (first, second)]  # interleaved
    for loss in reversed(losses):
        loss.backward()
    one.set_is_last_backward(True)
    for name, grad in grads(first).items():
        assert torch.equal(grad, alone[0][name]), name
    for name, grad in grads(second).items():
        torch.testing.assert_close(grad, alone[1][name] * world_size)


@pytest.mark.dist
def test_two_models_share_nothing() -> None:
    run_ranks(two_models, 2)


class Boom(Exception):
    pass


def failing_steps(rank: int, world_size: int) -> None:
    reference = LM.make()
    shard(reference, LM, TrainOptions())
    step(reference, rank)
    expected = grads(reference)
    model = LM.make()
    sharded = shard(model, LM, TrainOptions())
    broken = {"at": ""}

    def fail(where: str) -> Any:
        def hook(*_: Any) -> None:
            if broken["at"] == where:
                raise Boom(where)

        return hook

    model.blocks[1].mlp.register_forward_pre_hook(fail("inner"))
    model.head.register_forward_pre_hook(fail("outer"))
    model.blocks[0].attention.o.register_full_backward_hook(fail("backward"))
    inputs, targets = LM.batch(rank, 0)
    for where in ("inner", "outer"):
        broken["at"] = where
        with pytest.raises(Boom):
            model(inputs)
        for block in model.blocks:
            for param in block.hsdp_params():
                assert param.sharded_state is ShardedState.SHARDED
        assert all(isinstance(param, DTensor) for param in model.parameters())
        broken["at"] = ""
        step(model, rank)
        for name, grad in grads(model).items():
            assert torch.equal(grad, expected[name]), (where, name)
        model.zero_grad()
    for explicit in (False, True):
        broken["at"] = "backward"
        with pytest.raises(Boom):
            LM.loss(model(inputs), targets).backward()
        model.zero_grad()
        broken["at"] = ""
        if explicit:
            sharded.reset_iter_state()
        step(model, rank)
        for name, grad in grads(model).items():
            assert torch.equal(grad, expected[name]), name
        model.zero_grad()
    # A failed forward does not lose what earlier backwards accumulated.
    sharded.set_requires_gradient_sync(False)
    step(model, rank)
    broken["at"] = "inner"
    with pytest.raises(Boom):
        model(inputs)
    broken["at"] = ""
    sharded.set_requires_gradient_sync(True)
    step(model, rank)
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, expected[name] * 2)
    with pytest.raises(ShardedStateError, match="must be called on the root"):
        model.blocks[0].reset_iter_state()


@pytest.mark.dist
def test_a_step_that_raises_leaves_the_model_usable() -> None:
    run_ranks(failing_steps, 2)


def prefetch_order(rank: int, world_size: int, explicit: bool) -> list[str]:
    config = LMConfig(blocks=3)
    model = build(TransformerLM, config)
    mesh = data_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    blocks = list(model.blocks)
    if explicit:
        model.set_forward_prefetch_cells(blocks[:2])
        blocks[0].set_modules_to_forward_prefetch([blocks[2]])
        blocks[2].set_backward_prefetch_cells([blocks[1], blocks[0]])
    events = record_events(model)
    step(model, rank)
    return events


@pytest.mark.dist
def test_order_of_prefetches() -> None:
    b0, b1, b2 = "blocks.0", "blocks.1", "blocks.2"
    implicit = run_ranks(prefetch_order, 2, False)[0]
    assert implicit == [
        *("start root", "use root", f"start {b0}", f"use {b0}"),
        *(f"start {b1}", f"use {b1}", f"start {b2}", f"use {b2}"),
        *(f"start {b2}", f"use {b2}", f"start {b1}", f"reduce {b2}"),
        *(f"use {b1}", f"start {b0}", f"reduce {b1}"),
        *(f"use {b0}", f"reduce {b0}", "reduce root"),
    ]
    explicit = run_ranks(prefetch_order, 2, True)[0]
    assert explicit == [
        *("start root", "use root", f"start {b0}", f"start {b1}"),
        *(f"use {b0}", f"start {b2}", f"use {b1}", f"use {b2}"),
        *(f"start {b2}", f"use {b2}", f"start {b1}", f"start {b0}", f"reduce {b2}"),
        *(f"use {b1}", f"reduce {b1}", f"use {b0}", f"reduce {b0}", "reduce root"),
    ]


def lifetime(rank: int, world_size: int) -> None:
    model = LM.make()
    sharded = shard(model, LM, TrainOptions(reshard_after_forward=False))
    inputs, targets = LM.batch(rank, 0)
    states = {p: p.sharded_state for p in sharded.hsdp_params()}
    assert set(states.values()) == {ShardedState.SHARDED}
    block = model.blocks[0]
    loss = LM.loss(model(inputs), targets)
    assert block.hsdp_params()[0].sharded_state is ShardedState.UNSHARDED
    loss.backward()
    assert block.hsdp_params()[0].sharded_state is ShardedState.SHARDED
    sharded.set_reshard_after_forward(True)
    model(inputs)
    for module in (model, block):
        assert module.hsdp_params()[0].sharded_state is ShardedState.SHARDED
    sharded.set_reshard_after_forward(False, recurse=False)
    loss = LM.loss(model(inputs), targets)
    assert model.hsdp_params()[0].sharded_state is ShardedState.UNSHARDED
    assert block.hsdp_params()[0].sharded_state is ShardedState.SHARDED
    sharded.set_reshard_after_backward(False)
    loss.backward()
    for module in (model, block):
        assert module.hsdp_params()[0].sharded_state is ShardedState.UNSHARDED
    with count_collectives() as calls:
        model(inputs)
    assert calls.kinds() == {}


@pytest.mark.dist
def test_lifetime_setters() -> None:
    run_ranks(lifetime, 2)


def reduce_ops(rank: int, world_size: int) -> None:
    results = []
    for change in (None, "sum", dist.ReduceOp.SUM, "avg", 8.0):
        model = LM.make()
        sharded = shard(model, LM, TrainOptions(mesh_shape=(2, 1)))
        if isinstance(change, float):
            for module in (model, *model.blocks):
                module.set_gradient_divide_factor(change)
        elif change is not None:
            sharded.set_reduce_op_type(change)
        step(model, rank)
        results.append(grads(model))
    for name, mean in results[0].items():
        for other, factor in zip(results[1:], (2, 2, 1, 0.25), strict=True):
            assert torch.equal(other[name], mean * factor), (name, factor)


@pytest.mark.dist
def test_reduce_op_and_divide_factor() -> None:
    run_ranks(reduce_ops, 2)


def deferred_all_reduce(rank: int, world_size: int) -> list[float]:
    model = nn.Linear(1, 4, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=data_mesh((2, 2)))
    assert isinstance(model, HSDPModule)
    for micro, scale in enumerate((10.0, 1.0)):
        model.set_requires_all_reduce(micro == 1)
        model(torch.full((1, 1), scale * (rank + 1))).sum().backward()
        if micro == 0:
            assert model.weight.grad is None
    return model.weight.grad.full_tensor().flatten().tolist()


@pytest.mark.dist
def test_deferred_all_reduce_keeps_partial_sums() -> None:
    assert run_ranks(deferred_all_reduce, 4) == [[27.5] * 4] * 4


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def generate(self, x: Tensor, *, scale: float) -> Tensor:
        assert not isinstance(self.inner.weight, DTensor)
        return self.inner(x) * scale


def forward_method(rank: int, world_size: int) -> None:
    plain = build(Generator)
    register_fsdp_forward_method(plain, "generate")  # nothing to do, no error
    model = build(Generator)
    fully_shard(model, mesh=data_mesh(), reshard_after_forward=True)
    register_fsdp_forward_method(model, "generate")
    with pytest.raises(PolicyError, match="has no method 'sing'"):
        register_fsdp_forward_method(model, "sing")
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    out = model.generate(x, scale=2.0)
    assert torch.equal(out, plain.generate(x, scale=2.0))
    assert isinstance(model.inner.weight, DTensor)
    out.sum().backward()
    assert isinstance(model.inner.weight.grad, DTensor)


@pytest.mark.dist
def test_register_forward_method() -> None:
    run_ranks(forward_method, 2)


def default_mesh(rank: int, world_size: int) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    (weight, _) = model.hsdp_params()
    assert weight.mesh.mesh_dim_names == ("dp_shard",) and weight.shard_size == 2


@pytest.mark.dist
def test_default_mesh_is_all_ranks() -> None:
    run_ranks(default_mesh, 2)


def test_no_process_group_is_an_error() -> None:
    with pytest.raises(MeshError, match="init_process_group first"):
        fully_shard(nn.Linear(2, 2))


def child_then_parent(rank: int, world_size: int) -> None:
    """A unit that ran alone before becomes part of the model that runs later."""
    model, reference = LM.make(), LM.make()
    shard(model, LM, TrainOptions(reshard_after_forward=True))
    shard(reference, LM, TrainOptions(reshard_after_forward=True))
    with torch.no_grad():
        model.blocks[0](torch.zeros(1, 2, 32))
    step(model, rank)
    step(reference, rank)
    for name, grad in grads(model).items():
        assert torch.equal(grad, grads(reference)[name]), name
    assert model.blocks[0].hsdp_params()[0].fqn.startswith("blocks.0.")


@pytest.mark.dist
def test_a_unit_that_ran_alone_joins_its_model() -> None:
    run_ranks(child_then_parent, 2)
