"""Where stock FSDP2 is wrong or refuses, and the edges of autograd that a hook can miss."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    HSDPModule,
    MixedPrecisionPolicy,
    PlacementError,
    ShardedState,
    ShardedStateError,
    UnusedParameterError,
    fully_shard,
)
from tests.baselines import TrainOptions, full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, FrozenNet, ScalarNet, TiedMLP, build, vector_batch, vector_loss

LM = CASES["lm"]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def mean_grads(make: Any, loss_of: Any, world_size: int) -> dict[str, Tensor]:
    """Return the gradients of the mean loss of all ranks, unsharded."""
    model = make()
    (sum(loss_of(model, rank) for rank in range(world_size)) / world_size).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(grad.count_nonzero() for grad in found.values() if grad.numel())
    return found


def assert_grads(model: nn.Module, expected: dict[str, Tensor]) -> None:
    actual = grads(model)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, **CLOSE, msg=lambda t, n=name: f"{n}: {t}")


def lm_loss(model: nn.Module, rank: int, index: int = 0) -> Tensor:
    inputs, targets = LM.batch(rank, index)
    return LM.loss(model(inputs), targets)


def evaluation_first(rank: int, world_size: int, mode: str) -> None:
    expected = mean_grads(LM.make, lm_loss, world_size)
    for reshard in (True, False):
        model = LM.make()
        shard(model, LM, TrainOptions(reshard_after_forward=reshard))
        context = torch.inference_mode() if mode == "inference_mode" else torch.no_grad()
        with context:
            before = lm_loss(model, rank)
        loss = lm_loss(model, rank)
        assert torch.equal(loss.detach(), before)
        loss.backward()
        assert_grads(model, expected)
        with context:
            lm_loss(model, rank)
        model.zero_grad()
        lm_loss(model, rank).backward()
        assert_grads(model, expected)


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_training_after_evaluation(mode: str) -> None:
    run_ranks(evaluation_first, 2, mode)


class Stash(nn.Module):
    """Keeps a part of its loss on itself, plainly or in a container."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.how = how
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        kept = self.second(x).square().mean()
        self.kept = {"plain": kept, "list": [kept], "dict": {"loss": kept}}[self.how]
        return x.detach() if self.how == "plain" else x

    def pop(self) -> Tensor:
        kept = self.kept
        return kept if self.how == "plain" else kept[0] if self.how == "list" else kept["loss"]


class Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = Stash(how)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def stash_loss(model: Any, rank: int) -> Tensor:
    inputs, targets = vector_batch(rank, 0)
    output = model(inputs)
    return model.inner.pop() + vector_loss(output, targets)


def stash_only(model: Any, rank: int) -> Tensor:
    model(vector_batch(rank, 0)[0])
    return model.inner.pop()


def stashed(rank: int, world_size: int, how: str) -> None:
    for loss_of in (stash_loss, stash_only):
        expected = mean_grads(lambda: build(Outer, how), loss_of, world_size)
        model = build(Outer, how)
        for module in (model.inner, model):
            fully_shard(module, mesh=data_mesh(), reshard_after_forward=True)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, rank).backward()
            assert_grads(model, expected)


@pytest.mark.dist
@pytest.mark.parametrize("how", ["plain", "list", "dict"])
def test_loss_on_a_stashed_tensor(how: str) -> None:
    run_ranks(stashed, 2, how)


def early_optimizer(rank: int, world_size: int, steps_before: int) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build(TiedMLP)
        optimizer = torch.optim.AdamW(
            [
                {"params": list(model.parameters())[:2], "lr": 0.1},
                {"params": list(model.parameters())[2:]},
            ]
        )
        for index in range(steps_before):
            inputs, targets = vector_batch(7, index)
            vector_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    plain, plain_optimizer = make()
    model, optimizer = make()
    fully_shard(model, mesh=data_mesh())
    for index in range(3):
        losses = []
        for other in range(world_size):
            inputs, targets = vector_batch(other, index)
            losses.append(vector_loss(plain(inputs), targets))
        (sum(losses) / world_size).backward()
        inputs, targets = vector_batch(rank, index)
        optimizer.zero_grad()
        vector_loss(model(inputs), targets).backward()
        for opt in (plain_optimizer, optimizer):
            opt.step()
            opt.zero_grad()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs.detach(), rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_built_before_wrapping_trains(steps_before: int) -> None:
    run_ranks(early_optimizer, 2, steps_before)


