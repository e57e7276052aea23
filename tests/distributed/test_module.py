"""What `shard` makes of a module: class, names, methods, memory; no collective runs here (fake groups)."""

from __future__ import annotations

import collections
import copy
import gc
import inspect
import math
import pickle
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hp_compile
import hyper_parallel
from hp_compile import (
    CaptureError,
    HPCompileError,
    PlacementError,
    Policy,
    PolicyError,
    ShardedModule,
)
from tests.dist_pool import fake_world
from tests.models import CASES, TransformerLM, UnevenMLP, build

POLICY = Policy(backend="aot_eager")
METHODS = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_is_last_backward",
    "set_modules_to_forward_prefetch",
    "set_forward_prefetch_cells",
    "set_modules_to_backward_prefetch",
    "set_backward_prefetch_cells",
    "unshard",
    "reshard",
    "set_reduce_op_type",
    "set_gradient_divide_factor",
    "hsdp_params",
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 5 of 8, as (dp_replicate=2, dp_shard=4)."""
    with fake_world(8, rank=5):
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))


def sharded(name: str, mesh: DeviceMesh, policy: Policy = POLICY) -> Any:
    return hp_compile.shard(CASES[name].make(), mesh, policy)


# ------------------------------------------------------------------ the class and its names


def test_same_object_of_both_classes_with_the_same_names(mesh: DeviceMesh) -> None:
    for case in CASES.values():
        plain, model = case.make(), case.make()
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        modules = [n for n, _ in model.named_modules()]
        keys = list(model.state_dict())
        result: Any = hp_compile.shard(model, mesh, POLICY)
        assert result is model
        assert isinstance(model, type(plain)) and isinstance(model, ShardedModule)
        assert type(model).__module__ == type(plain).__module__
        assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == names
        assert [n for n, _ in model.named_modules()] == modules
        assert list(model.state_dict()) == keys == list(plain.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        for (name, param), full in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(param, DTensor) and isinstance(param, nn.Parameter), name
            assert param.shape == full.shape and param.dtype == full.dtype, name
            assert param.requires_grad == full.requires_grad, name
            assert param.device_mesh is mesh
            assert param.placements == model.plan().params[name].placements


def test_methods_are_those_of_hsdp_module() -> None:
    for name in METHODS:
        ours = inspect.signature(getattr(ShardedModule, name))
        theirs = inspect.signature(getattr(hyper_parallel.HSDPModule, name))
        mine = [(p.name, p.kind, p.default) for p in ours.parameters.values()]
        other = [(p.name, p.kind, p.default) for p in theirs.parameters.values()]
        assert mine == other, name
        assert inspect.getdoc(getattr(ShardedModule, name)), name


def test_setters_refuse_other_types(mesh: DeviceMesh) -> None:
    model = sharded("uneven", mesh)
    for name in METHODS[:5]:
        with pytest.raises(PolicyError, match=r"expected True or False, got 1"):
            getattr(model, name)(1)
    with pytest.raises(PolicyError, match="expected 'avg' or 'sum', got 'mean'"):
        model.set_reduce_op_type("mean")
    with pytest.raises(PolicyError, match="expected 'avg' or 'sum'"):
        model.set_reduce_op_type(dist.ReduceOp.MAX)
    for factor in (0, -1.0, True, "2"):
        with pytest.raises(PolicyError, match="expected a number above 0"):
            model.set_gradient_divide_factor(factor)
    with pytest.raises(PolicyError, match="Linear is no submodule"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    for op in ("avg", "sum", dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        model.set_reduce_op_type(op)
    model.set_backward_prefetch_cells(list(model.layers))


def test_hsdp_params_show_the_layout(mesh: DeviceMesh) -> None:
    model = sharded("tied", mesh, Policy(ignored_params=["leave.bias"]))
    params = model.hsdp_params()
    assert all(isinstance(p, hyper_parallel.HSDPParam) for p in params)
    assert [p.fqn for p in params] == [n for n, _ in model.named_parameters() if n != "leave.bias"]
    assert all(again is p for again, p in zip(model.hsdp_params(), params, strict=True))
    by_name = {p.fqn: p for p in params}
    weight = by_name["first.weight"]
    assert weight.sharded_param is model.first.weight is model.second.weight
    assert (weight.rank_size, weight.shard_size, weight.dp_size) == (8, 4, 2)
    assert dist.get_process_group_ranks(weight.sharded_group_info.group) == [4, 5, 6, 7]
    assert dist.get_process_group_ranks(weight.unsharded_group_info.group) == [1, 5]
    assert weight.sharded_state is hyper_parallel.ShardedState.SHARDED


def test_plan_of_a_sharded_model(mesh: DeviceMesh) -> None:
    case = CASES["uneven"]
    inputs, _ = case.batch(0, 0)
    plain = hp_compile.plan(case.make(), mesh, POLICY, args=(inputs,))
    with torch.device("meta"):
        meta_model = case.factory()
    meta = hp_compile.plan(meta_model, mesh, POLICY, args=(inputs,))
    model = sharded("uneven", mesh)
    hp_compile.shard(meta_model, mesh, POLICY)
    with torch.no_grad():
        ours = model.plan(inputs)
    plans = [plain, meta, ours, meta_model.plan(inputs)]  # type: ignore[operator]
    assert len({p.fingerprint for p in plans}) == 1
    assert all("backward" in p.graphs for p in plans)
    # A sharded model can be planned for another mesh, as a plain one can.
    other = DeviceMesh("cpu", torch.arange(8), mesh_dim_names=("dp_shard",))
    expected = hp_compile.plan(case.make(), other, POLICY, args=(inputs,))
    assert hp_compile.plan(model, other, POLICY, args=(inputs,)).dump() == expected.dump()
    assert expected.dump() != plain.dump()


def test_forward_looks_like_the_original(mesh: DeviceMesh) -> None:
    model = sharded("lm", mesh)
    assert inspect.signature(model.forward) == inspect.signature(TransformerLM().forward)
    assert model.forward.__doc__ == TransformerLM.forward.__doc__
    with pytest.raises(HPCompileError, match="forward cannot be replaced after shard"):
        model.forward = lambda tokens: tokens


def test_forward_of_the_instance_is_captured(mesh: DeviceMesh) -> None:
    model = CASES["uneven"].make()

    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return UnevenMLP.forward(self, x) * 2  # type: ignore[arg-type]

    model.forward = types.MethodType(doubled, model)  # type: ignore[method-assign]
    hp_compile.shard(model, mesh, POLICY)
    graph = model.plan(torch.randn(4, 6)).graphs["forward"]  # type: ignore[operator]
    assert any("mul" in str(node.target) for node in graph.graph.nodes)


def test_containers_slice_into_plain_ones(mesh: DeviceMesh) -> None:
    model = hp_compile.shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), mesh)
    part = model[:2]  # type: ignore[index]
    assert type(part) is nn.Sequential and len(part) == 2


def test_copies_and_pickles_say_why_not(mesh: DeviceMesh) -> None:
    model = sharded("uneven", mesh)
    with pytest.raises(HPCompileError, match=r"cannot be deep-copied.*Copy the model before shard"):
        copy.deepcopy(model)
    with pytest.raises(HPCompileError, match=r"cannot be deep-copied"):
        copy.deepcopy(nn.ModuleList([model]))
    with pytest.raises(HPCompileError, match=r"cannot be copied: two models"):
        copy.copy(model)
    with pytest.raises(HPCompileError, match=r"cannot be pickled.*Save state_dict\(\)"):
        pickle.dumps(model)


# ------------------------------------------------------------------ parameters, aliases, memory


def test_uses_of_a_parameter_in_containers_follow(mesh: DeviceMesh) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
            self.listed = [self.a, {"b": self.b}]

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.listed
            return x * first * second["b"]  # type: ignore[index,operator]

    model: Any = hp_compile.shard(Held(), mesh, POLICY)
    assert model.listed[0] is model.a and model.listed[1]["b"] is model.b
    with pytest.raises(CaptureError):  # export cannot see a parameter that is read from a list
        model.plan(torch.randn(3, 6))
    lstm: Any = hp_compile.shard(nn.LSTM(4, 6), mesh, POLICY)
    assert all(isinstance(w, DTensor) for w in lstm._flat_weights)
    gathered = {n for c in lstm.plan(torch.randn(3, 2, 4)).collectives for n in c.params}
    assert gathered == {n for n, _ in lstm.named_parameters()}


def test_what_the_user_noted_on_a_parameter_stays(mesh: DeviceMesh) -> None:
    model: Any = CASES["uneven"].make()
    model.layers[0].weight.no_decay = True
    assert hp_compile.shard(model, mesh, POLICY).layers[0].weight.no_decay is True  # type: ignore


def test_each_rank_holds_its_shards_only(mesh: DeviceMesh) -> None:
    model: Any = UnevenMLP((6, 64, 7, 3, 5))
    full = [weakref.ref(p) for p in model.parameters()]
    hp_compile.shard(model, mesh, POLICY)
    assert not any(ref() is not None for ref in full), "a full parameter is alive"
    plans = model.plan().params

    def check() -> None:
        for name, plan in plans.items():
            local = model.get_parameter(name)._local_tensor
            assert tuple(local.shape) == plan.shard_shape, name
            room = math.prod(plan.padded_shard_shape) * 4
            assert local.untyped_storage().nbytes() == room < math.prod(plan.shape) * 4, name

    check()
    model.load_state_dict({n: torch.ones(p.shape) for n, p in plans.items()}, assign=True)
    check()
    assert all(bool((p._local_tensor == 1).all()) for p in model.parameters())


def test_full_parameters_are_freed_one_by_one(mesh: DeviceMesh) -> None:
    """While one is cut, those before it are gone; counted without the collector's help."""
    model = UnevenMLP((6, 10, 7, 3, 5))
    alive: list[int] = []
    refs = [weakref.ref(p) for p in model.parameters()]
    gc.disable()
    try:
        take = hp_compile.state.ParamState.take

        def counting(self: Any, full: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in refs))
            return take(self, full)

        hp_compile.state.ParamState.take = counting  # type: ignore[method-assign]
        hp_compile.shard(model, mesh, POLICY)
    finally:
        hp_compile.state.ParamState.take = take  # type: ignore[method-assign]
        gc.enable()
    assert alive == list(range(len(refs), 0, -1))


