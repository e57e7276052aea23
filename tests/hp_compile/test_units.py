"""Which parameters are gathered together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_compile import PolicyError
from hp_compile.units import ROOT_UNIT, resolve_units
from tests.models import TransformerLM


def blocks(count: int, make: Any = lambda: nn.Linear(2, 2)) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def test_repeated_blocks() -> None:
    units = resolve_units(TransformerLM(), "auto")
    assert units.modules == ("blocks.0", "blocks.1")
    assert (
        units.of["blocks.1.mlp.up.weight"] == "blocks.1" and units.of["embed.weight"] == ROOT_UNIT
    )
    assert units.order == (ROOT_UNIT, "blocks.0", "blocks.1")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 2), ()),
        (nn.ModuleDict({"only": blocks(1)}), ()),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), ("0", "2")),
        (nn.ModuleDict({"enc": blocks(2), "dec": blocks(3)}), ("enc", "dec")),
        (
            nn.ModuleDict({"wte": nn.Embedding(2, 2), "wpe": nn.Embedding(2, 2), "h": blocks(2)}),
            ("h.0", "h.1"),
        ),
        (nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)}), ("0", "1")),
        (  # nested lists: the outermost count
            nn.ModuleDict({"layers": blocks(2, lambda: nn.ModuleDict({"experts": blocks(3)}))}),
            ("layers.0", "layers.1"),
        ),
    ],
)
def test_shapes_of_models(module: nn.Module, expected: tuple[str, ...]) -> None:
    assert resolve_units(module, "auto").modules == expected


def _tiny(name: str) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    common = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        if name == "llama":
            config = transformers.LlamaConfig(**common, **heads, num_key_value_heads=2)
            return transformers.LlamaForCausalLM(config)
        if name == "qwen3":
            config = transformers.Qwen3Config(**common, **heads, num_key_value_heads=2, head_dim=8)
            return transformers.Qwen3ForCausalLM(config)
        if name == "gpt2":
            config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2)
            return transformers.GPT2LMHeadModel(config)
        if name == "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(**common, **heads))
        if name == "vit":
            return transformers.ViTModel(
                transformers.ViTConfig(
                    hidden_size=16, intermediate_size=16, **heads, image_size=8, patch_size=4
                )
            )
        config = transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2
        )
        return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("llama", ("model.layers",)),
        ("qwen3", ("model.layers",)),
        ("gpt2", ("transformer.h",)),
        ("bert", ("bert.encoder.layer",)),
        ("t5", ("encoder.block", "decoder.block")),
    ],
)
def test_hugging_face(name: str, prefixes: tuple[str, ...]) -> None:
    expected = tuple(f"{prefix}.{i}" for prefix in prefixes for i in range(2))
    assert resolve_units(_tiny(name), "auto").modules == expected


def test_vision_transformer_blocks_are_units() -> None:
    modules = resolve_units(_tiny("vit"), "auto").modules
    assert len(modules) == 2 and modules[0].endswith(".0") and modules[1].endswith(".1")


def test_globs() -> None:
    model = TransformerLM()
    assert resolve_units(model, ("blocks.*",)).modules == ("blocks.0", "blocks.1")
    nested = resolve_units(model, ("blocks.*", "*.mlp"))
    assert nested.modules == ("blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp")
    assert nested.of["blocks.0.mlp.up.weight"] == "blocks.0.mlp"
    assert resolve_units(model, "head").modules == ("head",)
    with pytest.raises(PolicyError, match=r"'layers\.\*' matches no module.*embed, position"):
        resolve_units(model, ("layers.*",))
