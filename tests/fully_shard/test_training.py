"""Checks of PyTorch's own suite that the other files do not have; see `docs/parity.md`."""

from __future__ import annotations

import copy
import itertools
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from hyper_parallel import HSDPModule, MixedPrecisionPolicy, UnusedParameterError, fully_shard
from tests.baselines import TrainOptions, full
from tests.count_collectives import count_collectives
from tests.dist_pool import run_ranks
from tests.fully_shard.runs import data_mesh, shard
from tests.models import CASES, LMConfig, TransformerLM, build, vector_batch, vector_loss

LM = CASES["lm"]
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}
Point = namedtuple("Point", "x y")


class Two(nn.Module):
    """Two layers with separate outputs."""

    def __init__(self, both: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.both = both

    def forward(self, x: Tensor) -> Any:
        out = torch.tanh(self.first(x))
        return (out, torch.tanh(self.second(x))) if self.both else out


def reduce_grads(model: nn.Module) -> None:
    """Average the gradients of a plain model over all ranks."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param), other.detach(), **CLOSE, msg=name)
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None and other.grad is not None:
            torch.testing.assert_close(full(param.grad), other.grad, **CLOSE, msg=name)


def wrapped(model: nn.Module, *names: str, **settings: Any) -> Any:
    for name in names:
        fully_shard(model.get_submodule(name), mesh=data_mesh(), **settings)
    return fully_shard(model, mesh=data_mesh(), **settings)


def registration(rank: int, world_size: int) -> None:
    for reshard in (True, False, 2, None):
        plain = build(Two)
        model = wrapped(build(Two), "first", reshard_after_forward=reshard)
        model(torch.ones(1, 6))
        for module, sharded in ((model.first, reshard is not False), (model, bool(reshard))):
            own = [getattr(p.slots[0].module, p.slots[0].name) for p in module.hsdp_params()]
            assert all(isinstance(param, DTensor) == sharded for param in own), reshard
        assert_same(model, plain)  # of the smaller group too
        for module in (model.first, model):
            module.reshard()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert_same(model, plain)


@pytest.mark.dist
def test_parameters_registered_after_forward() -> None:
    run_ranks(registration, 4)


def unused_outputs(rank: int, world_size: int, reshard: bool | int, both: bool) -> None:
    """A forward output, or a whole module, that the loss does not use."""
    plain = build(Two, both)
    model = wrapped(build(Two, both), "first", "second", reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for index in range(4):
        x = vector_batch(rank, index)[0]
        for module in (plain, model):
            out = module(x)
            if both:
                out = out[0] * out[1] if index < 2 else out[0]
            out.sum().backward()
            if module is plain:
                reduce_grads(plain)
            else:
                assert_same(model, plain)
            if module is model:
                for opt in optimizers:
                    opt.step()
                    opt.zero_grad()
    assert_same(model, plain)


@pytest.mark.dist
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_unused_outputs_and_modules(reshard: bool | int, both: bool) -> None:
    run_ranks(unused_outputs, 4, reshard, both)


class Container(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.kind = kind

    def forward(self, data: Any) -> Any:
        x = torch.relu(self.inner(data["x"] if self.kind == "dict" else data[0]))
        if self.kind == "point":
            return Point(x, data.y)
        return {"x": x} if self.kind == "dict" else [x] if self.kind == "list" else (x,)


def containers(rank: int, world_size: int, kind: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(build(Container, kind, seed=i) for i in range(3)))

    plain, model = make(), make()
    for module in model:
        fully_shard(module, mesh=data_mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=data_mesh())
    x = vector_batch(rank, 0)[0]
    data = {
        "list": [x],
        "tuple": (x,),
        "dict": {"x": x},
        "point": Point(x, torch.ones(1)),
    }[kind]
    for module in (plain, model):
        out = module(data)
        (out["x"] if kind == "dict" else out[0]).sum().backward()
    reduce_grads(plain)
    assert_same(model, plain)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "point"])
def test_activations_in_containers(kind: str) -> None:
    run_ranks(containers, 2, kind)


def root_then_child(rank: int, world_size: int) -> None:
    plain = nn.Sequential(*(build(Two, False, seed=i) for i in range(3)))
    model = copy.deepcopy(plain)
    wrapped(model, "0", "1", "2")
    for module in (lambda m: m, lambda m: m[0]):
        x = vector_batch(rank, 1)[0]
        for each in (plain, model):
            module(each)(x).sum().backward()
        reduce_grads(plain)
        assert_same(model, plain)
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()

    class OnlyParameter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) * 2)

        def forward(self) -> Tensor:
            return self.weight @ self.weight

    no_inputs = OnlyParameter()
    fully_shard(no_inputs, mesh=data_mesh())
    no_inputs().sum().backward()
    assert torch.equal(full(no_inputs.weight.grad), torch.full((4, 4), 4.0))


@pytest.mark.dist
def test_a_child_alone_and_a_root_without_inputs() -> None:
    run_ranks(root_then_child, 2)


def manual_reshard(rank: int, world_size: int) -> None:
    model = LM.make()
    shard(model, LM, TrainOptions(reshard_after_forward=False))
    inputs, targets = LM.batch(rank, 0)
    loss = LM.loss(model(inputs), targets)
    for module in (model, *model.blocks):
        module.reshard()
    with count_collectives() as calls:
        loss.backward()
    assert calls.kinds() == {"all_gather": 3, "reduce_scatter": 3}


@pytest.mark.dist
def test_reshard_by_hand_between_forward_and_backward() -> None:
    run_ranks(manual_reshard, 2)


def other_dtype(rank: int, world_size: int) -> None:
    plain = build(Two, False)
    model = wrapped(build(Two, False), "first", "second")
    for dtype in (torch.float64, torch.float32):
        for module in (plain, model):
            module.to(dtype)
            module.zero_grad()
            module(vector_batch(rank, 0)[0].to(dtype)).sum().backward()
        reduce_grads(plain)
        for param in model.parameters():
            assert param.dtype == param.to_local().dtype == dtype
            assert param.grad is None or param.grad.to_local().dtype == dtype
        assert_same(model, plain)


@pytest.mark.dist
def test_cast_after_wrapping() -> None:
    run_ranks(other_dtype, 2)


def contiguous(rank: int, world_size: int) -> None:
    model = build(Two, False)

    def last_dim(param: nn.Parameter) -> Shard:
        return Shard(param.ndim - 1)

    seen: list[bool] = []
    model.first.register_forward_pre_hook(
        lambda m, _: seen.extend(p.is_contiguous() for p in m.parameters())
    )
    wrapped(model, "first", "second", shard_placement_fn=last_dim)
    model(torch.ones(2, 6)).sum().backward()
    assert all(seen) and len(seen) == 2
    for param in model.first.parameters():
        assert param.is_contiguous() and param.to_local().is_contiguous()
        assert param.grad.is_contiguous() and param.grad.to_local().is_contiguous()


@pytest.mark.dist
def test_slices_of_other_dims_are_contiguous() -> None:
    run_ranks(contiguous, 4)


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.body(self.embed(tokens)))


def run_chunks(model: Any, tokens: Tensor, chunks: int, dtype: torch.dtype) -> list[Tensor]:
    """Run the head chunk by chunk, each with a backward of its own; return its gradients."""
    hidden = model(tokens)
    assert hidden.dtype == dtype
    parts, seen = [], []
    for chunk in hidden.detach().float().chunk(chunks, dim=1):
        chunk = chunk.contiguous().requires_grad_(True)
        out = model.head(chunk)
        assert out.dtype == dtype
        out.square().sum().backward()
        parts.append(chunk.grad)
        if model.head.weight.grad is not None:
            seen.append(full(model.head.weight.grad))
    hidden.backward(torch.cat(parts, dim=1).to(dtype))
    return seen


def chunked_losses(rank: int, world_size: int, reshard: bool, low: bool) -> None:
    output = torch.bfloat16 if low else torch.float32
    policy = MixedPrecisionPolicy(output_dtype=output if low else None)
    plain, model = build(Chunked), build(Chunked)
    settings: dict[str, Any] = {"mesh": data_mesh(), "reshard_after_forward": reshard}
    fully_shard(model.embed, **settings)
    fully_shard(model.body, **settings)
    fully_shard([model.norm, model.head], mp_policy=policy, **settings)
    fully_shard(model, **settings)
    tokens = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        model.zero_grad()
        seen = run_chunks(model, tokens, 4, output)
        assert len(seen) == 4
        for before, after in itertools.pairwise(seen):
            assert not torch.equal(before, after), "every chunk adds its gradient"
        if low:
            continue
        plain.zero_grad()
        run_chunks(plain, tokens, 4, torch.float32)
        reduce_grads(plain)
        assert_same(model, plain)
    # Kept unsharded over the chunks, by hand.
    model.zero_grad()
    hidden = model(tokens)
    model.head.set_reshard_after_forward(False)
    model.head.set_reshard_after_backward(False)
    for chunk in hidden.detach().float().chunk(2, dim=1):
        model.head(chunk.contiguous().requires_grad_(True)).sum().backward()
        assert not isinstance(model.head.weight, DTensor)
    model.head.set_reshard_after_backward(True)
    model.head.reshard()
    assert isinstance(model.head.weight, DTensor)
    hidden.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize(("reshard", "low"), [(True, False), (False, False), (True, True)])
def test_chunked_losses(reshard: bool, low: bool) -> None:
    run_ranks(chunked_losses, 2, reshard, low)


def chunks_accumulate(rank: int, world_size: int) -> None:
    results = []
    for grouped in (False, True):
        model = build(Chunked)
        units = [[model.norm, model.head]] if grouped else [model.norm, model.head]
        for module in (model.embed, model.body, *units, model):
            fully_shard(module, mesh=data_mesh(), reshard_after_forward=True)
        assert isinstance(model, HSDPModule)
        for index in range(3):
            model.set_requires_gradient_sync(index == 2)
            model.set_is_last_backward(index == 2)
            generator = torch.Generator().manual_seed(10 * index + rank)
            run_chunks(model, torch.randint(16, (2, 8), generator=generator), 2, torch.float32)
        results.append({name: full(param.grad) for name, param in model.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, **CLOSE, msg=name)


@pytest.mark.dist
def test_chunked_losses_accumulate() -> None:
    run_ranks(chunks_accumulate, 2)


def grouped_casts(rank: int, world_size: int) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).float())

    model = Casts()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard([model.a, model.b], mesh=data_mesh(), mp_policy=policy)
    fully_shard(model, mesh=data_mesh(), mp_policy=policy)
    out = model(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.dist
def test_inputs_of_every_module_of_a_group_are_cast() -> None:
    run_ranks(grouped_casts, 2)


def dpo(rank: int, world_size: int, reshard: bool) -> None:
    """Two forwards of nested, checkpointed units before one backward."""
    config = LMConfig(checkpoint=True)
    plain, model = build(TransformerLM, config), build(TransformerLM, config)
    for block in model.blocks:
        for module in (block.attention, block.mlp, block):
            fully_shard(module, mesh=data_mesh(), reshard_after_forward=reshard)
    fully_shard(model, mesh=data_mesh(), reshard_after_forward=reshard)
    first, second = LM.batch(rank, 0)[0], LM.batch(rank, 1)[0]
    for module in (plain, model):
        (module(first).mean() - module(second).square().mean()).square().backward()
    reduce_grads(plain)
    assert_same(model, plain)


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [True, False])
def test_two_forwards_of_checkpointed_nested_units(reshard: bool) -> None:
    run_ranks(dpo, 2, reshard)


def embedding_unit(rank: int, world_size: int) -> None:
    """Parameters that backward does not need are not gathered for it."""
    plain, model = build(TransformerLM, LMConfig()), build(TransformerLM, LMConfig())
    embeddings = [model.embed, model.position]
    fully_shard(embeddings, mesh=data_mesh(), reshard_after_forward=True)
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh(), reshard_after_forward=True)
    fully_shard([model.norm, model.head], mesh=data_mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=data_mesh())
    model.embed.set_unshard_in_backward(False)
    inputs, targets = LM.batch(rank, 0)
    for module in (plain, model):
        loss = LM.loss(module(inputs), targets)
        with count_collectives() as calls:
            loss.backward()
    assert calls.kinds() == {"all_gather": 3, "reduce_scatter": 4}
    reduce_grads(plain)
    assert_same(model, plain)


@pytest.mark.dist
def test_units_that_backward_does_not_need() -> None:
    run_ranks(embedding_unit, 2)


def scaled(rank: int, world_size: int) -> None:
    """torch.amp.GradScaler skips steps with infinite gradients, on all ranks alike."""
    model = wrapped(build(Two, False), "first")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = vector_batch(rank, 0)[0]
    for broken in (False, True):
        before = {name: full(param) for name, param in model.named_parameters()}
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        if broken and rank == 0:
            model.first.weight.grad.to_local().fill_(float("inf"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        changed = not torch.equal(full(model.first.weight), before["first.weight"])
        assert changed is not broken
    assert scaler.get_scale() == 2.0


@pytest.mark.dist
def test_grad_scaler() -> None:
    run_ranks(scaled, 2)


class Split(nn.Module):
    """Units that only some ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 12)
        self.leave = nn.Linear(6, 5)

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        for name in names:
            x = getattr(self, name)(x)[:, :6]
        return self.leave(x)