def scalars(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    def loss_of(model: nn.Module, r: int) -> Tensor:
        inputs, targets = vector_batch(r, 0)
        return vector_loss(model(inputs), targets)

    expected = mean_grads(lambda: build(ScalarNet), loss_of, world_size)
    model = build(ScalarNet)
    fully_shard(model, mesh=data_mesh(shape))
    for change in ("float", "bfloat16"):
        loss_of(model, rank).backward()
        if change == "float":
            assert_grads(model, expected)
        model.zero_grad()
        model.to(torch.bfloat16)
        assert model.scale.dtype == torch.bfloat16 and model.scale.shape == ()
        model.to(torch.float32)


@pytest.mark.dist
@pytest.mark.parametrize(("world", "shape"), [(2, (2,)), (4, (2, 2))])
def test_a_scalar_parameter(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(scalars, world, shape)


def tied(rank: int, world_size: int) -> None:
    model = build(TiedMLP)
    mesh = data_mesh()
    fully_shard(model.first, mesh=mesh)
    with pytest.raises(PlacementError, match=r"tied to .*another unit.*into one unit: fully_shard"):
        fully_shard(model, mesh=mesh)
    with pytest.raises(PlacementError, match="tied to"):
        fully_shard(model.second, mesh=mesh)
    model = build(TiedMLP)
    fully_shard([model.first, model.second], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model.first.weight is model.second.weight

    def loss_of(module: nn.Module, r: int) -> Tensor:
        inputs, targets = vector_batch(r, 0)
        return vector_loss(module(inputs), targets)

    expected = mean_grads(lambda: build(TiedMLP), loss_of, world_size)
    loss_of(model, rank).backward()
    assert_grads(model, expected)
    assert model.first.weight is model.second.weight
    saved = {key: full(value) + 1 for key, value in model.state_dict().items()}
    model.load_state_dict(saved)
    assert model.first.weight is model.second.weight
    assert torch.equal(full(model.second.weight), saved["first.weight"])


@pytest.mark.dist
def test_tied_parameters() -> None:
    run_ranks(tied, 2)


def ignored(rank: int, world_size: int, by_name: bool) -> None:
    def loss_of(module: nn.Module, r: int) -> Tensor:
        inputs, targets = vector_batch(r, 0)
        return vector_loss(module(inputs), targets)

    model = build(FrozenNet)
    skipped = model.adapter_in.weight
    fully_shard(model, mesh=data_mesh(), ignored_params=["adapter_in.*"] if by_name else {skipped})
    assert model.adapter_in.weight is skipped and not isinstance(skipped, DTensor)
    assert "adapter_in.weight" not in [p.fqn for p in model.hsdp_params()]
    loss_of(model, rank).backward()
    local = build(FrozenNet)
    loss_of(local, rank).backward()
    torch.testing.assert_close(skipped.grad, local.adapter_in.weight.grad, **CLOSE)
    assert model.base.weight.grad is None and not model.base.weight.requires_grad


@pytest.mark.dist
@pytest.mark.parametrize("by_name", [True, False])
def test_ignored_parameters_keep_a_local_gradient(by_name: bool) -> None:
    run_ranks(ignored, 2, by_name)


def frozen_then_not(rank: int, world_size: int) -> None:
    def loss_of(module: nn.Module, r: int) -> Tensor:
        inputs, targets = vector_batch(r, 0)
        return vector_loss(module(inputs), targets)

    model = build(FrozenNet)
    fully_shard(model, mesh=data_mesh())
    with count_collectives() as calls:
        loss_of(model, rank).backward()
    assert calls.kinds()["reduce_scatter"] == 1
    small = calls.nbytes("reduce_scatter")
    model.zero_grad()
    model.requires_grad_(True)

    def make() -> nn.Module:
        return build(FrozenNet).requires_grad_(True)

    expected = mean_grads(make, loss_of, world_size)
    with count_collectives() as calls:
        loss_of(model, rank).backward()
    assert_grads(model, expected)
    assert calls.nbytes("reduce_scatter") > small


@pytest.mark.dist
def test_a_frozen_parameter_is_unfrozen_later() -> None:
    run_ranks(frozen_then_not, 2)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 5)
        self.take = "left"

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(getattr(self, self.take)(torch.tanh(self.enter(x)))))


def branch_loss(model: Any, rank: int) -> Tensor:
    model.take = ("left", "right")[rank % 2]
    inputs, targets = vector_batch(rank, 0)
    return vector_loss(model(inputs), targets)


def different_branches(
    rank: int, world_size: int, shape: tuple[int, ...], fill: bool, micro: int
) -> None:
    expected = mean_grads(lambda: build(Branches), branch_loss, world_size)
    model = build(Branches)
    fully_shard(model, mesh=data_mesh(shape))
    assert isinstance(model, HSDPModule)
    model.set_reduce_scatter_unused_params(fill)
    for index in range(micro):
        model.set_requires_all_reduce(index == micro - 1)
        loss = branch_loss(model, rank)
        if fill:
            loss.backward()
            continue
        with pytest.raises(UnusedParameterError) as error:
            loss.backward()
        text = str(error.value)
        assert text.startswith("left.weight, and 3 more parameters: ")
        assert f"this rank, {rank}, did{' not' if rank % 2 else ''}" in text
        assert "set_reduce_scatter_unused_params(True)" in text
        model.take = "left"  # the model is usable
        inputs, targets = vector_batch(rank, 0)
        vector_loss(model(inputs), targets).backward()
        assert {n for n, _ in model.named_parameters() if "left" in n} <= set(grads(model))
        assert "right.weight" not in grads(model)
        return
    actual = grads(model)
    assert "never.weight" not in actual, "no rank used it"
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad * micro, **CLOSE)


