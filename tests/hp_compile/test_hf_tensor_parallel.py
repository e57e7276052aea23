"""Unmodified Hugging Face models with their own tensor-parallel plan: the fewest collectives, one device's numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hp_compile
from hp_compile import Plan, Policy
from hyper_parallel.errors import PolicyError
from hyper_parallel.tensor_parallel import TensorParallelStyle
from tests import all_ranks
from tests.fake_dist import fake_world

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "use_cache": False, "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "use_cache": False, "n_positions": 16,
    "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
FUSED = TensorParallelStyle(name="qkv", weight="packed_colwise", blocks=3)
GPT2_PLAN = {
    "*.c_attn": FUSED, "*.attn.c_proj": "rowwise", "*.c_fc": "colwise", "*.mlp.c_proj": "rowwise",
    "transformer.wte": "embedding_rowwise",
}  # fmt: skip
SHARD_TP = ((2, 2), ("dp_shard", "tp"))


def model_of(name: str, **changes: Any) -> Any:
    base = GPT2 if name == "GPT2" else SMALL
    config = getattr(transformers, f"{name}Config")(**{**base, **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def tokens(group: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(group)
    return [torch.randint(0, 96, (2, 8), generator=generator)] * 2


def check(
    model: Any, tp_plan: Any = "auto", mesh: Any = SHARD_TP, *, run: bool = True, **policy: Any
) -> Plan:
    """Plans and proves; runs all ranks and compares loss, logits and gradients with one device."""
    shape, names = mesh
    ids = tokens(0)[0]
    with fake_world(math.prod(shape)):
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        options = {"backend": "aot_eager", "dynamic": False, **policy}
        plan = hp_compile.plan(
            model,
            device_mesh,
            Policy(tp_plan=tp_plan, **options),
            kwargs={"input_ids": ids, "labels": ids},
        )
        plan.collectives  # noqa: B018  the graphs are made while the groups exist
    plan.verify()

    def call(copied: Any, ids: Tensor, _: Tensor) -> Any:
        found = copied(input_ids=ids, labels=ids)
        return found.loss, found.logits

    if run:
        all_ranks.run(model, plan, tokens, call).check()
    return plan


def by_layer(plan: Plan) -> str:
    """How often each module needs which collective of the model's own computation."""
    counts: dict[str, int] = {}
    for c in plan.collectives:
        if c.purpose == "tp" and not c.params:
            key = f"{c.phase} {c.kind} {re.sub(r'[0-9]+', '*', c.module) or '(root)'}"
            counts[key] = counts.get(key, 0) + 1
    return "\n".join(f"{n} {key}" for key, n in sorted(counts.items()))


