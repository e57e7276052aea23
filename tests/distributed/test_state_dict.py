"""State dicts of a sharded model: what they hold, what loads, also onto another mesh (row 10 of the matrix)."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hp_compile
from hp_compile import Policy
from tests.baselines import full, full_weights
from tests.dist_pool import run_ranks
from tests.models import CASES, ModelCase

pytestmark = pytest.mark.dist
HYBRID = ("dp_replicate", "dp_shard")
POLICY = Policy(backend="aot_eager")
NAMES = ("uneven", "scalar", "tied", "batch_norm")


def sharded(case: ModelCase, shape: tuple[int, ...], seed: int = 0, **fields: Any) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=HYBRID[-len(shape) :])
    return hp_compile.shard(case.make(seed), mesh, Policy(backend="aot_eager", **fields))


def assert_equal_state(model: nn.Module, expected: dict[str, Tensor], what: str) -> None:
    state = model.state_dict()
    assert list(state) == list(expected), what
    for name, value in state.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, expected[name]), f"{what}: {name}"


def assert_same_forward(model: nn.Module, plain: nn.Module, case: ModelCase, rank: int) -> None:
    """The programs read the values that were loaded, so the outputs are those of the plain model."""
    inputs, _ = case.batch(rank, 3)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs), plain.eval()(inputs), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------ what it holds


def hold(rank: int, world_size: int) -> None:
    for name in NAMES:
        case = CASES[name]
        plain, model = case.make(), sharded(case, (2, 2))
        state = model.state_dict()
        assert_equal_state(model, plain.state_dict(), name)
        for fqn, param in plain.named_parameters():
            plan, value = model.plan().params[fqn], state[fqn]
            chunks = param.chunk(2) if param.dim() else [param]
            empty = param[:0] if param.dim() else param
            local = chunks[rank % 2] if param.dim() and rank % 2 < len(chunks) else empty
            local = local if param.dim() else param
            assert value.placements == plan.placements, fqn
            assert value.placements == (Replicate(), Shard(0) if param.dim() else Replicate())
            assert torch.equal(value.to_local(), local), f"{name}: {fqn}: rank {rank}"
            assert value.to_local().shape == plan.shard_shape
        # It is live before the first forward, as that of a plain module.
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        inputs, targets = case.batch(rank, 0)
        before = {n: full(v) for n, v in state.items() if isinstance(v, DTensor)}
        case.loss(model(inputs), targets).backward()
        optimizer.step()
        for fqn in before:
            assert torch.equal(state[fqn].full_tensor(), model.get_parameter(fqn).full_tensor())
            changed = not torch.equal(state[fqn].full_tensor(), before[fqn])
            assert changed == (before[fqn].numel() > 0), fqn
        if name == "batch_norm":
            assert int(state["norm.num_batches_tracked"]) == 1


def test_layout_values_keys_and_liveness() -> None:
    run_ranks(hold, 4, timeout=400)


# ------------------------------------------------------------------ what loads


Maker = Callable[[str, Tensor], Tensor]


def kinds_of_entries(model: Any) -> dict[str, Maker]:
    """Makes the same value into every kind of entry that loads."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = next(model.parameters()).device_mesh

    layout = {n: (p.placements, p.device_mesh) for n, p in model.named_parameters()}

    def placed(on: Any, *placements: Any) -> Maker:
        def make(name: str, value: Tensor) -> Tensor:
            legal = all(not isinstance(p, Shard) or p.dim < value.dim() for p in placements)
            return distribute_tensor(value, on, placements if legal else [Replicate()] * on.ndim)

        return make

    def own(name: str, value: Tensor) -> Tensor:
        if name not in layout:  # the second name of a tied parameter stays a full tensor
            return value
        return distribute_tensor(value, layout[name][1], layout[name][0])

    def local(name: str, value: Tensor) -> Tensor:
        value = own(name, value)
        return value.to_local().clone() if isinstance(value, DTensor) else value

    return {
        "full tensors": lambda name, value: value,
        "same mesh, replicated": placed(mesh, Replicate(), Replicate()),
        "same mesh, other dims": placed(mesh, Shard(1), Shard(0)),
        "same mesh, both on dim 0": placed(mesh, Shard(0), Shard(0)),
        "another mesh": placed(flat, Shard(0)),
        "another 2D mesh": placed(turned, Shard(0), Replicate()),
        "own layout": own,
        "local shards": local,
    }


def load_kinds(rank: int, world_size: int) -> None:
    for name in ("uneven", "scalar", "tied"):
        case = CASES[name]
        model = sharded(case, (2, 2))
        plans = model.plan().params
        seed = 1
        for kind, make in kinds_of_entries(model).items():
            for assign in (False, True):
                seed += 1
                plain = case.make(seed)
                state = {n: make(n, v) for n, v in plain.state_dict().items()}
                params = list(model.parameters())
                model.load_state_dict(state, assign=assign)
                what = f"{name}, {kind}, assign={assign}"
                assert_equal_state(model, plain.state_dict(), what)
                same = [p is q for p, q in zip(model.parameters(), params, strict=True)]
                assert all(same) is (not assign), what
                for fqn, param in model.named_parameters():
                    plan = plans[fqn]
                    room = math.prod(plan.padded_shard_shape) * param.element_size()
                    storage = param._local_tensor.untyped_storage()
                    assert storage.nbytes() == room, f"{what}: {fqn} keeps a larger tensor alive"
                assert_same_forward(model, plain, case, rank)