@pytest.mark.dist
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(("world", "shape"), [(2, (2,)), (2, (2, 1)), (4, (2, 2))])
def test_ranks_that_use_different_parameters(
    world: int, shape: tuple[int, ...], fill: bool
) -> None:
    run_ranks(different_branches, world, shape, fill, 1, timeout=60)


@pytest.mark.dist
def test_deferred_all_reduce_with_different_parameters() -> None:
    run_ranks(different_branches, 4, (2, 2), True, 2, timeout=60)


def used_in_one_micro_batch(rank: int, world_size: int, setter: str) -> None:
    """A parameter that only one of several backwards used has a gradient, on all ranks."""
    model = build(Branches)
    fully_shard(model, mesh=data_mesh((2, 2)))
    for take in ("left", "right", "left"):
        getattr(model, setter)(take == "left" and model.take == "right")
        model.take = take
        inputs, targets = vector_batch(rank, 0)
        vector_loss(model(inputs), targets).backward()
    assert {"left.weight", "right.weight"} <= set(grads(model))
    assert "never.weight" not in grads(model)


@pytest.mark.dist
@pytest.mark.parametrize("setter", ["set_requires_all_reduce", "set_requires_gradient_sync"])
def test_a_parameter_used_in_one_micro_batch(setter: str) -> None:
    run_ranks(used_in_one_micro_batch, 4, setter)


def checkpointed(rank: int, world_size: int, where: str, reentrant: bool) -> None:
    expected = mean_grads(LM.make, lm_loss, world_size)
    model = LM.make()
    mesh = data_mesh()
    if where == "inside":  # fully_shard(checkpoint(block))
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)
            fully_shard(block, mesh=mesh)
    elif where == "outside":  # checkpoint(fully_shard(block))
        for index, block in enumerate(list(model.blocks)):
            fully_shard(block, mesh=mesh)
            model.blocks[index] = Checkpointed(block, reentrant)
    else:  # only inner parts are checkpointed
        for block in model.blocks:
            block.mlp = Checkpointed(block.mlp, reentrant)
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model.zero_grad()
        loss = lm_loss(model, rank)
        loss.backward()
        actual = {name.replace("module.", ""): grad for name, grad in grads(model).items()}
        assert actual.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(actual[name], grad, **CLOSE)
        for param in model.hsdp_params():
            assert param.sharded_state is ShardedState.SHARDED


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


