"""State under tensor parallelism: what loads, checkpoints from mesh to mesh, norms, replicas, groups inside the shard dim."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import hp_compile
from hp_compile import HPCompileError, Policy
from hyper_parallel.tensor_parallel import TensorParallelStyle
from tests import all_ranks
from tests.baselines import full, full_weights
from tests.dist_pool import fake_world, run_ranks
from tests.distributed.test_state_dict import assert_equal_state, kinds_of_entries
from tests.distributed.test_tensor_parallel import MEGATRON, SEQUENCE, VOCABULARY, PackedBlock
from tests.models import CASES, LMConfig, ModelCase, TransformerLM, lm_batch, lm_loss

SHARD_TP = ("dp_shard", "tp")
# 30 tokens over tp are 15 rows a rank, which FSDP cuts unevenly; head and embedding are one parameter.
SMALL = LMConfig(dim=16, heads=4, hidden=24, blocks=1, vocab=30, max_length=12, tied=True)
LM = ModelCase(
    name="lm_small",
    factory=functools.partial(TransformerLM, SMALL),
    batch=functools.partial(lm_batch, vocab=SMALL.vocab),
    loss=lm_loss,
)
PACKED = ModelCase(name="packed", factory=PackedBlock)
PACKED_PLAN = {
    "gate_up": TensorParallelStyle(name="gate_up", weight="packed_colwise", blocks=2),
    "down": "rowwise",
}


def shard(
    case: ModelCase, shape: tuple[int, ...], names: tuple[str, ...], seed: int = 0, **fields: Any
) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return hp_compile.shard(case.make(seed), mesh, Policy(backend="aot_eager", **fields))


# ------------------------------------------------------------------ what it holds, what loads


def load_kinds(rank: int, world_size: int) -> None:
    for case, plan in ((LM, VOCABULARY), (PACKED, PACKED_PLAN)):
        model = shard(case, (2, 2), SHARD_TP, tp_plan=plan)
        assert_equal_state(model, case.make().state_dict(), case.name)
        plans = model.plan().params
        state = model.state_dict()
        assert all(state[n].placements == p.placements for n, p in plans.items())
        seed = 1
        for kind, make in kinds_of_entries(model).items():
            for assign in (False, True):
                seed += 1
                plain = case.make(seed)
                if kind in ("own layout", "local shards"):  # torch cannot cut all of these itself
                    other = shard(case, (2, 2), SHARD_TP, seed=seed, tp_plan=plan).state_dict()
                    local = kind == "local shards"
                    entries = {n: v.to_local() if local else v for n, v in other.items()}
                else:
                    entries = {n: make(n, v) for n, v in plain.state_dict().items()}
                model.load_state_dict(entries, assign=assign)
                assert_equal_state(model, plain.state_dict(), f"{case.name}, {kind}, {assign}")
        before = full_weights(model)
        name = next(n for n, p in plans.items() if any(map(is_cut, p.placements)))
        wrong = {n: torch.zeros_like(v) for n, v in plain.state_dict().items()}
        wrong[name] = torch.zeros(plans[name].local_shape)  # a tp rank's part is no shard
        with pytest.raises(ValueError, match=r"expected the full shape .* or, for a plain tensor"):
            model.load_state_dict(wrong)
        assert all(torch.equal(v, before[n]) for n, v in full_weights(model).items())
    inputs, _ = LM.batch(0, 0)
    model = shard(LM, (2, 2), SHARD_TP, seed=5, tp_plan=VOCABULARY)
    model(inputs)  # a program exists, and reads what is loaded after it
    model.load_state_dict(LM.make(6).state_dict())
    torch.testing.assert_close(model(inputs), LM.make(6)(inputs))
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(HPCompileError, match=r"cannot be (deep-copied|copied|pickled)"):
            attempt(model)


def is_cut(placement: Any) -> bool:
    return not isinstance(placement, Replicate)


@pytest.mark.dist
def test_every_kind_of_entry_loads() -> None:
    run_ranks(load_kinds, 4, timeout=400)


# ------------------------------------------------------------------ checkpoints

# Mesh and plan by label; four batches make a step on all of them.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any]] = {
    "dp×tp": ((2, 2), SHARD_TP, VOCABULARY),
    "tp×dp": ((2, 2), ("tp", "dp_shard"), MEGATRON),
    "eight": ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), VOCABULARY),
    "dp": ((4,), ("dp_shard",), None),
    "hybrid": ((2, 2), ("dp_replicate", "dp_shard"), None),
    "tp": ((2,), ("tp",), SEQUENCE),
    "three": ((3,), ("dp_shard",), None),
    "one": ((1,), ("dp_shard",), None),
}


def on_mesh(label: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    shape, names, plan = MESHES[label]
    model = shard(LM, shape, names, seed, tp_plan=plan)
    # AdamW makes a step of about lr out of any gradient, so rounding errors grow with it.
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(model: nn.Module, optimizer: Any, pieces: slice, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = (value[pieces] for value in LM.joined_batch(4, step))
        loss = LM.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pieces(label: str, model: Any) -> slice:
    """This rank's rows of the step's eight; all of them where the data ranks do not divide them."""
    shape, names, _ = MESHES[label]
    at, count = 0, 1
    coordinate = next(model.parameters()).device_mesh.get_coordinate()
    for size, name, index in zip(shape, names, coordinate, strict=True):
        if name != "tp":
            at, count = at * size + index, count * size
    return slice(None) if 8 % count else slice(8 // count * at, 8 // count * (at + 1))


def save(rank: int, world_size: int, label: str, folder: str) -> list[float]:
    model, optimizer = on_mesh(label, seed=0)
    losses = train(model, optimizer, pieces(label, model), range(2))
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)
    return losses


def go_on(
    rank: int, world_size: int, labels: list[str], folder: str
) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for label in labels:
        model, optimizer = on_mesh(label, seed=5)
        state, moments = get_state_dict(model, optimizer)
        whole = {"model": state, "optimizer": moments}
        dcp.load(whole, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state, optim_state_dict=whole["optimizer"]
        )
        losses = train(model, optimizer, pieces(label, model), range(2, 4))
        found[label] = losses, full_weights(model)
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("dp×tp", {1: ["one"]}),
        pytest.param("one", {4: ["dp×tp"]}, marks=pytest.mark.slow),
        pytest.param(
            "dp×tp",
            {4: ["dp×tp", "tp×dp", "dp", "hybrid"], 2: ["tp"], 3: ["three"]},
            marks=pytest.mark.slow,
        ),
        pytest.param("dp", {4: ["dp×tp", "tp×dp"]}, marks=pytest.mark.slow),
        pytest.param("hybrid", {4: ["dp×tp"]}, marks=pytest.mark.slow),
        pytest.param("tp", {4: ["dp×tp"], 1: ["one"]}, marks=pytest.mark.slow),
        pytest.param("three", {4: ["dp×tp"], 2: ["tp"]}, marks=pytest.mark.slow),
        pytest.param(
            "eight", {4: ["dp×tp", "dp"], 3: ["three"], 1: ["one"]}, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "to one",
        "from one",
        "to others",
        "from dp",
        "from hybrid",
        "from tp",
        "from three",
        "from eight",
    ],
)
def test_checkpoints_go_from_mesh_to_mesh(
    source: str, targets: dict[int, list[str]], tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    dense = LM.make()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=2e-3)
    expected = train(dense, optimizer, slice(None), range(4))
    first = run_ranks(save, math.prod(MESHES[source][0]), source, folder, timeout=400)
    assert_losses(first, expected[:2])
    for world_size, labels in targets.items():
        results = run_ranks(go_on, world_size, labels, folder, timeout=600)
        for label in labels:
            assert_losses([ranks[label][0] for ranks in results], expected[2:])
            for ranks in results:
                for fqn, param in dense.named_parameters():
                    torch.testing.assert_close(
                        ranks[label][1][fqn],
                        param.detach(),
                        rtol=2e-5,
                        atol=2e-6,
                        msg=lambda m, fqn=fqn, label=label: f"{label}: {fqn}: {m}",
                    )


def assert_losses(by_rank: list[list[float]], expected: list[float]) -> None:
    # The ranks of tp have equal losses, so that the mean over all ranks is the mean over the data.
    mean = [sum(values) / len(by_rank) for values in zip(*by_rank, strict=True)]
    assert mean == pytest.approx(expected, rel=1e-5)


def refused(rank: int, world_size: int, folder: str) -> None:
    dcp.save({"model": PACKED.make(3).state_dict()}, checkpoint_id=folder)
    model = shard(PACKED, (2,), ("tp",), tp_plan=PACKED_PLAN)
    before = full_weights(model)
    message = r"gate_up\.\w+: tensor parallelism cuts every block of this packed weight"
    for attempt in (
        lambda: dcp.load({"model": model.state_dict()}, checkpoint_id=folder),
        lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=folder + "2"),
        lambda: dcp.save({"model": get_state_dict(model, ())[0]}, checkpoint_id=folder + "2"),
    ):
        with pytest.raises(CheckpointException, match=message):
            attempt()
    assert all(torch.equal(v, before[n]) for n, v in full_weights(model).items())
    # Full state dicts have no ranges.
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(v, before[n]) for n, v in whole.items())
    model.load_state_dict(PACKED.make(3).state_dict())
    assert_equal_state(model, PACKED.make(3).state_dict(), "full")


@pytest.mark.dist
def test_packed_weights_are_refused_by_checkpoints_not_garbled(tmp_path: Path) -> None:
    run_ranks(refused, 2, str(tmp_path / "checkpoint"))


# ------------------------------------------------------------------ norms, replicas


def norms(rank: int, world_size: int) -> list[float]:
    """Parameters that tp cuts, that it leaves whole with partial gradients, and a packed one."""
    found = []
    for case, plan in ((LM, SEQUENCE), (PACKED, PACKED_PLAN)):
        dense, model = case.make(), shard(case, (2, 2), SHARD_TP, tp_plan=plan)
        for net, (inputs, targets) in (
            (model, batch(case, rank // 2)),
            (dense, tuple(torch.cat(v) for v in zip(batch(case, 0), batch(case, 1), strict=True))),
        ):
            loss(case, net(inputs), targets).backward()
        kinds = {p.placements for p in model.parameters()}
        assert len(kinds) > 2, kinds
        saved = {n: p.grad.clone() for n, p in model.named_parameters()}
        wanted = {n: p.grad.clone() for n, p in dense.named_parameters()}
        for p in (1.0, 2.0, 3.0, math.inf):
            expected = nn.utils.get_total_norm(list(wanted.values()), p)
            total = hp_compile.get_total_norm(list(saved.values()), p)
            torch.testing.assert_close(total, expected, rtol=5e-6, atol=0)
            for net, grads in ((model, saved), (dense, wanted)):
                for name, param in net.named_parameters():
                    param.grad = grads[name].clone()
            limit = expected.item() / 3
            clipped = hp_compile.clip_grad_norm_(model.parameters(), limit, p)
            nn.utils.clip_grad_norm_(dense.parameters(), limit, p)
            assert torch.equal(clipped, total)
            found.append(clipped.item())
            for name, param in model.named_parameters():
                torch.testing.assert_close(
                    full(param.grad), dense.get_parameter(name).grad, rtol=2e-5, atol=2e-6
                )
    return found


def batch(case: ModelCase, rank: int) -> tuple[Tensor, Tensor]:
    inputs, targets = case.batch(rank, 0)
    return inputs, targets


def loss(case: ModelCase, output: Tensor, targets: Tensor) -> Tensor:
    return case.loss(output, targets)


@pytest.mark.dist
def test_norms_equal_the_dense_ones_on_every_rank() -> None:
    results = run_ranks(norms, 4, timeout=400)
    assert all(values == results[0] for values in results)


def synced(rank: int, world_size: int) -> None:
    for shape, names, replica in (
        ((2, 2), ("dp_replicate", "tp"), rank // 2),
        ((2, 2), ("tp", "dp_replicate"), rank % 2),
    ):
        for sync, seed in ((True, 0), (False, replica)):
            model = shard(LM, shape, names, seed=replica, tp_plan=VOCABULARY, sync_weights=sync)
            assert_equal_state(model, LM.make(seed).state_dict(), f"{names}, sync={sync}")


@pytest.mark.dist
def test_replicas_start_from_the_first_one() -> None:
    run_ranks(synced, 4)


# ------------------------------------------------------------------ groups inside the shard dim


@pytest.mark.slow
@pytest.mark.parametrize("plan", [VOCABULARY, SEQUENCE], ids=["vocabulary", "sequence"])
def test_resharding_to_a_smaller_group_inside_dp(plan: dict[str, Any]) -> None:
    case = CASES["lm"]
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=SHARD_TP)
        policy = Policy(backend="aot_eager", tp_plan=plan, reshard_after_forward=2)
        module = case.make()
        found = hp_compile.plan(module, mesh, policy, args=case.batch(0, 0)[:1])
        found.verify()
        gathers = {c.ranks for c in found.collectives if c.purpose == "unshard"}
        assert gathers == {(0, 2, 4, 6), (0, 2)}
        all_ranks.run(
            module, found, lambda group: case.batch(group, 0)[:1], lambda m, x: [m(x)]
        ).check()