def split_units(rank: int, world_size: int, names: tuple[list[str], list[str]]) -> str:
    model = build(Split)
    wrapped(model, "left", "right", "extra", reshard_after_forward=True)
    x, targets = vector_batch(rank, 0)
    with pytest.raises(UnusedParameterError) as error:
        vector_loss(model(x, names[rank]), targets).backward()
    return str(error.value)


@pytest.mark.dist
def test_ranks_that_run_different_units() -> None:
    texts = run_ranks(split_units, 2, (["left"], ["right"]), timeout=60)
    assert "unit 'left' on rank 0 was gathered while ranks [1] gathered another one" in texts[0]
    assert "unit 'right' on rank 1 was gathered while ranks [0] gathered another one" in texts[1]


def checkpoint_function(rank: int, world_size: int) -> None:
    """A checkpointed function that spans several units."""

    class Spans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(
                checkpoint(
                    lambda y: torch.tanh(self.b(torch.tanh(self.a(y)))), x, use_reentrant=False
                )
            )

    plain = build(Spans)
    model = wrapped(build(Spans), "a", "b", "c", reshard_after_forward=True)
    x = vector_batch(rank, 0)[0]
    for _ in range(2):
        for module in (plain, model):
            module.zero_grad()
            module(x).square().sum().backward()
        reduce_grads(plain)
        assert_same(model, plain)


@pytest.mark.dist
def test_a_checkpointed_function_over_several_units() -> None:
    run_ranks(checkpoint_function, 2)
