"""Tensor parallel on real ranks: losses, gradients and weights against one device and PyTorch's own tensor parallel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hp_compile
from hp_compile import MixedPrecisionPolicy, Policy
from hyper_parallel.errors import VerificationError
from hyper_parallel.tensor_parallel import TensorParallelStyle
from tests.baselines import (
    TrainOptions,
    TrainResult,
    assert_same,
    full_weights,
    merge_ranks,
    train,
    train_unsharded,
)
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.models import CASES

TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}
STEPS = TrainOptions(steps=2)

MEGATRON = {
    "*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise",
    "*.gate": "colwise", "*.up": "colwise", "*.down": "rowwise",
}  # fmt: skip
PAIR = {"inner": "colwise", "outer": "rowwise"}
VOCABULARY = {**MEGATRON, "embed": "embedding_rowwise", "head": "colwise"}
SEQUENCE = {
    **MEGATRON,
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "*.norm1": SequenceParallel(), "*.norm2": SequenceParallel(), "norm": SequenceParallel(),
    "*.o": RowwiseParallel(output_layouts=Shard(1)), "*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(output_layouts=Replicate()),
}  # fmt: skip


class Row(NamedTuple):
    """One mesh, plan and policy, and what has to happen there.

    Attributes:
        shape: Shape of the mesh.
        names: Names of its dims.
        plan: Tensor-parallel plan.
        fields: Further policy fields.
        reduction: Of every parameter.
        options: How to train.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    plan: dict[str, Any]
    fields: dict[str, Any]
    reduction: str
    options: TrainOptions = STEPS


CLIP = TrainOptions(steps=2, clip_norm=0.5)
TWICE = TrainOptions(steps=2, micro_batches=2, sync_every_micro=False)
SHARD_TP = ((2, 2), ("dp_shard", "tp"))
ROWS: dict[str, Row] = {
    "dp×tp": Row(*SHARD_TP, MEGATRON, {}, "RS"),
    "vocabulary": Row(*SHARD_TP, VOCABULARY, {}, "RS", CLIP),
    "sequence": Row(*SHARD_TP, SEQUENCE, {}, "RS", CLIP),
    "tp×dp": Row((2, 2), ("tp", "dp_shard"), VOCABULARY, {}, "RS"),
    "replicas": Row((2, 2), ("dp_replicate", "tp"), SEQUENCE, {}, "AR"),
    "not cut": Row(*SHARD_TP, MEGATRON, {"enable_param_shard": False}, "AR"),
    "tp only": Row((4,), ("tp",), SEQUENCE, {}, "none", CLIP),
    "full mesh": Row(
        (2, 1, 2), ("dp_replicate", "dp_shard", "tp"), MEGATRON, {"enable_param_shard": None}, "AR"
    ),
    "accumulated": Row(*SHARD_TP, SEQUENCE, {}, "RS", TWICE),
}  # fmt: skip


SAME_DATA = ("tp", "ep")  # an ep dim without a plan holds copies
EIGHT = {
    "dp×tp×ep": Row((2, 2, 2), ("dp_shard", "tp", "ep"), MEGATRON, {}, "RS"),
    "replicas×shards×tp": Row((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), SEQUENCE, {}, "RS+AR"),
}
ROWS.update(EIGHT)


def assert_agrees(result: TrainResult, expected: TrainResult) -> None:
    """Losses and gradients to rounding, weights to a small part of a step.

    AdamW divides a gradient by its own size. Where one is nearly zero, so is what it is divided by, and its rounding shows
    in the weight: up to the learning rate, which is 1e-2.
    """
    assert_same(
        dataclasses.replace(result, weights={}),
        dataclasses.replace(expected, weights={}),
        **TOLERANCE,
    )
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-5, atol=5e-5, msg=name)


def data_rank(mesh: Any, row: Row) -> tuple[int, int]:
    """Which part of the data this rank sees, of how many."""
    at, count = 0, 1
    for name, size, coordinate in zip(row.names, row.shape, mesh.get_coordinate(), strict=True):
        if name not in SAME_DATA:
            at, count = at * size + coordinate, count * size
    return at, count


