"""Training runs to compare with: one process, DistributedDataParallel, PyTorch's `fully_shard`.

`train` runs any model; the three baselines and the code under test go through it, so that nothing
but the way of being parallel differs:

    expected = train_unsharded("lm", 2, TrainOptions(steps=6))
    ours = merge_ranks(run_ranks(train_ours, 2, TrainOptions(steps=6)))
    assert_same(ours, expected, rtol=1e-5, atol=1e-6)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.models import CASES, Batch, ModelCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How to train.

    Attributes:
        steps: Optimizer steps.
        lr: Learning rate of AdamW.
        micro_batches: Backward passes per step; the loss is divided by it.
        sync_every_micro: Whether every backward pass reduces gradients, or only the last of a step.
        clip_norm: Clip gradients to this norm before the step.
        mesh_shape: For FSDP2: (shard,) or (replicate, shard); None is all ranks in one shard dim.
        reshard_after_forward: For FSDP2; None is its default, which keeps the root gathered.
        param_dtype: For FSDP2: dtype of the gathered parameters.
        reduce_dtype: For FSDP2: dtype of the gradient reduction.
    """

    steps: int = 3
    lr: float = 1e-2
    micro_batches: int = 1
    sync_every_micro: bool = True
    clip_norm: float | None = None
    mesh_shape: tuple[int, ...] | None = None
    reshard_after_forward: bool | int | None = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run left, always as full tensors on the CPU.

    Attributes:
        losses: The loss of every micro-batch, in order: of this rank, or the mean over ranks.
        grads: For every step the gradient of each parameter before the optimizer ran.
        weights: The parameters after the last step.
    """

    losses: list[float]
    grads: list[dict[str, Tensor | None]]
    weights: dict[str, Tensor]


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor as a plain one that nobody else writes to.

    Collective for DTensors.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone()


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradient of every parameter, None where there is none."""
    return {
        name: None if param.grad is None else full(param.grad)
        for name, param in model.named_parameters()
    }


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter; a tied one once, under its first name."""
    return {name: full(param) for name, param in model.named_parameters()}


def train(
    model: nn.Module,
    batch: Callable[[int], Batch],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    options: TrainOptions,
    *,
    call: Callable[..., Any] | None = None,
    before_micro: Callable[[bool], None] | None = None,
) -> TrainResult:
    """Train with AdamW.

    Args:
        model: Holds the parameters.
        batch: Inputs and targets of a micro-batch, numbered through all steps.
        loss_fn: Mean loss of the model's output and the targets.
        options: Steps, learning rate, micro-batches, clipping.
        call: Runs forward where that is not `model` itself.
        before_micro: Called before each forward with whether it is the last of its step.
    """
    call = call or model
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=options.lr)
    losses: list[float] = []
    grads: list[dict[str, Tensor | None]] = []
    for step in range(options.steps):
        for micro in range(options.micro_batches):
            if before_micro is not None:
                before_micro(micro == options.micro_batches - 1)
            inputs, targets = batch(step * options.micro_batches + micro)
            loss = loss_fn(call(inputs), targets)
            (loss / options.micro_batches).backward()
            losses.append(loss.item())
        grads.append(full_grads(model))
        if options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return TrainResult(losses, grads, full_weights(model))


def train_unsharded(name: str, world_size: int, options: TrainOptions) -> TrainResult:
    """Train in this process on the concatenated batches of all ranks."""
    case = CASES[name]
    if case.per_rank_statistics:
        raise ValueError(f"{name} depends on the batch of a rank; compare with FSDP2 instead")
    assert_batches_differ(case, world_size)
    batch = functools.partial(case.joined_batch, world_size)
    return train(case.make(), batch, case.loss, options)


def train_ddp(rank: int, world_size: int, name: str, options: TrainOptions) -> TrainResult:
    """Train with DistributedDataParallel; for `run_ranks`."""
    case = CASES[name]
    model = case.make()
    ddp = DistributedDataParallel(model, find_unused_parameters=bool(case.no_grad))

    def before_micro(last: bool) -> None:
        ddp.require_backward_grad_sync = last or options.sync_every_micro

    batch = functools.partial(case.batch, rank)
    return train(model, batch, case.loss, options, call=ddp, before_micro=before_micro)


def shard_with_fsdp2(model: nn.Module, case: ModelCase, options: TrainOptions) -> FSDPModule:
    """Apply PyTorch's `fully_shard` to the units of the case and to the root."""
    shape = options.mesh_shape or (dist.get_world_size(),)
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(
        param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype
    )
    for module in [*(model.get_submodule(unit) for unit in case.units), model]:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=options.reshard_after_forward,
        )
    assert isinstance(model, FSDPModule)
    return model