class TestCollectives(expecttest.TestCase):
    """Per layer two all-reduces forward and two backward; the rest belongs to embedding, head and loss."""

    def test_llama(self) -> None:
        plan = check(model_of("Llama"))
        self.assertExpectedInline(
            by_layer(plan),
            """\
1 backward all_reduce lm_head
2 backward all_reduce model.layers.*.mlp.gate_proj
2 backward all_reduce model.layers.*.self_attn.q_proj
1 forward all_gather (root)
2 forward all_reduce (root)
1 forward all_reduce model.embed_tokens
2 forward all_reduce model.layers.*.mlp.down_proj
2 forward all_reduce model.layers.*.self_attn.o_proj""",
        )
        assert plan.notes == ()

    @pytest.mark.slow
    def test_qwen3(self) -> None:
        plan = check(model_of("Qwen3", head_dim=8))
        self.assertExpectedInline(
            by_layer(plan),
            """\
1 backward all_reduce lm_head
2 backward all_reduce model.layers.*.mlp.gate_proj
2 backward all_reduce model.layers.*.self_attn.q_proj
1 forward all_gather (root)
2 forward all_reduce (root)
1 forward all_reduce model.embed_tokens
2 forward all_reduce model.layers.*.mlp.down_proj
2 forward all_reduce model.layers.*.self_attn.o_proj""",
        )
        summed = [fqn for fqn, p in plan.params.items() if p.sum_axes]
        assert len(summed) == 4 and all(re.search("[qk]_norm.weight$", fqn) for fqn in summed)

    @pytest.mark.slow
    def test_mistral(self) -> None:
        self.assertExpectedInline(
            by_layer(check(model_of("Mistral"))),
            """\
1 backward all_reduce lm_head
2 backward all_reduce model.layers.*.mlp.gate_proj
2 backward all_reduce model.layers.*.self_attn.q_proj
1 forward all_gather (root)
2 forward all_reduce (root)
1 forward all_reduce model.embed_tokens
2 forward all_reduce model.layers.*.mlp.down_proj
2 forward all_reduce model.layers.*.self_attn.o_proj""",
        )

    @pytest.mark.slow
    def test_phi3_gathers_its_fused_projections_as_its_plan_says(self) -> None:
        plan = check(model_of("Phi3", pad_token_id=0))
        self.assertExpectedInline(
            by_layer(plan),
            """\
2 backward all_gather model.layers.*.mlp.down_proj
2 backward all_gather model.layers.*.self_attn.o_proj
1 backward all_reduce lm_head
2 backward all_reduce model.layers.*.mlp.gate_up_proj
2 backward all_reduce model.layers.*.self_attn.qkv_proj
1 forward all_gather (root)
2 forward all_gather model.layers.*.mlp
2 forward all_gather model.layers.*.self_attn
2 forward all_reduce (root)
1 forward all_reduce model.embed_tokens
2 forward all_reduce model.layers.*.mlp.down_proj
2 forward all_reduce model.layers.*.self_attn.o_proj""",
        )
        assert "aten.chunk.default in model.layers.*.mlp" in "\n".join(plan.notes)

    def test_gpt2_fused_qkv(self) -> None:
        plan = check(model_of("GPT2"), GPT2_PLAN)
        self.assertExpectedInline(
            by_layer(plan),
            """\
1 backward all_reduce lm_head
2 backward all_reduce transformer.h.*.attn.c_attn
2 backward all_reduce transformer.h.*.mlp.c_fc
1 forward all_gather (root)
2 forward all_reduce (root)
2 forward all_reduce transformer.h.*.attn.c_proj
2 forward all_reduce transformer.h.*.mlp.c_proj
1 forward all_reduce transformer.wte""",
        )
        assert plan.notes == ()


def test_gpt2_has_no_plan_of_its_own() -> None:
    with pytest.raises(
        PolicyError, match=r"'auto' takes the model's own plan, but GPT2LMHeadModel has none"
    ):
        check(model_of("GPT2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"num_key_value_heads": 1}),
        ("Qwen2", {}),
        ("Gemma", {"head_dim": 8}),
        ("Olmo2", {}),
        ("Granite", {}),
        ("Cohere", {}),
    ],
)
def test_models(name: str, changes: dict[str, Any]) -> None:
    check(model_of(name, **changes))


@pytest.mark.slow
def test_one_key_head_is_replicated() -> None:
    plan = check(model_of("Llama", num_key_value_heads=1), run=False)
    assert "4 more" not in plan.notes[0] and "1 heads do not divide over 2 ranks" in plan.notes[0]
    assert plan.params["model.layers.0.self_attn.k_proj.weight"].local_shape == (8, 32)


def test_loss_parallel_has_no_full_vocabulary() -> None:
    plan = check(model_of("Llama"), mesh=((2,), ("tp",)), loss_parallel=True, run=False)
    for graph in plan.graphs.values():
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                assert 96 not in value.shape, node.format_node()


@pytest.mark.slow
def test_equal_layers_are_traced_once_with_tensor_parallel_too() -> None:
    """Eight layers: the programs of a trace that reuses them, run for all ranks."""
    plan = check(model_of("Llama", num_hidden_layers=8))
    kinds = [c for c in plan.collectives if c.purpose == "tp" and ".layers." in c.module]
    assert len(kinds) == 4 * 8