@pytest.mark.dist
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside", "part"])
def test_activation_checkpointing(where: str, reentrant: bool) -> None:
    run_ranks(checkpointed, 2, where, reentrant)


class Pair(NamedTuple):
    value: Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Output:
    main: Tensor
    extra: dict[str, Any]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, pair: Pair, *, options: dict[str, Any]) -> Output:
        inner = options["inner"][0]
        self.seen = [pair.value.dtype, inner.dtype, options["index"].dtype]
        main = self.linear(pair.value) + inner
        return Output(main, {"twice": [main * 2], "index": options["index"], "name": pair.name})


def nested(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    model = build(Nested)
    fully_shard(model, mesh=data_mesh(), mp_policy=policy, reshard_after_forward=True)
    x = torch.ones(2, 4, requires_grad=True)
    options = {"inner": [torch.ones(4)], "index": torch.tensor(1)}
    out = model(Pair(x, "p"), options=options)
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert isinstance(out, Output) and out.extra["name"] == "p"
    assert out.main.dtype == out.extra["twice"][0].dtype == torch.float32
    assert out.extra["index"].dtype == torch.int64
    out.extra["twice"][0].sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert model.linear.weight.grad.dtype == torch.float32
    assert torch.equal(full(model.linear.bias.grad), torch.full((4,), 4.0))
    uncast = build(Nested)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    fully_shard(uncast, mesh=data_mesh(), mp_policy=policy)
    with pytest.raises(RuntimeError, match="dtype"):
        uncast(Pair(x, "p"), options=options)


@pytest.mark.dist
def test_nested_inputs_and_outputs() -> None:
    run_ranks(nested, 2)


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.rand(5, 3).to(torch.bfloat16))
        self.high = nn.Parameter(torch.rand(3, 3))
        self.steps = nn.Parameter(torch.arange(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.low.float() @ self.high).square().mean() * self.steps.sum()


def two_types(rank: int, world_size: int) -> None:
    def loss_of(module: nn.Module, r: int) -> Tensor:
        return module(torch.full((2, 5), 1.0 + r))

    expected = mean_grads(lambda: build(TwoTypes), loss_of, world_size)
    model = build(TwoTypes)
    fully_shard(model, mesh=data_mesh())
    with count_collectives() as calls:
        loss_of(model, rank).backward()
    assert calls.kinds() == {"all_gather": 1, "reduce_scatter": 2}, "a gather of bytes, two dtypes"
    actual = grads(model)
    assert actual["low"].dtype == torch.bfloat16 and actual["high"].dtype == torch.float32
    torch.testing.assert_close(actual["high"], expected["high"], **CLOSE)
    torch.testing.assert_close(actual["low"], expected["low"], rtol=2e-2, atol=0)
    assert torch.equal(full(model.steps), torch.arange(7))


@pytest.mark.dist
def test_several_dtypes_in_one_unit() -> None:
    run_ranks(two_types, 2)


def survivors(rank: int, world_size: int) -> None:
    model = LM.make()
    shard(model, LM, TrainOptions())
    lm_loss(model, rank, 0).backward()
    held = {name: param.grad for name, param in model.named_parameters()}
    copies = {name: full(grad) for name, grad in held.items() if grad is not None}
    lm_loss(model, rank, 1).backward()  # accumulates
    model.zero_grad()
    lm_loss(model, rank, 2).backward()
    for name, grad in held.items():
        assert grad is not None and torch.equal(full(grad), copies[name]), name


@pytest.mark.dist
def test_gradients_handed_out_are_not_overwritten() -> None:
    run_ranks(survivors, 2)


def post_accumulate(rank: int, world_size: int) -> None:
    model = LM.make()
    shard(model, LM, TrainOptions())
    called: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda p, n=name: called.append(n) if isinstance(p.grad, DTensor) else None
        )
    lm_loss(model, rank).backward()
    assert sorted(called) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.dist
