"""What happens to a sharded model beside its steps: initialised late, frozen, cast, offloaded, clipped, stepped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hp_compile
from hp_compile import CPUOffloadPolicy, Policy
from tests.baselines import full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.models import CASES, ModelCase, vector_batch

pytestmark = pytest.mark.dist


def shard(model: nn.Module, shape: tuple[int, ...], **fields: Any) -> Any:
    mesh = init_device_mesh(
        "cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]
    )
    return hp_compile.shard(model, mesh, Policy(backend="aot_eager", **fields))


def step(model: nn.Module, case: ModelCase, batch: Any) -> None:
    inputs, targets = batch
    case.loss(model(inputs), targets).backward()


def assert_close(actual: nn.Module, expected: nn.Module, what: str, tol: float = 2e-6) -> None:
    ours = dict(actual.named_parameters())
    for name, param in expected.named_parameters():
        assert_same(full(ours[name]), param.detach(), f"{what}: {name}", tol)
        if param.grad is None:
            assert ours[name].grad is None, f"{what}: {name} has a gradient"
        else:
            assert ours[name].grad is not None, f"{what}: {name} has no gradient"
            assert_same(full(ours[name].grad), param.grad, f"{what}: gradient of {name}", tol)


def assert_same(actual: Tensor, expected: Tensor, what: str, tol: float) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=10 * tol, atol=tol, msg=lambda text: f"{what}: {text}"
    )


# ------------------------------------------------------------------ odd parameters and optimizers


class OddNet(nn.Module):
    """0-dim, empty, integer, single-row, frozen, unused and ignored parameters; rows that no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 7)
        self.no_rows = nn.Parameter(torch.zeros(0, 3))
        self.no_columns = nn.Parameter(torch.zeros(3, 0))
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.row = nn.Parameter(torch.rand(1, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.ignored = nn.Parameter(torch.rand(7))
        self.unused = nn.Parameter(torch.rand(5))
        self.outer = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x)) * self.scale + self.row + self.frozen + self.ignored
        return self.outer(x + self.no_rows.sum() + self.no_columns.sum() + self.counts.sum())


ODD = ModelCase(name="odd", factory=OddNet)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def odd_steps(rank: int, world_size: int) -> None:
    for name, make in OPTIMIZERS.items():
        plain, model = ODD.make(), shard(ODD.make(), (4,), ignored_params=["ignored"])
        ours = [p for n, p in model.named_parameters() if p.requires_grad and n != "ignored"]
        theirs = [p for n, p in plain.named_parameters() if p.requires_grad and n != "ignored"]
        mine, reference = make(ours), make(theirs)
        for index in range(3):
            step(model, ODD, ODD.batch(rank, index))
            step(plain, ODD, ODD.joined_batch(world_size, index))
            local = [ODD.make()]
            local[0].load_state_dict(plain.state_dict())
            step(local[0], ODD, ODD.batch(rank, index))
            # An ignored parameter keeps the gradient of this rank's own batch.
            assert_same(model.ignored.grad, local[0].ignored.grad, "ignored", 2e-6)  # type: ignore
            model.ignored.grad = plain.ignored.grad = None  # type: ignore[union-attr]
            if index == 0:
                none = {n for n, p in model.named_parameters() if p.grad is None}
                assert none == {"counts", "frozen", "ignored", "unused"}
                assert all(p.grad.shape == p.shape for p in ours if p.grad is not None)
            assert_close(model, plain, f"{name}, step {index}")
            mine.step()
            reference.step()
            mine.zero_grad()
            reference.zero_grad()
            for param in ours:  # what the optimizer wrote is what the next program reads
                assert isinstance(param, DTensor)
        assert_close(model, plain, f"{name}, end")


@pytest.mark.slow
def test_odd_parameters_train_under_every_optimizer() -> None:
    run_ranks(odd_steps, 4, timeout=400)


