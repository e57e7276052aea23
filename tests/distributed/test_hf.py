"""Unmodified Hugging Face models on two ranks against the same model on one process and the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from tests.dist_pool import run_ranks

transformers: Any = pytest.importorskip("transformers")

VOCAB = 48


def make(name: str, layers: int) -> nn.Module:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24}
    blocks = {"num_hidden_layers": layers, "num_attention_heads": 2}
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, **blocks, num_key_value_heads=1)
        return transformers.LlamaForCausalLM(config)
    if name == "qwen3":
        config = transformers.Qwen3Config(
            **sizes, **blocks, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True
        )
        return transformers.Qwen3ForCausalLM(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=layers, n_head=2, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        **sizes, **blocks, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def batch(step: int, rows: slice) -> dict[str, torch.Tensor]:
    """Tokens, labels and a mask of padded positions, different in every row and step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (4, 8), generator=generator)
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[:, 6:] = 0  # the same number of labels in every row, so that means of means are means
    labels = tokens.masked_fill(mask == 0, -100)
    whole = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return {name: value[rows] for name, value in whole.items()}


def train(model: Any, rows: slice, causal: bool) -> tuple[list[float], str]:
    """Losses of two AdamW steps, and the class of what the model returns."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, kind = [], ""
    for step in range(2):
        inputs: dict[str, Any] = dict(batch(step, rows))
        if causal:
            inputs["use_cache"] = False
        out = model(**inputs)
        kind = type(out).__name__
        assert set(out.keys()) == {"loss", "logits"}
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return losses, kind


# Model, blocks, backend, activation checkpointing.
CASES = (
    ("llama", 2, "aot_eager", True),
    ("qwen3", 2, "aot_eager", False),
    ("gpt2", 1, "aot_eager", False),
    ("bert", 1, "aot_eager", False),
    ("llama", 1, "inductor", False),
)


def sharded_runs(rank: int, world_size: int) -> list[tuple[list[float], str, int]]:
    """Every case on this rank's half of the batch."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    found = []
    for name, layers, backend, recompute in CASES:
        model: Any = make(name, layers)
        if recompute:
            model.gradient_checkpointing_enable()
        names = set(dict(model.named_parameters()))
        hp_compile.shard(model, mesh, hp_compile.Policy(backend=backend))
        losses, kind = train(model, slice(2 * rank, 2 * rank + 2), name != "bert")
        assert set(dict(model.named_parameters())) == names
        found.append((losses, kind, sum(map(len, model._hp_runtime.programs.values()))))
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_two_steps_equal_the_unsharded_model() -> None:
    ranks = run_ranks(sharded_runs, 2, timeout=800)
    for index, (name, layers, backend, _) in enumerate(CASES):
        losses, kind = train(make(name, layers), slice(0, 4), name != "bert")
        assert losses[0] != losses[1]
        mean = [sum(values) / 2 for values in zip(*(r[index][0] for r in ranks), strict=True)]
        assert mean == pytest.approx(losses, rel=1e-5 if backend == "aot_eager" else 1e-4), name
        assert all(r[index][1] == kind and r[index][2] == 1 for r in ranks), name