def test_post_accumulate_grad_hooks_run() -> None:
    run_ranks(post_accumulate, 2)


def twice_forward(rank: int, world_size: int) -> None:
    """Two forwards before one backward, a unit used twice, and a non-tensor output."""

    def loss_of(module: nn.Module, r: int) -> Tensor:
        return lm_loss(module, r, 0) + lm_loss(module, r, 1)

    expected = mean_grads(LM.make, loss_of, world_size)
    model = LM.make()
    shard(model, LM, TrainOptions(reshard_after_forward=True))
    loss_of(model, rank).backward()
    assert_grads(model, expected)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.leave = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            for _ in range(3):
                x = torch.tanh(self.layer(x))
            return self.leave(x), "text"

    def shared_loss(module: nn.Module, r: int) -> Tensor:
        inputs, targets = vector_batch(r, 0)
        return vector_loss(module(inputs)[0], targets)

    expected = mean_grads(lambda: build(Shared), shared_loss, world_size)
    shared = build(Shared)
    for module in (shared.layer, shared):
        fully_shard(module, mesh=data_mesh(), reshard_after_forward=True)
    with count_collectives() as calls:
        shared_loss(shared, rank).backward()
    assert calls.kinds()["reduce_scatter"] == 2, "used three times, reduced once"
    assert_grads(shared, expected)


@pytest.mark.dist
def test_units_used_several_times() -> None:
    run_ranks(twice_forward, 2)


def partial_groups(rank: int, world_size: int) -> None:
    """Of the modules of one unit only some run in forward; the head runs on chunks later."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.body(x))

    def loss_of(module: Any, r: int) -> Tensor:
        inputs, targets = vector_batch(r, 0)
        hidden = module(inputs)
        return vector_loss(module.head(hidden), targets)

    expected = mean_grads(lambda: build(Chunked), loss_of, world_size)
    model = build(Chunked)
    fully_shard([model.norm, model.head], mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()
        assert_grads(model, expected)


@pytest.mark.dist
def test_a_unit_of_which_only_some_modules_run() -> None:
    run_ranks(partial_groups, 2)


def on_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = LM.make()
    mesh = data_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ShardedStateError, match=r"still on the meta device: embed\.weight"):
        model(LM.batch(rank, 0)[0])
    model.to_empty(device="cpu")
    values = LM.make()
    model.load_state_dict(values.state_dict())
    expected = mean_grads(LM.make, lm_loss, world_size)
    lm_loss(model, rank).backward()
    assert_grads(model, expected)


@pytest.mark.dist
def test_meta_init() -> None:
    run_ranks(on_meta, 2)


def compiled_blocks(rank: int, world_size: int) -> None:
    expected = mean_grads(LM.make, lm_loss, world_size)
    model = LM.make()
    mesh = data_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        block.compile(backend="aot_eager")
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model.zero_grad()
        lm_loss(model, rank).backward()
        assert_grads(model, expected)


@pytest.mark.dist
@pytest.mark.slow
def test_blocks_compiled_by_torch_compile() -> None:
    run_ranks(compiled_blocks, 2)


def zero_grad(rank: int, world_size: int) -> None:
    """Gradients are reset although full parameters are registered, and unreduced ones too."""
    expected = mean_grads(LM.make, lm_loss, world_size)
    for set_to_none in (True, False):
        model = LM.make()
        sharded = shard(model, LM, TrainOptions(reshard_after_forward=False))
        lm_loss(model, rank, 1).backward()
        sharded.set_requires_gradient_sync(False)
        lm_loss(model, rank, 2).backward()
        sharded.set_requires_gradient_sync(True)
        loss = lm_loss(model, rank)
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        assert_grads(model, expected)


@pytest.mark.dist
def test_zero_grad_resets_every_gradient() -> None:
    run_ranks(zero_grad, 2)
