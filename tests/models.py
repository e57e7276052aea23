"""Small deterministic models, each with batches that differ per rank.

A `ModelCase` is everything a test needs to train one of them: `CASES["lm"].make()` always gives
the same weights, `CASES["lm"].batch(rank, index)` the same data for the same rank and index and
other data for any other. Cases travel to worker processes by name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMConfig:
    """Sizes and options of `TransformerLM`."""

    dim: int = 32
    heads: int = 4
    hidden: int = 48
    blocks: int = 2
    vocab: int = 64
    max_length: int = 32
    tied: bool = False
    dropout: float = 0.0
    checkpoint: bool = False


class Attention(nn.Module):
    """Causal self-attention, (batch, sequence, dim) to the same shape."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, config.dim, bias=False)
        self.v = nn.Linear(config.dim, config.dim, bias=False)
        self.o = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.dim)
        self.mlp = GatedMLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TransformerLM(nn.Module):
    """Tokens (batch, sequence) to logits (batch, sequence, vocab)."""

    def __init__(self, config: LMConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or LMConfig()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.position = nn.Embedding(config.max_length, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpoint else block(x)
        return self.head(self.norm(x))


class UnevenMLP(nn.Module):
    """Sizes that no usual number of ranks divides, one dim smaller than most worlds."""

    def __init__(self, sizes: tuple[int, ...] = (6, 10, 7, 3, 5)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class TinyBlock(nn.Module):
    """x + down(tanh(up(x)))."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class TinyBlocks(nn.Module):
    """The shape of a transformer (entry, repeated blocks, head) at the least cost; every dim is even over 4 ranks."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(TinyBlock(dim) for _ in range(2))
        self.leave = nn.Linear(dim, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class BatchNormNet(nn.Module):
    """Float buffers updated in forward and an integer counter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.outer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.norm(self.inner(x))))


class IntBufferNet(nn.Module):
    """An int64 counter, an index buffer and a non-persistent buffer."""

    calls: Tensor
    order: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.arange(7, -1, -1))
        self.register_buffer("offset", torch.full((8,), 0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.outer(torch.tanh(self.inner(x))[:, self.order] + self.offset)


class TiedMLP(nn.Module):
    """One weight used by two layers; its first name is `first.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.leave = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        return self.leave(torch.tanh(self.second(torch.tanh(self.first(x)))))


class FrozenNet(nn.Module):
    """A frozen base layer with a trained low-rank adapter, and a layer frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8)
        self.adapter_in = nn.Linear(6, 2, bias=False)
        self.adapter_out = nn.Linear(2, 8, bias=False)
        self.outer = nn.Linear(8, 5)
        self.base.requires_grad_(False)
        self.outer.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.base(x) + self.adapter_out(self.adapter_in(x))))


class UnusedNet(nn.Module):
    """A layer that forward never calls, and one whose result is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.unused = nn.Linear(8, 8)
        self.detached = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        return self.outer(x + self.detached(x).detach())


class ScalarNet(nn.Module):
    """A 0-dim parameter, one of a single element, and an adapter of rank 0, whose weights have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.outer = nn.Linear(8, 5)
        self.no_rows = nn.Parameter(torch.rand(0, 6))
        self.no_columns = nn.Parameter(torch.rand(5, 0))

    def forward(self, x: Tensor) -> Tensor:
        adapter = F.linear(F.linear(x, self.no_rows), self.no_columns)
        return self.outer(torch.tanh(self.inner(x)) * self.scale + self.shift) + adapter


class TwoBiases(nn.Module):
    """One gradient serves two parameters: x + bias1 + bias2."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8, bias=False)
        self.bias1 = nn.Parameter(torch.rand(8))
        self.bias2 = nn.Parameter(torch.rand(8))
        self.outer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x) + self.bias1 + self.bias2))


def _generator(rank: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (index + 1) + rank)


def lm_batch(
    rank: int, index: int, *, size: int = 2, length: int = 8, vocab: int = LMConfig.vocab
) -> Batch:
    """Return int64 tokens and targets, both (size, length), for one rank and batch number."""
    generator = _generator(rank, index)
    tokens = torch.randint(vocab, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def vector_batch(
    rank: int, index: int, *, size: int = 4, features: int = 6, outputs: int = 5
) -> Batch:
    """Return float32 inputs (size, features) and targets (size, outputs)."""
    generator = _generator(rank, index)
    inputs = torch.randn(size, features, generator=generator)
    return inputs, torch.randn(size, outputs, generator=generator)


def lm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def vector_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(output.float(), targets)


def build(make: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> nn.Module:
    """Return `make(*args, **kwargs)` with weights that depend on `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model with its data, its loss, and what a baseline has to know about it.

    Attributes:
        name: The key in `CASES`.
        factory: Builds the model from the current random state.
        batch: Inputs and targets of a rank and a batch number.
        loss: Mean loss, so that the mean over ranks is the loss of the concatenated batch.
        units: FQNs of the modules that FSDP2 gathers as one unit each; the rest is the root's.
        no_grad: First names of the parameters that get no gradient.
        per_rank_statistics: Forward depends on the batch of the rank (BatchNorm), so there is no
            equal run on the concatenated batch.
    """

    name: str
    factory: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch] = vector_batch
    loss: Callable[[Tensor, Tensor], Tensor] = vector_loss
    units: tuple[str, ...] = ()
    no_grad: frozenset[str] = frozenset()
    per_rank_statistics: bool = False

    def make(self, seed: int = 0) -> nn.Module:
        """Return the model; the same seed gives the same weights."""
        return build(self.factory, seed=seed)

    def joined_batch(self, world_size: int, index: int) -> Batch:
        """Return the batches of all ranks, one after another."""
        inputs, targets = zip(*(self.batch(r, index) for r in range(world_size)), strict=True)
        return torch.cat(inputs), torch.cat(targets)


def _lm(name: str, **options: Any) -> ModelCase:
    config = LMConfig(**options)
    return ModelCase(
        name=name,
        factory=lambda: TransformerLM(config),
        batch=lm_batch,
        loss=lm_loss,
        units=tuple(f"blocks.{i}" for i in range(config.blocks)),
    )


CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        _lm("lm"),
        _lm("lm_tied", tied=True),
        _lm("lm_dropout", dropout=0.2),
        _lm("lm_checkpoint", checkpoint=True),
        ModelCase(
            name="tiny",
            factory=TinyBlocks,
            batch=functools.partial(vector_batch, features=8, outputs=4),
            units=("blocks.0", "blocks.1"),
        ),
        ModelCase(name="uneven", factory=UnevenMLP, units=("layers.0", "layers.1")),
        ModelCase(name="batch_norm", factory=BatchNormNet, per_rank_statistics=True),
        ModelCase(name="int_buffers", factory=IntBufferNet),
        ModelCase(name="tied", factory=TiedMLP),
        ModelCase(
            name="frozen",
            factory=FrozenNet,
            no_grad=frozenset({"base.weight", "base.bias", "outer.bias"}),
        ),
        ModelCase(
            name="unused",
            factory=UnusedNet,
            no_grad=frozenset({"unused.weight", "unused.bias", "detached.weight", "detached.bias"}),
        ),
        ModelCase(name="scalar", factory=ScalarNet),
        ModelCase(name="two_biases", factory=TwoBiases),
    )
}