def train_fsdp2(rank: int, world_size: int, name: str, options: TrainOptions) -> TrainResult:
    """Train with PyTorch's `fully_shard`; for `run_ranks`."""
    case = CASES[name]
    model = case.make()
    sharded = shard_with_fsdp2(model, case, options)

    def before_micro(last: bool) -> None:
        sharded.set_requires_gradient_sync(last or options.sync_every_micro)

    batch = functools.partial(case.batch, rank)
    return train(model, batch, case.loss, options, before_micro=before_micro)


def merge_ranks(results: Iterable[TrainResult]) -> TrainResult:
    """Return one result: mean losses; gradients and weights must be bit-equal on all ranks."""
    first, *others = results
    for rank, other in enumerate(others, start=1):
        _compare(f"rank {rank} against rank 0", other, first, rtol=0.0, atol=0.0)
    runs = [first, *others]
    losses = [sum(each) / len(runs) for each in zip(*(r.losses for r in runs), strict=True)]
    return dataclasses.replace(first, losses=losses)


def assert_same(
    actual: TrainResult,
    expected: TrainResult,
    *,
    rtol: float,
    atol: float,
    nonzero_except: Iterable[str] = (),
) -> None:
    """Compare losses, gradients and weights; the expected gradients must not be zero.

    Args:
        actual: The run under test.
        expected: A run of something that is not the code under test.
        rtol: Relative tolerance; 0 with `atol` 0 asks for equal bits.
        atol: Absolute tolerance.
        nonzero_except: First names of the parameters that get no gradient.
    """
    assert_nonzero_grads(expected, nonzero_except)
    torch.testing.assert_close(
        torch.tensor(actual.losses, dtype=torch.float64),
        torch.tensor(expected.losses, dtype=torch.float64),
        rtol=rtol,
        atol=atol,
        msg=lambda text: f"losses: {actual.losses} against {expected.losses}\n{text}",
    )
    _compare("actual against expected", actual, expected, rtol=rtol, atol=atol)


def assert_nonzero_grads(result: TrainResult, without: Iterable[str] = ()) -> None:
    """Assert that every parameter got a nonzero gradient in every step, except those named."""
    without = set(without)
    unknown = without - result.weights.keys()
    assert not unknown, f"no such parameters: {sorted(unknown)}"
    for step, grads in enumerate(result.grads):
        for name, grad in grads.items():
            if name in without:
                assert grad is None, f"step {step}: {name} has a gradient"
            else:
                assert grad is not None, f"step {step}: {name} has no gradient"
                nonzero = grad.count_nonzero() > 0 or grad.numel() == 0
                assert nonzero, f"step {step}: the gradient of {name} is zero"


def assert_batches_differ(case: ModelCase, world_size: int) -> None:
    """Assert that no two ranks, and no two numbers, have the same inputs."""
    inputs = [case.batch(rank, index)[0] for rank in range(world_size) for index in range(2)]
    for i, left in enumerate(inputs):
        for right in inputs[:i]:
            assert not torch.equal(left, right), f"{case.name}: two batches are equal"


def _compare(
    what: str, actual: TrainResult, expected: TrainResult, *, rtol: float, atol: float
) -> None:
    def close(label: str, left: Tensor | None, right: Tensor | None) -> None:
        if left is None or right is None:
            assert left is right, f"{what}: {label}: only one of the two is None"
            return
        torch.testing.assert_close(
            left, right, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {label}: {text}"
        )

    assert len(actual.grads) == len(expected.grads), f"{what}: numbers of steps differ"
    for step, (left, right) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        assert left.keys() == right.keys(), f"{what}: names of the parameters differ"
        for name in right:
            close(f"step {step}, gradient of {name}", left[name], right[name])
    assert actual.weights.keys() == expected.weights.keys(), f"{what}: names differ"
    for name in expected.weights:
        close(f"weight {name}", actual.weights[name], expected.weights[name])