def clipped(rank: int, world_size: int) -> None:
    case = CASES["uneven"]
    plain, model = case.make(), shard(case.make(), (2, 2))
    step(model, case, case.batch(rank, 0))
    step(plain, case, case.joined_batch(world_size, 0))
    saved = {n: p.grad.clone() for n, p in model.named_parameters()}
    expected = {n: p.grad.clone() for n, p in plain.named_parameters()}
    for norm in (1.0, 2.0, 3.0, math.inf):
        for clip in (hp_compile.clip_grad_norm_, nn.utils.clip_grad_norm_):
            for name, param in model.named_parameters():
                param.grad = saved[name].clone()
            for name, param in plain.named_parameters():
                param.grad = expected[name].clone()
            total: Any = clip(model.parameters(), 0.05, norm)
            total = total.full_tensor() if isinstance(total, DTensor) else total
            reference = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm)
            assert reference > 0.05
            torch.testing.assert_close(total, reference, rtol=2e-6, atol=0)
            assert_close(model, plain, f"norm {norm}")
    torch.testing.assert_close(
        hp_compile.get_total_norm([saved[n] for n in saved], 2.0),
        nn.utils.get_total_norm(list(expected.values()), 2.0),
    )


def test_clipping_equals_the_unsharded_one() -> None:
    run_ranks(clipped, 4)


# ------------------------------------------------------------------ padding stays right


def disturb(rank: int, world_size: int) -> None:
    """Every way to change values that leaves the parameter: the next program must read the new ones."""
    case = CASES["uneven"]
    plain, model = case.make(), shard(case.make(), (4,))
    inputs, _ = case.batch(rank, 0)

    def same(what: str) -> None:
        with torch.no_grad():
            torch.testing.assert_close(
                model(inputs), plain(inputs), rtol=1e-6, atol=1e-6, msg=lambda m: f"{what}: {m}"
            )

    changes: dict[str, Callable[[nn.Module], Any]] = {
        "in place": lambda m: [p.detach().mul_(1.1) for p in m.parameters()],
        "data": lambda m: [p.data.add_(0.01) for p in m.parameters()],
        "no_grad": lambda m: [p.copy_(p * 0.9) for p in m.parameters()],
        "init": lambda m: [nn.init.constant_(p, 0.07) for p in m.parameters()],
        "foreach": lambda m: torch._foreach_mul_(
            [getattr(p, "_local_tensor", p) for p in m.parameters()], 1.5
        ),
        "double and back": lambda m: m.double().float(),
        "to": lambda m: m.to(torch.float64).to("cpu").to(torch.float32),
        "to_empty": lambda m: [
            nn.init.constant_(p, 0.03) for p in m.to_empty(device="cpu").parameters()
        ],
    }
    for what, change in changes.items():
        with torch.no_grad():
            change(model)
            change(plain)
        same(what)
        model.load_state_dict(case.make(3).state_dict())
        plain.load_state_dict(case.make(3).state_dict())
        same(f"load after {what}")
    local = model.layers[0].weight.to_local()
    assert local.shape[0] == (3, 3, 3, 1)[rank]


def test_padded_shards_stay_consistent() -> None:
    run_ranks(disturb, 4)


def shard_other_dims(rank: int, world_size: int) -> None:
    """Rows cut on another dim have no room for padding; programs get a padded copy."""
    from torch.distributed.tensor import Shard

    case = CASES["uneven"]
    plain = case.make()
    model = shard(
        case.make(), (4,), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None
    )
    assert model.layers[0].weight.placements == (Shard(1),)
    mine, reference = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain))
    for index in range(2):
        step(model, case, case.batch(rank, index))
        step(plain, case, case.joined_batch(world_size, index))
        assert_close(model, plain, "Shard(1)")
        for optimizer in (mine, reference):
            optimizer.step()
            optimizer.zero_grad()
    model.load_state_dict(case.make(8).state_dict())
    inputs, _ = case.batch(rank, 5)
    torch.testing.assert_close(model(inputs), case.make(8)(inputs), rtol=1e-6, atol=1e-6)


def test_uneven_cuts_on_other_dims() -> None:
    run_ranks(shard_other_dims, 4)


