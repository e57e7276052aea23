"""Bad input of `shard` and `load_state_dict`: a clear error, and the model is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hp_compile
from hp_compile import HPCompileError, MeshError, PlacementError, Policy, PolicyError
from hyper_parallel import hsdp
from tests.dist_pool import fake_world, run_ranks
from tests.models import CASES, UnevenMLP, build

POLICY = Policy(backend="aot_eager")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(4, rank=1):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))


def plain() -> Any:
    return build(UnevenMLP)


def with_gradient() -> Any:
    model = plain()
    model.layers[1].bias.grad = torch.ones(7)
    return model


def with_hook() -> Any:
    model = plain()
    model.layers[1].bias.register_post_accumulate_grad_hook(lambda p: None)
    return model


def with_tensor_hook() -> Any:
    model = plain()
    model.layers[0].weight.register_hook(lambda g: g)
    return model


def partly_on_meta() -> Any:
    model = plain()
    model.layers[2].to("meta")
    return model


def with_meta_buffer() -> Any:
    model = plain()
    model.register_buffer("table", torch.empty(3, device="meta"))
    return model


def sparse() -> Any:
    model = plain()
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    return model


def lazy() -> Any:
    model = plain()
    model.late = nn.LazyLinear(3)
    return model


def torch_compiled() -> Any:
    model = plain()
    model.compile(backend="eager")
    return model


def wrong_answer(param: Tensor) -> Any:
    return "rows"


def no_such_dim(param: Tensor) -> Any:
    return Shard(1)


# name: how the model is made, the policy, the error and its text
CASES_OF_SHARD: dict[str, tuple[Callable[[], Any], Any, type, str]] = {
    "gradient": (
        with_gradient,
        POLICY,
        HPCompileError,
        r"layers\.1\.bias: has a gradient.*zero_grad",
    ),
    "hook": (
        with_hook,
        POLICY,
        HPCompileError,
        r"layers\.1\.bias: has a gradient hook.*after shard",
    ),
    "tensor_hook": (
        with_tensor_hook,
        POLICY,
        HPCompileError,
        r"layers\.0\.weight: has a gradient hook",
    ),
    "meta": (
        partly_on_meta,
        POLICY,
        PlacementError,
        r"partly on the meta device: layers\.2\.weight, layers\.2\.bias on meta, but "
        r"layers\.0\.weight, layers\.0\.bias, .*6 in all.*on cpu; build all of it on meta",
    ),
    "meta_buffer": (with_meta_buffer, POLICY, PlacementError, r"meta device: table on meta"),
    "sparse": (sparse, POLICY, PlacementError, r"table: layout torch\.sparse_coo; only dense"),
    "lazy": (lazy, POLICY, PlacementError, r"late\.weight, late\.bias: not initialised yet"),
    "compiled": (
        torch_compiled,
        POLICY,
        HPCompileError,
        r"UnevenMLP is compiled by torch\.compile",
    ),
    "policy_type": (
        plain,
        {"units": "auto"},
        PolicyError,
        r"expected an hp_compile\.Policy, got dict",
    ),
    "units": (plain, Policy(units=["blocks.*"]), PolicyError, r"'blocks\.\*' matches no module"),
    "ignored": (plain, Policy(ignored_params=["*.gamma"]), PolicyError, r"'\*\.gamma' matches no"),
    "divisor": (
        plain,
        Policy(reshard_after_forward=3),
        PolicyError,
        r"3 does not divide the shard axis of 4 ranks \(dp_shard\(4\)\); choose one of \[1, 2, 4\]",
    ),
    "placement_type": (
        plain,
        Policy(shard_placement_fn=wrong_answer),
        PlacementError,
        r"layers\.0\.weight: shard_placement_fn returned 'rows' of type str; expected Shard",
    ),
    "placement_dim": (
        plain,
        Policy(shard_placement_fn=no_such_dim),
        PlacementError,
        r"layers\.0\.bias: Shard\(1\) names no dim of shape \(10,\)",
    ),
    "roles": (plain, Policy(roles={"shard": "fsdp"}), MeshError, r"fsdp"),
    "tp_plan": (plain, Policy(tp_plan={"layers.*": "colwise"}), PolicyError, r"Policy\.tp_plan"),
}


def snapshot(model: nn.Module) -> Any:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {
        n: t if t.is_meta or t.is_sparse else copy.deepcopy(t.detach())
        for n, t in tensors.items()
        if not torch.nn.parameter.is_lazy(t)
    }
    return type(model), {n: id(t) for n, t in tensors.items()}, values


def assert_unchanged(model: nn.Module, before: Any) -> None:
    kind, ids, values = snapshot(model)
    assert kind is before[0] and ids == before[1]
    for name, value in values.items():
        if not (value.is_meta or value.is_sparse):
            assert torch.equal(value, before[2][name]), name
    assert not model._load_state_dict_pre_hooks and "_hp_runtime" not in vars(model)


@pytest.mark.parametrize("name", CASES_OF_SHARD)
def test_shard_refuses_before_touching_the_model(mesh: DeviceMesh, name: str) -> None:
    make, policy, error, text = CASES_OF_SHARD[name]
    model = make()
    before = snapshot(model)
    with pytest.raises(error, match=f"(?s){text}") as caught:
        hp_compile.shard(model, mesh, policy)
    assert isinstance(caught.value, HPCompileError)
    assert_unchanged(model, before)
    if make is plain:  # it still runs, and can still be sharded
        x = torch.randn(3, 6)
        assert torch.equal(model(x), plain()(x))
        assert hp_compile.shard(model, mesh, POLICY) is model


def test_shard_refuses_wrong_types_and_sharded_models(mesh: DeviceMesh) -> None:
    with pytest.raises(HPCompileError, match=r"model: expected an nn\.Module, got list"):
        hp_compile.shard([plain()], mesh)  # type: ignore[arg-type]
    model = plain()
    with pytest.raises(MeshError, match="mesh: expected a DeviceMesh, got tuple"):
        hp_compile.shard(model, (2, 2))  # type: ignore[arg-type]
    hp_compile.shard(model, mesh, POLICY)
    params = list(model.parameters())
    with pytest.raises(HPCompileError, match=r"ShardedUnevenMLP is already sharded.*Build a new"):
        hp_compile.shard(model, mesh, POLICY)
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    outer = nn.Sequential(model)
    with pytest.raises(PlacementError, match=r"0\.layers\.0\.weight, .*: already a DTensor"):
        hp_compile.shard(outer, mesh, POLICY)
    assert type(outer) is nn.Sequential
    for wrap in (fully_shard, hsdp):
        model = plain()
        wrap(model, mesh=mesh)
        with pytest.raises(PlacementError, match=r"already a DTensor.*instead of calling parallel"):
            hp_compile.shard(model, mesh, POLICY)
    model = plain()
    model.layers[0].weight = nn.Parameter(distribute_tensor(torch.ones(10, 6), mesh, [Replicate()]))
    with pytest.raises(PlacementError, match=r"^layers\.0\.weight: already a DTensor"):
        hp_compile.shard(model, mesh, POLICY)


def test_a_class_that_cannot_be_extended_is_refused(mesh: DeviceMesh) -> None:
    class Slotted(UnevenMLP):
        __slots__ = ("extra",)

        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise TypeError("no subclasses")

    model = build(Slotted)
    before = snapshot(model)
    with pytest.raises(HPCompileError, match=r"class Slotted cannot be extended.*no subclasses"):
        hp_compile.shard(model, mesh, POLICY)
    assert_unchanged(model, before)
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(HPCompileError, match="TorchScript module, which cannot be captured"):
        hp_compile.shard(scripted, mesh, POLICY)


def test_a_failure_while_groups_are_made_leaves_the_model_plain(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain()
    before = snapshot(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("no group")

    monkeypatch.setattr(hp_compile.convert, "get_group_info", fail)
    with pytest.raises(RuntimeError, match="no group"):
        hp_compile.shard(model, mesh, POLICY)
    assert_unchanged(model, before)


def test_an_optimizer_from_before_is_found(mesh: DeviceMesh) -> None:
    model, other = plain(), plain()
    mine = torch.optim.AdamW(model.parameters())
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    ids = [id(p) for p in theirs.param_groups[0]["params"]]
    before = snapshot(model)
    with pytest.raises(
        HPCompileError, match=r"AdamW holds layers\.0\.weight.*8 in all.*after shard"
    ):
        hp_compile.shard(model, mesh, POLICY)
    assert_unchanged(model, before)
    del mine  # the scheduler cycle of an optimizer may wait for the collector: shard calls it
    hp_compile.shard(model, mesh, POLICY)
    assert [id(p) for p in theirs.param_groups[0]["params"]] == ids
    assert all(
        p is q for p, q in zip(theirs.param_groups[0]["params"], other.parameters(), strict=True)
    )


def test_devices_that_cannot_be_moved_from_are_named() -> None:
    from hp_compile.check import check_parameters

    class Elsewhere:
        """A parameter on an accelerator, which this machine does not have."""

        def __init__(self, device: str) -> None:
            self.device = torch.device(device)
            self.is_meta, self.grad = False, None
            self._backward_hooks = None

    class Model:
        def named_parameters(self) -> list[tuple[str, Any]]:
            return [("a", Elsewhere("cpu")), ("b", Elsewhere("cuda:1")), ("c", Elsewhere("xpu:0"))]

        def named_buffers(self) -> list[tuple[str, Any]]:
            return [("d", Elsewhere("cuda:0"))]

    class NotIgnored:
        ignored = False

    plans: Any = dict.fromkeys("abc", NotIgnored())
    with pytest.raises(PlacementError, match=r"^b, c: on cuda:1, but this rank's device .* cuda:0"):
        check_parameters(Model(), plans, torch.device("cuda", 0))  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match=r"^b, c, d: on cuda:1, but .* is cpu"):
        check_parameters(Model(), plans, torch.device("cpu"))  # type: ignore[arg-type]


def half_of_the_world(rank: int, world_size: int) -> str:
    mesh = DeviceMesh("cpu", torch.arange(world_size // 2), mesh_dim_names=("dp_shard",))
    model = CASES["uneven"].make()
    before = snapshot(model)
    if rank < world_size // 2:
        hp_compile.shard(model, mesh, POLICY)
        return "sharded"
    with pytest.raises(MeshError) as error:
        hp_compile.shard(model, mesh, POLICY)
    assert_unchanged(model, before)
    return str(error.value)


@pytest.mark.dist
def test_rank_outside_the_mesh() -> None:
    results = run_ranks(half_of_the_world, 2)
    assert results[0] == "sharded"
    assert "rank 1" in results[1] and "not in" in results[1], results[1]


# ------------------------------------------------------------------ loading


def test_wrong_shapes_are_refused_before_anything_is_loaded(mesh: DeviceMesh) -> None:
    model: Any = hp_compile.shard(plain(), mesh, Policy(ignored_params=["layers.1.bias"]))
    before = {n: copy.deepcopy(t) for n, t in model.state_dict().items()}
    good = {n: torch.full(p.shape, 7.0) for n, p in plain().named_parameters()}
    other = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("x",))
    wrong: dict[str, tuple[Tensor, str]] = {
        "layers.3.bias": (
            torch.zeros(4),
            r"layers\.3\.bias: the state dict has shape \[4\]; expected the full shape \[5\] or, for a plain tensor, "
            r"this rank's shard \[2\]",
        ),
        "layers.2.weight": (torch.zeros(7, 3), r"shape \[7, 3\]; expected the full shape \[3, 7\]"),
        "layers.1.bias": (
            torch.zeros(2),
            r"layers\.1\.bias: .* expected the full shape \[7\]\. Nothing",
        ),
        "layers.0.weight": (
            distribute_tensor(torch.zeros(3, 6), other, [Replicate()], src_data_rank=None),
            r"layers\.0\.weight: the state dict has shape \[3, 6\]; expected the full shape \[10, 6\]",
        ),
    }
    for name, (value, text) in wrong.items():
        for assign in (False, True):
            with pytest.raises(ValueError, match=text):
                model.load_state_dict({**good, name: value}, assign=assign)
        with pytest.raises(ValueError, match=text):  # the same through a parent
            nn.ModuleDict({"m": model}).load_state_dict(
                {f"m.{n}": v for n, v in {**good, name: value}.items()}
            )
    for name, value in model.state_dict().items():
        local, saved = (getattr(t, "_local_tensor", t) for t in (value, before[name]))
        assert torch.equal(local, saved), name
    with pytest.raises(ValueError, match=r"weight: the state dict has shape \[2\]"):
        model.layers[0].load_state_dict({"weight": torch.zeros(2), "bias": torch.zeros(10)})


def test_missing_and_unexpected_keys_are_those_of_a_plain_module(mesh: DeviceMesh) -> None:
    model: Any = hp_compile.shard(plain(), mesh, POLICY)
    state = {n: torch.full(p.shape, 7.0) for n, p in plain().named_parameters()}
    del state["layers.1.bias"]
    state["layers.9.bias"] = torch.zeros(2)
    state["extra"] = torch.zeros(3)
    expected = plain().load_state_dict(state, strict=False)
    assert model.load_state_dict(state, strict=False) == expected
    with pytest.raises(RuntimeError) as ours:
        model.load_state_dict(state)
    with pytest.raises(RuntimeError) as theirs:
        plain().load_state_dict(state)
    assert str(ours.value).replace("Sharded", "") == str(theirs.value)
    state["extra"] = "no tensor"  # type: ignore[assignment]
    assert model.load_state_dict(state, strict=False) == plain().load_state_dict(
        state, strict=False
    )
