"""Drawn models, meshes, tensor-parallel plans and policies: every rank's gradients against those of one device.

`HP_TP_EXAMPLES` sets the number of cases, `HP_TP_SEED` the seed, which is printed with every failure; hypothesis shrinks a
failing case.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from tests.passes.test_tensor_parallel import check

DIM, HEADS, LENGTH, BATCH = 16, 4, 8, 4
SEED = int(os.environ.get("HP_TP_SEED") or random.randrange(2**31))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        layers: Number of layers.
        kv_heads: Heads of keys and values.
        bias: Projections have biases.
        norm: Name of the norm.
        mlp: `gated`, `packed` (gate and up in one matrix) or `plain`.
        attention: `fused` (scaled_dot_product_attention), `grouped` or `written` (matmul and softmax).
        vocab: Rows of the embedding and the head.
        tied: The head is the embedding.
        scale: A scale of each feature inside the MLP.
        frozen: Parameters that do not train, by the end of their names.
        logits: Logits are returned, too.
    """

    layers: int
    kv_heads: int
    bias: bool
    norm: str
    mlp: str
    attention: str
    vocab: int
    tied: bool
    scale: bool
    frozen: str
    logits: bool


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind, self.size = shape.attention, DIM // HEADS
        self.groups = HEADS // shape.kv_heads
        kv = shape.kv_heads * self.size
        self.q, self.o = (nn.Linear(DIM, DIM, bias=shape.bias) for _ in range(2))
        self.k, self.v = (nn.Linear(DIM, kv, bias=shape.bias) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind != "grouped":
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        if self.kind == "written":
            scores = q @ k.transpose(-1, -2) / self.size**0.5 + mask
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.kind == "grouped")
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind = shape.mlp
        wide = 32 if shape.mlp == "packed" else 16
        self.up, self.down = (
            nn.Linear(DIM, wide, bias=shape.bias),
            nn.Linear(16, DIM, bias=shape.bias),
        )
        if shape.mlp == "gated":
            self.gate = nn.Linear(DIM, 16, bias=shape.bias)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16)) if shape.scale else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "packed":
            gate, h = h.chunk(2, -1)
            h = F.silu(gate) * h
        elif self.kind == "gated":
            h = F.gelu(self.gate(x)) * h
        else:
            h = torch.tanh(h)
        return self.down(h if self.scale is None else h * self.scale)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        make = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[shape.norm]
        self.norm1, self.norm2 = make(DIM), make(DIM)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, DIM)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.logits = shape.logits
        for name, param in self.named_parameters():
            param.requires_grad_(not (shape.frozen and name.endswith(shape.frozen)))

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x = self.embed(tokens)
        mask = torch.full((LENGTH, LENGTH), -1e4, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return (loss, logits) if self.logits else (loss,)


SHAPES = st.builds(
    Shape,
    layers=st.sampled_from([1, 2]),
    kv_heads=st.sampled_from([4, 2, 1]),
    bias=st.booleans(),
    norm=st.sampled_from(["rms", "layer"]),
    mlp=st.sampled_from(["plain", "gated", "packed"]),
    attention=st.sampled_from(["fused", "grouped", "written"]),
    vocab=st.sampled_from([16, 24]),
    tied=st.booleans(),
    scale=st.booleans(),
    frozen=st.sampled_from(["", "norm1.weight", "q.weight", "bias"]),
    logits=st.booleans(),
)
MESHES = st.sampled_from(
    [
        ((2,), ("tp",)),
        ((4,), ("tp",)),
        ((2, 2), ("dp_shard", "tp")),
        ((2, 2), ("tp", "dp_shard")),
        ((2, 2), ("dp_replicate", "tp")),
        ((3, 2), ("dp_shard", "tp")),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp")),
        ((2, 4), ("dp_shard", "tp")),
        ((2, 1, 2), ("dp_shard", "cp", "tp")),
    ]
)
SEQUENCE_OUT = RowwiseParallel(output_layouts=Shard(1))
WEIGHTS = [None, "colwise", "rowwise", "replicate"]
PLANS = st.fixed_dictionaries(
    {
        "*.q": st.sampled_from(["colwise", ColwiseParallel(output_layouts=Shard(1)), *WEIGHTS]),
        "*.k": st.sampled_from(["colwise", *WEIGHTS]),
        "*.v": st.sampled_from(["colwise", *WEIGHTS]),
        "*.o": st.sampled_from(["rowwise", SEQUENCE_OUT, RowwiseParallel(output_layouts=Shard(0)), *WEIGHTS]),
        "*.up": st.sampled_from(["colwise", "packed_colwise", *WEIGHTS]),
        "*.gate": st.sampled_from(["colwise", *WEIGHTS]),
        "*.down": st.sampled_from(["rowwise", SEQUENCE_OUT, *WEIGHTS]),
        "*.norm1": st.sampled_from([None, SequenceParallel(), SequenceParallel(sequence_dim=0)]),
        "*.norm2": st.sampled_from([None, SequenceParallel()]),
        "norm": st.sampled_from([None, "sequence_parallel"]),
        "embed": st.sampled_from(["embedding_rowwise", "embedding_colwise", SEQUENCE_OUT, None]),
        "head": st.sampled_from(["colwise_gather_output", *WEIGHTS]),
        "*.mlp": st.sampled_from(
            [
                None,
                PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            ]
        ),
    }
)  # fmt: skip
POLICIES = st.fixed_dictionaries(
    {
        "reshard_after_forward": st.sampled_from([True, False]),
        "bucket_mb": st.sampled_from([None, 0]),
        "enable_param_shard": st.sampled_from([None, None, False]),
    }
)


def tokens(group: int, vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(group)
    return [torch.randint(0, vocab, (BATCH, LENGTH), generator=generator) for _ in range(2)]


def usable(shape: Shape, plan: dict[str, Any]) -> dict[str, Any]:
    """The plan without what this model does not have; a tied weight is cut the same way at both names."""
    kept = {glob: style for glob, style in plan.items() if style is not None}
    if shape.mlp != "gated":
        kept.pop("*.gate", None)
    if shape.mlp != "packed" and kept.get("*.up") == "packed_colwise":
        kept["*.up"] = "colwise"
    if shape.tied:
        kept.pop("head", None)
    return kept


def assert_agrees_with_one_device(
    shape: Shape, mesh: Any, plan: dict[str, Any], policy: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = Model(shape)
    tp = mesh[0][mesh[1].index("tp")]
    hypothesis.assume(shape.kv_heads * (DIM // HEADS) % tp == 0)
    check(model, usable(shape, plan), lambda group: tokens(group, shape.vocab), mesh, **policy)


def settings(examples: int) -> Any:
    return hypothesis.settings(
        max_examples=int(os.environ.get("HP_TP_EXAMPLES") or examples),
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def drawn(part: int, examples: int) -> Any:
    """A test of that many cases; each part draws others."""

    @hypothesis.seed(SEED + part)
    @settings(examples)
    @hypothesis.given(SHAPES, MESHES, PLANS, POLICIES)
    def test(shape: Shape, mesh: Any, plan: dict[str, Any], policy: dict[str, Any]) -> None:
        hypothesis.note(f"HP_TP_SEED={SEED}")
        assert_agrees_with_one_device(shape, mesh, plan, policy)

    return test


# 202 cases in all, in parts that run side by side and end before the time limit of a test.
test_a_few = drawn(0, 2)
(
    test_many_1,
    test_many_2,
    test_many_3,
    test_many_4,
    test_many_5,
    test_many_6,
    test_many_7,
    test_many_8,
) = (pytest.mark.slow(drawn(part, 25)) for part in range(1, 9))