# ------------------------------------------------------------------ meta, sync_weights, offload


class RopeNet(nn.Module):
    """A non-persistent buffer that `reset` fills, and weights that do not depend on the rank."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 7)
        self.outer = nn.Linear(7, 5)
        self.register_buffer("table", torch.empty(7), persistent=False)
        self.reset(0.1)

    @torch.no_grad()
    def reset(self, value: float) -> None:
        for index, param in enumerate(self.parameters()):
            param.fill_(value * (index + 1))
        self.table.copy_(torch.linspace(0, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x) + self.table))


def meta_init(rank: int, world_size: int) -> None:
    case = ModelCase(name="rope", factory=RopeNet)
    plain = case.make()
    with torch.device("meta"):
        model: Any = RopeNet()
    shard(model, (2, 2))
    model.to_empty(device="cpu")
    model.reset(0.1)
    assert list(model.state_dict()) == list(plain.state_dict())
    for index in range(2):
        step(model, case, case.batch(rank, index))
        step(plain, case, case.joined_batch(world_size, index))
        assert_close(model, plain, "meta init")
        for m in (model, plain):
            torch.optim.SGD(m.parameters(), 0.1).step()
            m.zero_grad()


def different_on_every_rank(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """sync_weights makes replicas equal once: from shard, or at the first call of a late one."""
    results = []
    for late in (False, True):
        for sync in (False, True):
            case = CASES["uneven"]
            if late:
                with torch.device("meta"):
                    model: Any = case.factory()
                shard(model, (2, 2), sync_weights=sync)
                model.to_empty(device="cpu")
                with torch.no_grad():
                    for param in model.parameters():
                        param._local_tensor.fill_(1.0 + rank)
                inputs, _ = case.batch(rank, 0)
                model(inputs)
            else:
                model = shard(case.make(seed=rank), (2, 2), sync_weights=sync)
            results.append({n: p.to_local().clone() for n, p in model.named_parameters()})
            with torch.no_grad():
                for param in model.parameters():
                    param._local_tensor.fill_(float(rank))
            with count_collectives() as counted:
                model(case.batch(rank, 0)[0])
            assert "broadcast" not in counted.kinds(), "synchronised twice"
            assert all(bool((p.to_local() == rank).all()) for p in model.parameters())
    return results


def test_meta_init_and_weight_synchronisation() -> None:
    run_ranks(meta_init, 4)
    ranks = run_ranks(different_on_every_rank, 4)
    sources = [dict(CASES["uneven"].make(seed=s).named_parameters()) for s in range(4)]
    for rank in range(4):
        first = rank % 2  # the first rank of the unsharded group of 0 and 2, of 1 and 3
        unsynced, synced, late_unsynced, late_synced = ranks[rank]
        for name in synced:
            pieces = [sources[seed][name].detach().chunk(2) for seed in (rank, first)]
            mine, theirs = (p[first] if first < len(p) else p[0][:0] for p in pieces)
            assert torch.equal(unsynced[name], mine), name
            assert torch.equal(synced[name], theirs), name
            assert bool((late_unsynced[name] == 1.0 + rank).all())
            assert bool((late_synced[name] == 1.0 + first).all())


def offloaded(rank: int, world_size: int) -> None:
    case = CASES["uneven"]
    plain, model = case.make(), shard(case.make(), (2, 2), offload_policy=CPUOffloadPolicy())
    mine, reference = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain))
    for index in range(2):
        step(model, case, case.batch(rank, index))
        step(plain, case, case.joined_batch(world_size, index))
        assert all(p.device.type == p.grad.device.type == "cpu" for p in model.parameters())
        assert not any(p._local_tensor.is_pinned() for p in model.parameters())
        assert_close(model, plain, "offload")
        for optimizer in (mine, reference):
            optimizer.step()
            optimizer.zero_grad()


def test_cpu_offload_on_a_cpu_mesh_changes_nothing() -> None:
    run_ranks(offloaded, 4)


# ------------------------------------------------------------------ frozen and cast later, buffers


def late_changes(rank: int, world_size: int) -> None:
    case = CASES["frozen"]
    plain, model = case.make(), shard(case.make(), (2, 2))
    mine, reference = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain))
    index = 0

    def steps(what: str) -> None:
        nonlocal index
        for _ in range(2):
            step(model, case, case.batch(rank, index))
            step(plain, case, case.joined_batch(world_size, index))
            assert_close(model, plain, what)
            for optimizer in (mine, reference):
                optimizer.step()
                optimizer.zero_grad()
            index += 1

    steps("as built")
    for m in (model, plain):
        m.base.requires_grad_(True)
    steps("base unfrozen")
    assert model.plan().params["base.weight"].reduction == "RS+AR"
    for m in (model, plain):
        m.adapter_in.requires_grad_(False)
        m.outer.weight.requires_grad_(False)
    steps("adapter frozen")
    for m in (model, plain):
        m.requires_grad_(False)
    inputs, _ = case.batch(rank, 0)
    assert not model(inputs).requires_grad
    for m in (model, plain):
        m.requires_grad_(True).double()
    x, y = case.batch(rank, 1)
    whole = case.joined_batch(world_size, 1)
    nn.functional.mse_loss(model(x.double()), y.double()).backward()
    nn.functional.mse_loss(plain(whole[0].double()), whole[1].double()).backward()
    assert all(p.grad.dtype == torch.float64 for p in model.parameters())
    assert_close(model, plain, "double", 2e-6)  # the weights come from steps in float32


def cast_after_a_step(rank: int, world_size: int) -> None:
    """bf16 gradients reduced in fp32 hold on to autograd's nodes, which must not forbid a cast."""
    case = CASES["uneven"]
    policy = hp_compile.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = shard(case.make().bfloat16(), (2,), mp_policy=policy)
    inputs, targets = case.batch(rank, 0)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        model.to(dtype)  # with and without gradients
        if dtype == torch.float32:
            model.zero_grad()
        case.loss(model(inputs.to(dtype)), targets).backward()
        assert all(p.dtype == p.grad.dtype == dtype for p in model.parameters())