def test_buffers_shared_between_modules_stay_shared() -> None:
    from hp_compile.convert import move_buffers

    model = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
    first, second = model
    second._buffers["running_mean"] = first._buffers["running_mean"]
    move_buffers(model, torch.device("meta"))  # stands for an accelerator
    assert all(b.is_meta for b in model.buffers())
    assert first.running_mean is second.running_mean
    assert first.running_var is not second.running_var


def test_home_of_offloaded_shards() -> None:
    from hp_compile.state import Home

    gpu, cpu = torch.device("cuda", 3), torch.device("cpu")
    assert Home.of(gpu, hp_compile.OffloadPolicy()) == Home(gpu, False, False)
    assert Home.of(gpu, hp_compile.OffloadPolicy()).storage == gpu
    assert Home.of(gpu, hp_compile.CPUOffloadPolicy()) == Home(gpu, True, True)
    assert Home.of(gpu, hp_compile.CPUOffloadPolicy(pin_memory=False)) == Home(gpu, True, False)
    assert Home.of(gpu, hp_compile.CPUOffloadPolicy()).storage == cpu
    assert Home.of(cpu, hp_compile.CPUOffloadPolicy()) == Home(cpu, True, False)


# ------------------------------------------------------------------ changes after shard


def test_replaced_parameters_and_modules_are_noticed(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 6)
    model = sharded("uneven", mesh)
    model.layers[0].weight = nn.Parameter(torch.zeros(10, 6))
    with pytest.raises(PlacementError, match=r"layers\.0\.weight: the module now holds Parameter"):
        model(x)
    model = sharded("uneven", mesh)
    model.layers[1] = nn.Linear(10, 7)
    with pytest.raises(PlacementError, match=r"layers\.1\.weight, layers\.1\.bias: added, removed"):
        model(x)
    model = sharded("uneven", mesh)
    model.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(PlacementError, match=r"extra: added, removed or replaced after shard"):
        model.plan(x)