def data_ranks(row: Row) -> int:
    count = 1
    for name, size in zip(row.names, row.shape, strict=True):
        count *= 1 if name in SAME_DATA else size
    return count


def run_rows(rank: int, world_size: int, labels: list[str]) -> dict[str, TrainResult]:
    results = {}
    case = CASES["lm"]
    for label in labels:
        row = ROWS[label]
        mesh = init_device_mesh("cpu", row.shape, mesh_dim_names=row.names)
        plain = case.make()
        before = {fqn: p.detach().clone() for fqn, p in plain.named_parameters()}
        policy = Policy(backend="aot_eager", tp_plan=row.plan, **row.fields)
        model: Any = hp_compile.shard(plain, mesh, policy)
        for fqn, weight in full_weights(model).items():
            assert torch.equal(weight, before[fqn]), (label, fqn)
        at, _ = data_rank(mesh, row)
        plans = model.plan(*case.batch(at, 0)[:1]).params
        assert {p.reduction for p in plans.values()} == {row.reduction}, label
        for fqn, param in model.named_parameters():
            assert tuple(param.placements) == plans[fqn].placements, (label, fqn)

        def before_micro(last: bool, model: Any = model, row: Row = row) -> None:
            model.set_requires_gradient_sync(last or row.options.sync_every_micro)

        with count_collectives() as calls:
            results[label] = train(
                model,
                functools.partial(case.batch, at),
                case.loss,
                row.options,
                before_micro=before_micro,
            )
        if row.reduction in ("AR", "none"):  # no reduce-scatter of gradients exists
            over_data = [c for c in calls if c.kind == "reduce_scatter" and row.plan is MEGATRON]
            assert not over_data, label
    return results