def test_casts_after_a_step() -> None:
    run_ranks(cast_after_a_step, 2)


def test_parameters_frozen_unfrozen_and_cast_after_shard() -> None:
    run_ranks(late_changes, 4, timeout=400)


class SharedStatistics(nn.Module):
    """Two norms that keep one set of buffers, and an int counter that a submodule shares."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.first = nn.BatchNorm1d(8)
        self.second = nn.BatchNorm1d(8)
        for name, buffer in self.first.named_buffers():
            self.second._buffers[name] = buffer
        self.outer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.second(torch.tanh(self.first(self.inner(x)))))


def buffers(rank: int, world_size: int) -> None:
    for factory in (CASES["batch_norm"].factory, CASES["int_buffers"].factory, SharedStatistics):
        case = ModelCase(name="buffers", factory=factory)
        plain, model, eager = case.make(), shard(case.make(), (2,)), case.make()
        fully_shard(eager, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
        for index in range(3):
            for m in (plain, model, eager):
                step(m, case, case.batch(rank, index))  # each rank its own statistics
        for name, buffer in plain.named_buffers():
            ours = model.get_buffer(name)
            assert torch.equal(ours, buffer), f"{factory}: {name}"
            assert torch.equal(ours, eager.get_buffer(name)), f"{factory}: {name}"
        if factory is SharedStatistics:
            assert model.first.running_mean is model.second.running_mean
            assert int(model.first.num_batches_tracked) == 6
        grads = {n: full(p.grad) for n, p in eager.named_parameters()}
        for name, param in model.named_parameters():
            assert_same(full(param.grad), grads[name], name, 2e-6)
        for m in (plain, model):
            m.eval()
        inputs, _ = vector_batch(rank, 7)
        torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-5, atol=1e-6)
        for name, buffer in plain.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), f"{factory}: {name} after eval"


def test_buffers_update_as_unsharded_and_shared_ones_stay_shared() -> None:
    run_ranks(buffers, 2)