def test_meta_parameters_and_moved_ones_are_named_at_the_first_call(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model: Any = CASES["uneven"].factory()
    hp_compile.shard(model, mesh, POLICY)
    with pytest.raises(PlacementError, match=r"layers\.0\.weight, .*8 in all.*still on the meta"):
        model(torch.randn(4, 6))
    with pytest.raises(PlacementError, match="still on the meta"):
        model.unshard()
    model.to_empty(device="cpu")
    for param in model.parameters():
        local = param._local_tensor
        assert local.storage_offset() == 0 and not local.is_meta
        plan = next(p for n, p in model.plan().params.items() if model.get_parameter(n) is param)
        rest = plan.shape[1] if len(plan.shape) > 1 else 1
        assert local.untyped_storage().nbytes() == plan.padded_rows * rest * 4
    model.to("meta")
    with pytest.raises(PlacementError, match="still on the meta"):
        model(torch.randn(4, 6))


def test_tied_parameters_stay_tied(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model: Any = CASES["tied"].factory()
    hp_compile.shard(model, mesh, POLICY)
    assert model.first.weight is model.second.weight
    model.to_empty(device="cpu")
    assert model.first.weight is model.second.weight
    full = CASES["tied"].make(1).state_dict()
    for assign in (False, True):
        model.load_state_dict(full, assign=assign)
        assert model.first.weight is model.second.weight
    half = model.half()
    assert half.first.weight is half.second.weight and half.first.weight.dtype == torch.float16
    model.second.load_state_dict({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, assign=True)
    assert model.first.weight is model.second.weight
    assert bool((model.first.weight._local_tensor == 1).all())
    assert set(model.plan().params) == {n for n, _ in model.named_parameters()}


def test_freezing_and_casting_change_the_plan(mesh: DeviceMesh) -> None:
    model = sharded("uneven", mesh)
    x = torch.randn(4, 6)
    before = model.plan(x)
    model.layers[0].requires_grad_(False)
    frozen = model.plan(x)
    assert frozen.params["layers.0.weight"].reduction == "none"
    assert "frozen" in frozen.params["layers.0.weight"].reason
    plain = CASES["uneven"].make()
    plain.layers[0].requires_grad_(False)  # type: ignore[index,union-attr]
    assert hp_compile.plan(plain, mesh, POLICY, args=(x,)).dump() == frozen.dump()
    model.layers[0].requires_grad_(True)
    assert model.plan(x).dump() == before.dump()
    model.half()
    half = model.plan(x.half())
    assert (
        half.dump()
        == hp_compile.plan(plain.requires_grad_().half(), mesh, POLICY, args=(x.half(),)).dump()
    )
    assert all(p.dtype == torch.float16 for p in half.params.values())


def test_order_of_the_state_dict_with_ignored_parameters(mesh: DeviceMesh) -> None:
    model: Any = CASES["uneven"].make()
    by_object = model.layers[0].bias
    policy = Policy(ignored_params=["layers.1.*", by_object], backend="aot_eager")
    hp_compile.shard(model, mesh, policy)
    plain = ["layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert [n for n, p in model.named_parameters() if not isinstance(p, DTensor)] == plain
    assert model.layers[0].bias is by_object
    assert list(model.state_dict()) == list(CASES["uneven"].make().state_dict())
    assert [model.plan().params[n].reduction for n in plain] == ["none"] * 3


def test_build_is_deterministic() -> None:
    """The models of these tests start equal, so comparing a sharded one with a second one is fair."""
    a, b = build(UnevenMLP), build(UnevenMLP)
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert collections.Counter(type(m) for m in a.modules())[nn.Linear] == 4