@pytest.mark.dist
@pytest.mark.parametrize(
    "labels",
    [
        ["dp×tp", "sequence"],
        pytest.param(
            [label for label in ROWS if label not in ("dp×tp", "sequence", *EIGHT)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["main", "others"],
)
def test_rows(labels: list[str]) -> None:
    by_rank = run_ranks(run_rows, 4, labels, timeout=900)
    for label in labels:
        row = ROWS[label]
        result = merge_ranks([ranks[label] for ranks in by_rank])
        expected = train_unsharded("lm", data_ranks(row), row.options)
        assert_agrees(result, expected)


@pytest.mark.dist
@pytest.mark.slow
def test_eight_ranks() -> None:
    by_rank = run_ranks(run_rows, 8, list(EIGHT), timeout=1200)
    for label, row in EIGHT.items():
        result = merge_ranks([ranks[label] for ranks in by_rank])
        assert_agrees(result, train_unsharded("lm", data_ranks(row), row.options))


# ------------------------------------------------------------------ PyTorch's own


def torch_2d(rank: int, world_size: int) -> TrainResult:
    """parallelize_module, then fully_shard."""
    case = CASES["lm"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = case.make()
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    for block in model.blocks:
        plan = {
            path: styles[MEGATRON[f"*.{path.rpartition('.')[2]}"]]()
            for path, _ in block.named_modules()
            if f"*.{path.rpartition('.')[2]}" in MEGATRON
        }
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return train(model, functools.partial(case.batch, rank // 2), case.loss, STEPS)


@pytest.mark.dist
@pytest.mark.slow
def test_same_as_parallelize_module_and_fully_shard() -> None:
    theirs = merge_ranks(run_ranks(torch_2d, 4, timeout=600))
    ours = merge_ranks([r["dp×tp"] for r in run_ranks(run_rows, 4, ["dp×tp"], timeout=600)])
    assert_agrees(ours, theirs)


# ------------------------------------------------------------------ precision, packed weights, loss parallel


def bf16_step(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], set[str]]:
    """One step with bf16 weights and f32 reductions, norm gradients summed over tp in f32."""
    case = CASES["lm"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = Policy(backend="aot_eager", tp_plan=SEQUENCE, mp_policy=mp)
    model: Any = hp_compile.shard(case.make(), mesh, policy)
    inputs, targets = case.batch(rank // 2, 0)
    plan = model.plan(inputs)
    sums = {str(c.dtype) for c in plan.collectives if c.purpose == "tp" and c.params}
    case.loss(model(inputs), targets).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}, sums


@pytest.mark.dist
@pytest.mark.slow
def test_partial_sums_are_reduced_in_reduce_dtype() -> None:
    results = run_ranks(bf16_step, 4, timeout=600)
    dense = CASES["lm"].make()
    inputs, targets = CASES["lm"].joined_batch(2, 0)
    CASES["lm"].loss(dense(inputs), targets).backward()
    for grads, sums in results:
        assert sums == {"torch.float32"}
        for name, param in dense.named_parameters():
            assert param.grad is not None
            assert grads[name].dtype == torch.float32
            scale = param.grad.abs().max().item()
            torch.testing.assert_close(grads[name], param.grad, rtol=0.05, atol=0.03 * scale)
            assert torch.equal(grads[name], results[0][0][name]), name


class PackedBlock(torch.nn.Module):
    """Gate and up in one matrix with a bias, as fused models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Linear(6, 16)
        self.down = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)


def packed_step(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    dense = PackedBlock()
    torch.manual_seed(0)
    plain = PackedBlock()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    plan = {
        "gate_up": TensorParallelStyle(name="gate_up", weight="packed_colwise", blocks=2),
        "down": "rowwise",
    }
    model: Any = hp_compile.shard(plain, mesh, Policy(backend="aot_eager", tp_plan=plan))
    for (name, param), full in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), full), (name, param.placements)
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert model.plan(data[:2]).notes == ()
    model(data.chunk(2)[rank // 2]).sum().backward()
    (dense(data).sum() / 2).backward()
    for (name, param), full in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), full.grad, **TOLERANCE, msg=name)


@pytest.mark.dist
@pytest.mark.slow
def test_packed_weights_are_cut_block_by_block() -> None:
    run_ranks(packed_step, 4)


def different_weights(rank: int, world_size: int) -> None:
    """sync_weights makes everything equal that should be: whole parameters over tp too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    policy = Policy(backend="aot_eager", tp_plan=PAIR, sync_weights=True)
    model = hp_compile.shard(CASES["two_biases"].make(seed=rank), mesh, policy)
    for name, param in model.named_parameters():
        cut = {"inner.weight": 0, "outer.weight": 1}.get(name)
        source = dict(
            CASES["two_biases"].make(seed=0 if cut is None else rank % 2).named_parameters()
        )
        wanted = source[name].detach()
        if cut is not None:
            wanted = wanted.chunk(2, cut)[rank % 2]
        assert torch.equal(param.to_local(), wanted), name


def test_weights_are_synchronised_over_all_dims_that_do_not_cut_them() -> None:
    run_ranks(different_weights, 4)


def different_batches(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    policy = Policy(backend="aot_eager", tp_plan=PAIR)
    model = hp_compile.shard(CASES["two_biases"].make(), mesh, policy)
    with pytest.raises(VerificationError) as caught:
        model(CASES["two_biases"].batch(rank, 0)[0])
    model(CASES["two_biases"].batch(rank // 2, 0)[0])
    return str(caught.value)


def test_other_batches_in_a_tensor_parallel_group_are_an_error() -> None:
    for rank, text in enumerate(run_ranks(different_batches, 4)):
        other = rank ^ 1
        for words in (f"ranks {rank} and {other}", "'tp'", "input 0", "mesh['dp_shard']"):
            assert words in text, text


def loss_parallel_step(rank: int, world_size: int) -> None:
    """Logits stay cut over the vocabulary, also outside of the program."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    case = CASES["lm"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dense = case.make()
    policy = Policy(backend="aot_eager", tp_plan=VOCABULARY, loss_parallel=True)
    model: Any = hp_compile.shard(case.make(), mesh, policy)
    inputs, targets = case.batch(rank // 2, 0)
    logits = model(inputs)
    assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
    assert logits.shape == dense(inputs).shape
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), case.loss(dense(inputs), targets))
    inputs, targets = case.joined_batch(2, 0)
    case.loss(dense(inputs), targets).backward()
    for (name, param), full in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), full.grad, **TOLERANCE, msg=name)


@pytest.mark.slow
@pytest.mark.dist
def test_logits_may_stay_cut() -> None:
    run_ranks(loss_parallel_step, 4)