def test_every_kind_of_entry_loads() -> None:
    run_ranks(load_kinds, 4, timeout=400)


# ------------------------------------------------------------------ checkpoints


def train(model: nn.Module, optimizer: Any, case: ModelCase, batches: Any, steps: range) -> None:
    for step in steps:
        inputs, targets = batches(step)
        case.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # AdamW makes a step of about lr out of any gradient, so rounding errors grow with it.
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def save(rank: int, world_size: int, name: str, folder: str) -> None:
    case = CASES[name]
    model = sharded(case, (2, 2))
    optimizer = adamw(model)
    train(model, optimizer, case, functools.partial(case.batch, rank), range(2))
    state, optimizer_state = get_state_dict(model, optimizer)
    assert list(state) == list(case.make().state_dict())
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_and_go_on(rank: int, world_size: int, name: str, folder: str) -> dict[str, Tensor]:
    case = CASES[name]
    model = sharded(case, (world_size,), seed=5)
    optimizer = adamw(model)
    state, optimizer_state = get_state_dict(model, optimizer)
    whole = {"model": state, "optimizer": optimizer_state}
    dcp.load(whole, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=whole["optimizer"])
    # Four batches for 1 or 3 ranks: every rank trains on all of them, so means agree.
    train(model, optimizer, case, functools.partial(case.joined_batch, 4), range(2, 4))
    return full_weights(model)


@pytest.mark.parametrize("name", ["uneven", "lm_tied"])
@pytest.mark.slow
def test_checkpoint_of_two_by_two_loads_on_three_and_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = str(tmp_path / "checkpoint")
    run_ranks(save, 4, name, folder)
    reference = case.make()
    optimizer = adamw(reference)
    train(reference, optimizer, case, functools.partial(case.joined_batch, 4), range(4))
    start = dict(case.make().named_parameters())
    for world_size in (3, 1):
        results = run_ranks(load_and_go_on, world_size, name, folder)
        for weights in results:
            for fqn, param in reference.named_parameters():
                torch.testing.assert_close(
                    weights[fqn],
                    param.detach(),
                    rtol=2e-5,
                    atol=2e-6,
                    msg=lambda m, fqn=fqn: f"{fqn}: {m}",
                )
                assert not torch.allclose(param, start[fqn]), f"{fqn} was not trained"


# ------------------------------------------------------------------ full state dicts


class Live(TorchDispatchMode):
    """The most full-size plain tensors that were alive at a time."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.most = numel, 0
        self._refs: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if type(value) is Tensor and not value.is_meta and value.numel() >= self.numel:
                self._refs.append(weakref.ref(value))
        self._refs = [ref for ref in self._refs if ref() is not None]
        storages = {ref().untyped_storage().data_ptr() for ref in self._refs}  # type: ignore[union-attr]
        self.most = max(self.most, len(storages))
        return result


def full_helpers(rank: int, world_size: int) -> list[int]:
    counts = []
    for name in ("uneven", "lm_tied"):
        case = CASES[name]
        model = sharded(case, (2, 2))
        plain = case.make()
        everywhere = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        on_first = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        assert list(everywhere) == list(plain.state_dict())
        assert list(on_first) == (list(plain.state_dict()) if rank == 0 else [])
        for state in (everywhere, on_first):
            for fqn, value in state.items():
                assert type(value) is Tensor and value.device.type == "cpu"
                assert torch.equal(value, plain.state_dict()[fqn]), fqn
        local = get_model_state_dict(model)
        assert all(isinstance(local[fqn], DTensor) for fqn, _ in plain.named_parameters())
        # From rank 0 into a model with weights, and into one on the meta device.
        for on_meta in (False, True):
            source = case.make(9)
            with torch.device("meta" if on_meta else "cpu"):
                target: Any = case.factory()
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=HYBRID)
            hp_compile.shard(target, mesh, POLICY)
            gc.collect()
            with Live(max(p.numel() for p in source.parameters())) as live:
                set_model_state_dict(
                    target,
                    source.state_dict() if rank == 0 else {},
                    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
                )
            if rank:
                counts.append(live.most)
            assert_equal_state(target, source.state_dict(), f"{name}, meta={on_meta}")
            assert_same_forward(target, source, case, rank)
            if name == "lm_tied":
                assert target.head.weight is target.embed.weight
        dist.barrier()
    return counts


def test_full_state_dicts_go_out_and_come_in_from_the_first_rank() -> None:
    for counts in run_ranks(full_helpers, 4, timeout=400):
        assert all(count <= 2 for count in counts), counts  # one, and its broadcast buffer


def load_full_without_helpers(rank: int, world_size: int) -> list[int]:
    """A full checkpoint on each rank: beside it only one tensor of full size may appear."""
    case = CASES["lm"]
    counts = []
    model = sharded(case, (4,))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    state = case.make(4).state_dict()
    biggest = max(v.numel() for v in state.values())
    for entries in (state, {n: distribute_tensor(v, mesh, [Shard(0)]) for n, v in state.items()}):
        with Live(biggest) as live:
            model.load_state_dict(entries)
        counts.append(live.most)
        assert_equal_state(model, state, "full")
    # A local view of an entry counts as the entry; a gathered DTensor as one, twice for its pieces.
    return counts


def test_a_load_makes_one_full_tensor_at_a_time() -> None:
    for plain, gathered in run_ranks(load_full_without_helpers, 4):
        assert plain <= 1 and gathered <= 2, (plain, gathered)
