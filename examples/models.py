"""The models: a Llama-style byte-level one of our own, and small Hugging Face ones as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class ByteLMConfig:
    """Sizes of `ByteLM`."""

    dim: int = 256
    layers: int = 4
    head_dim: int = 32
    kv_groups: int = 2  # query heads that share one key-value head
    max_seq_len: int = 1024

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 of `dim`, a multiple of 32."""
        return -(-8 * self.dim // 3 // 32) * 32


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, (batch, sequence, dim) to the same."""

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = config.dim // config.head_dim
        kv_heads = heads // config.kv_groups if heads % config.kv_groups == 0 else heads
        self.q = nn.Linear(config.dim, heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attends over the sequence; `cos` and `sin` are (sequence, head_dim)."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., dim) to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps (batch, sequence, dim) to the same shape."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class ByteLM(nn.Module):
    """Tokens (batch, sequence) to logits (batch, sequence, 256)."""

    cos: Tensor
    sin: Tensor
    # How tensor parallelism cuts the model (`--tp-plan auto`): heads, hidden features, and the vocabulary.
    _tp_plan: ClassVar[dict[str, str]] = {
        "embed": "embedding_rowwise",
        "blocks.*.attention.[qkv]": "colwise",
        "blocks.*.attention.o": "rowwise",
        "blocks.*.mlp.gate": "colwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "head": "colwise",
    }

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCAB, bias=False)
        angles = _angles(config.max_seq_len, config.head_dim)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts the next byte at every position."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _angles(length: int, head_dim: int, base: float = 10_000.0) -> Tensor:
    frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.outer(torch.arange(length), frequencies).repeat(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of (batch, heads, sequence, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), dim=-1) * sin.to(x.dtype)


def build_model(name: str, *, dim: int, layers: int, seq_len: int, seed: int) -> nn.Module:
    """Builds a model with random weights that depend on the seed only.

    Args:
        name: `byte`, or `hf:` and a family.
        dim: Width.
        layers: Blocks.
        seq_len: Longest sequence.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    if name == "byte":
        return ByteLM(ByteLMConfig(dim=dim, layers=layers, max_seq_len=seq_len))
    return _hugging_face(name.removeprefix("hf:"), dim, layers, seq_len)


def _hugging_face(family: str, dim: int, layers: int, seq_len: int) -> nn.Module:
    import transformers

    heads = max(dim // 32, 1)
    modern = {
        "vocab_size": VOCAB,
        "hidden_size": dim,
        "intermediate_size": 3 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "max_position_embeddings": seq_len,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "llama":
        config = transformers.LlamaConfig(**modern)
    elif family == "qwen3":
        config = transformers.Qwen3Config(**modern, head_dim=32, tie_word_embeddings=True)
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=dim,
            n_layer=layers,
            n_head=heads,
            n_positions=seq_len,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0.0,  # so that the run can be compared with one on other ranks
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    return transformers.AutoModelForCausalLM.from_config(config)


def call_arguments(name: str, tokens: Tensor) -> dict[str, object]:
    """The keyword arguments with which the model is called."""
    if name == "byte":
        return {"tokens": tokens}
    return {"input_ids": tokens, "use_cache": False}


def next_byte_loss(output: object, targets: Tensor) -> Tensor:
    """Mean cross entropy in float32, nats per byte.

    Args:
        output: Logits (batch, sequence, 256), or a Hugging Face output that has them.
        targets: int64 (batch, sequence).
    """
    logits = output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
