"""State dicts and checkpoints: round trips, other layouts, and exchange with PyTorch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import hp_compile
from hyper_parallel import (
    PlacementError,
    Policy,
    fully_shard,
    get_model_state_dict,
    set_model_state_dict,
)
from tests.baselines import TrainOptions, full, shard_with_fsdp2
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, BatchNormNet, FrozenNet, build

NAMES = ["uneven", pytest.param("lm_tied", marks=pytest.mark.slow), "scalar"]


def round_trip(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    case = CASES["uneven"]
    plain = case.make(1).state_dict()
    model = case.make()
    shard(model, case, TrainOptions(mesh_shape=shape))
    layouts = {k: (v.placements, v.to_local().shape) for k, v in model.state_dict().items()}
    held = dict(model.named_parameters())
    model.load_state_dict(plain)  # full plain tensors
    for source in ("dtensor", "local", "full"):
        saved = model.state_dict()
        assert list(saved) == list(plain)
        for key, value in saved.items():
            assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), plain[key])
            assert (value.placements, value.to_local().shape) == layouts[key]
        values: dict[str, Tensor] = {
            "dtensor": lambda v: v.clone(),
            "local": lambda v: v.to_local().clone(),
            "full": lambda v: v.full_tensor().clone(),
        }[source]
        values = {key: values(value) for key, value in saved.items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(values, assign=source == "full")
        if source != "full":
            assert all(param is held[name] for name, param in model.named_parameters())
    inputs, targets = case.batch(rank, 0)
    case.loss(model(inputs), targets).backward()
    assert all(param.grad is not None for param in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(full(value), plain[key])
    wrong = dict(plain)
    wrong["layers.0.weight"] = torch.zeros(3, 3)
    with pytest.raises(PlacementError, match=r"layers\.0\.weight.*\(3, 3\).*\(10, 6\).*slice"):
        model.load_state_dict(wrong)


@pytest.mark.dist
@pytest.mark.parametrize(("world", "shape"), [(1, (1,)), (2, (2,)), (3, (3,)), (4, (2, 2))])
def test_round_trip_of_dtensors_slices_and_full_tensors(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(round_trip, world, shape)


def live(rank: int, world_size: int) -> None:
    """A state dict is live before and after the first forward, and while unsharded."""
    case = CASES["uneven"]
    model = case.make()
    sharded = shard(model, case, TrainOptions(reshard_after_forward=False))
    saved = model.state_dict()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    assert all((full(value) == 2).all() for value in saved.values())
    inputs, targets = case.batch(rank, 0)
    loss = case.loss(model(inputs), targets)
    assert not isinstance(model.layers[0].weight, DTensor)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert isinstance(model.layers[0].weight, DTensor), "saving registers the slices"
    del loss
    sharded.unshard()
    model.load_state_dict({key: torch.full_like(full(v), 3.0) for key, v in saved.items()})
    assert all((full(value) == 3).all() for value in saved.values())
    with torch.no_grad():
        model(inputs)


@pytest.mark.dist
def test_state_dict_is_live() -> None:
    run_ranks(live, 2)


def full_options(rank: int, world_size: int) -> None:
    plain = build(FrozenNet)
    model = build(FrozenNet)
    fully_shard(model.outer, mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    expected = plain.state_dict()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert list(whole) == list(expected)
    for key, value in whole.items():
        assert not isinstance(value, DTensor) and torch.equal(value, expected[key])
    plain.load_state_dict(whole)
    sharded = get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for value in sharded.values())
    offloaded = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert list(offloaded) == (list(expected) if rank == 0 else [])
    trained = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    )
    kept = [n for n, p in plain.named_parameters() if p.requires_grad]
    assert list(trained) == kept and "base.weight" not in trained
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    changed = {key: value + 1 for key, value in trained.items()}
    set_model_state_dict(model, changed, options=options)
    for key, value in model.state_dict().items():
        assert torch.equal(full(value), changed.get(key, expected[key]))
    with pytest.raises(RuntimeError, match="Missing key"):
        set_model_state_dict(model, changed)
    result = set_model_state_dict(model, changed, options=StateDictOptions(strict=False))
    assert set(result.missing_keys) == set(expected) - set(kept)


@pytest.mark.dist
def test_options_of_get_and_set() -> None:
    run_ranks(full_options, 2)


def broadcast(rank: int, world_size: int, meta: bool) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    source = build(BatchNormNet, seed=3)
    source.norm.num_batches_tracked.fill_(7)
    expected = {key: value.clone() for key, value in source.state_dict().items()}
    with torch.device("meta" if meta else "cpu"):
        model = build(BatchNormNet)
    model.inner.bias.requires_grad_(False)
    fully_shard(model.norm, mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    with count_collectives() as calls:
        set_model_state_dict(model, source.state_dict() if rank == 0 else {}, options=options)
    assert calls.kinds()["broadcast"] >= len(expected)
    for key, value in model.state_dict().items():
        assert torch.equal(full(value), expected[key]), key
    assert not model.inner.bias.requires_grad and model.outer.bias.requires_grad
    model(torch.ones(2, 6)).sum().backward()
    assert model.inner.bias.grad is None and model.outer.bias.grad is not None
    bad = {**source.state_dict(), "outer.weight": torch.zeros(2, 2)} if rank == 0 else {}
    with pytest.raises(PlacementError, match=r"outer\.weight: cannot load .*\(2, 2\).*\(5, 8\)"):
        set_model_state_dict(model, bad, options=options)


@pytest.mark.dist
@pytest.mark.parametrize("meta", [False, True])
def test_broadcast_from_rank_0(meta: bool) -> None:
    run_ranks(broadcast, 2, meta)


def wrap(kind: str, name: str, shape: tuple[int, ...], seed: int) -> nn.Module:
    case = CASES[name]
    model = case.make(seed)
    options = TrainOptions(mesh_shape=shape)
    if kind == "stock":
        shard_with_fsdp2(model, case, options)
    elif kind == "eager":
        shard(model, case, options)
    elif kind == "compiled":
        hp_compile.shard(model, data_mesh(shape), Policy(backend="aot_eager"))
    return model


def train_steps(model: nn.Module, name: str, rank: int, optimizer: Any, steps: int) -> None:
    case = CASES[name]
    for index in range(steps):
        inputs, targets = case.batch(rank, index)
        case.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return full weights and full Adam moments by name."""
    found = {name: full(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found[f"{name}:{key}"] = full(optimizer.state[param][key])
    return found


def save(
    rank: int, world_size: int, kind: str, name: str, shape: tuple[int, ...], path: str
) -> dict[str, Tensor]:
    model = wrap(kind, name, shape, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, name, rank, optimizer, 2)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    return everything(model, optimizer)


def load(
    rank: int, world_size: int, kind: str, name: str, shape: tuple[int, ...], path: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = wrap(kind, name, shape, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    loaded = everything(model, optimizer)
    train_steps(model, name, rank, optimizer, 1)
    return loaded, everything(model, optimizer)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("uneven", "eager", "stock"),
        ("uneven", "stock", "eager"),
        ("lm_tied", "eager", "stock"),
        ("lm_tied", "stock", "eager"),
    ],
)
def test_checkpoints_exchange_with_fsdp2(
    name: str, source: str, target: str, tmp_path: Path
) -> None:
    saved = run_ranks(save, 2, source, name, (2,), str(tmp_path))
    same = run_ranks(load, 2, source, name, (2,), str(tmp_path))
    other = run_ranks(load, 2, target, name, (2,), str(tmp_path))
    for rank in range(2):
        assert_equal(other[rank][0], saved[0])
        assert_equal(other[rank][1], same[0][1])


@pytest.mark.dist
@pytest.mark.parametrize(("source", "target"), [("eager", "compiled"), ("compiled", "eager")])
@pytest.mark.parametrize("name", ["uneven", pytest.param("lm_tied", marks=pytest.mark.slow)])
def test_checkpoints_exchange_with_the_compiled_path(
    name: str, source: str, target: str, tmp_path: Path
) -> None:
    saved = run_ranks(save, 2, source, name, (2,), str(tmp_path))
    for loaded, _ in run_ranks(load, 2, target, name, (2,), str(tmp_path)):
        assert_equal(loaded, saved[0])


@pytest.mark.dist
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_load_on_other_meshes(name: str, tmp_path: Path) -> None:
    saved = run_ranks(save, 4, "eager", name, (2, 2), str(tmp_path))
    for world, shape in [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2))]:
        for loaded, _ in run_ranks(load, world, "eager", name, shape, str(tmp_path)):
            assert_equal(loaded, saved[0])


@pytest.mark.dist
def test_a_plain_checkpoint_loads_directly(tmp_path: Path) -> None:
    saved = run_ranks(save, 1, "plain", "uneven", (1,), str(tmp_path))
    for loaded, _ in run_ranks(load, 2, "eager", "uneven", (2,), str(tmp_path)):
        assert_equal(loaded, saved[0])
