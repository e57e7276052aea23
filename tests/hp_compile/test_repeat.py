"""Reuse of equal units: the graph is the one of the full trace, and whatever is unusual is traced in full."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import hp_compile
from hp_compile import build, equal
from hyper_parallel.torch_compat import graph as compat
from tests.dist_pool import fake_world
from tests.hp_compile.single import assert_same_call, one_rank, pair
from tests.models import LMConfig, TinyBlock, TransformerLM, lm_batch

BF16 = hp_compile.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Stack(nn.Module):
    """Six equal blocks; tests override ``run`` or build other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(i) for i in range(6))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def block(self, index: int) -> nn.Module:
        return TinyBlock(8)

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = self.run(block, x, index)
        return x


class OperatorsBetween(Stack):
    """The model adds what it computed once, between the blocks; its gradient is summed over them."""

    def forward(self, x: Tensor) -> Any:
        condition = torch.tanh(x) * self.scale
        for block in self.blocks:
            x = block(x) * 0.5 + condition + self.shift
        return x


class Branches(Stack):
    """Blocks with a buffer and a frozen and an unused parameter each."""

    def block(self, index: int) -> nn.Module:
        block = TinyBlock(8)
        block.up.bias.requires_grad_(False)
        block.unused = nn.Parameter(torch.ones(3))
        block.register_buffer("table", torch.ones(8))
        return block

    def run(self, block: Any, x: Tensor, index: int) -> Tensor:
        return block(x) + block.table


class TwoStacks(nn.Module):
    """Two runs of different blocks, the second reads the end of the first everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(TinyBlock(8) for _ in range(7))
        self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        seen = x
        for block in self.second:
            x = torch.relu(block(x)) + seen
        return x


class Alternating(Stack):
    def block(self, index: int) -> nn.Module:
        return TinyBlock(8) if index % 2 else nn.Linear(8, 8)


class Constant(Stack):
    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return block(x) * (index + 1)


class Shared(Stack):
    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return block(x) * self.scale


class TiedInside(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up.weight = self.blocks[2].up.weight


class EveryOutput(Stack):
    def forward(self, x: Tensor) -> Any:
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return outputs


class SkipsOne(Stack):
    def forward(self, x: Tensor) -> Any:
        before = x
        for block in self.blocks:
            x, before = block(x) + before, x
        return x


class Statistics(Stack):
    def block(self, index: int) -> nn.Module:
        return nn.BatchNorm1d(8)


class InPlace(Stack):
    """Every block writes to what it has made itself, directly and through a view."""

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        made = block(x).add_(1)
        made[:, ::2].mul_(0.5)
        return made


class AddsBias(nn.Module):
    """Its backward needs no input, so that one may change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class InPlaceBefore(Stack):
    """Every block writes to what the one before it has made."""

    def block(self, index: int) -> nn.Module:
        return AddsBias()

    def forward(self, x: Tensor) -> Any:
        seen = x * 0.5
        x = seen + 1
        for block in self.blocks:
            y = block(x)
            x.add_(1)
            x = y
        return x


class InPlaceInInput(InPlaceBefore):
    """As above, and no operator of torch says that dropout in evaluation returns its input."""

    def forward(self, x: Tensor) -> Any:
        x = x + 1
        for block in self.blocks:
            y = block(x)
            nn.functional.dropout(x, training=False).add_(1)
            x = y
        return x


class RegionOfTwo(Stack):
    def forward(self, x: Tensor) -> Any:
        for index in range(0, 6, 2):
            pair = nn.Sequential(self.blocks[index], self.blocks[index + 1])
            x = checkpoint(pair, x, use_reentrant=False)
        return x


class OneIsDetached(Stack):
    """Everything before the last block gets no gradient."""

    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = block(x if index != 5 else x.detach())
        return x


class Twice(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(super().forward(x))


def llama(**options: Any) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def deepseek() -> nn.Module:
    """One dense block, then eight with experts: packed parameters, routing that writes in place, latent attention."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=48, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=9,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="batched_mm"
    )


def language_model(**options: Any) -> nn.Module:
    return TransformerLM(LMConfig(blocks=6, **options))


def _norm(value: Any, index: dict[fx.Node, int]) -> str:
    return equal.text_of(value, lambda node: f"%{index[node]}")


def outline(gm: fx.GraphModule) -> list[str]:
    """Every node with its operands and all metadata that a pass may read."""
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    base = nodes[0].meta["seq_nr"]
    lines = []
    for node in nodes:
        meta = node.meta
        stacks = [str(meta.get(k)) for k in ("nn_module_stack", "fwd_nn_module_stack")]
        lines.append(
            f"{node.name if node.op == 'placeholder' else ''} {node.op} {node.target if node.op != 'get_attr' else ''}"
            f"({_norm(node.args, index)}, {_norm(node.kwargs, index)}) {equal.value_text(meta.get('val'))} "
            f"{meta.get('tensor_meta')} {meta.get('desc')} {meta.get('partitioner_tag')} {stacks} {meta.get('stack_trace')} "
            f"{meta['seq_nr'] - base} {compat.checkpoint_region(node)}"
        )
    return lines


def outlines(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    grad: bool = True,
    **policy: Any,
) -> tuple[list[str], list[str], str]:
    """The joint graph with and without reuse, and what the log says."""
    capture = build.capture
    found: list[list[str]] = []

    def both(*given: Any, **options: Any) -> Any:
        for reuse in (True, False):
            captured = capture(*given, **{**options, "grad": grad}, reuse=reuse)
            found.append(outline(captured.gm))
        return captured

    monkeypatch.setattr(build, "capture", both)
    options = {"backend": "aot_eager", **policy}
    with fake_world(2), caplog.at_level(logging.DEBUG, "hp_compile"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        hp_compile.plan(model, mesh, hp_compile.Policy(**options), args=args, kwargs=kwargs)
    assert len(found) == 2
    return found[0], found[1], messages(caplog)


def messages(caplog: pytest.LogCaptureFixture) -> str:
    """What hp_compile logged."""
    text = "\n".join(r.getMessage() for r in caplog.records if r.name == "hp_compile")
    caplog.clear()
    return text


def assert_same(ours: list[str], full: list[str]) -> None:
    for mine, other in zip(ours, full, strict=False):
        assert mine == other
    assert len(ours) == len(full)


TOKENS = torch.zeros(2, 8, dtype=torch.long)
LLAMA = ((TOKENS,), {"labels": TOKENS, "use_cache": False})
REUSED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "llama": (llama, LLAMA, {"mp_policy": BF16}),
    "llama_tied": (functools.partial(llama, tie_word_embeddings=True), LLAMA, {"dynamic": False}),
    "lm_dropout": (
        functools.partial(language_model, dropout=0.2),
        ((TOKENS,), {}),
        {"dynamic": False},
    ),
    "lm_checkpoint": (
        functools.partial(language_model, checkpoint=True, dropout=0.2),
        ((TOKENS,), {}),
        {"mp_policy": BF16, "dynamic": False},
    ),
    "between": (OperatorsBetween, ((X,), {}), {}),
    "branches": (Branches, ((X,), {}), {}),
    "two_stacks": (TwoStacks, ((X,), {}), {}),
    "in_place": (InPlace, ((X,), {}), {}),
    "deepseek": (deepseek, LLAMA, {"mp_policy": BF16}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("between", "branches", "in_place") else pytest.mark.slow)
        for n in REUSED
    ],
)
def test_graph_is_the_one_of_the_full_trace(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, (args, kwargs), policy = REUSED[name]
    ours, full, log = outlines(make(), args, kwargs, monkeypatch, caplog, **policy)
    assert log.count("reused") == (2 if name == "two_stacks" else 1), log
    assert_same(ours, full)


def test_forward_without_gradients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, full, log = outlines(OperatorsBetween(), (X,), {}, monkeypatch, caplog, grad=False)
    assert "reused" in log and not any("Tangent" in line for line in full)
    assert_same(ours, full)


REFUSED: dict[type[Stack], str] = {
    Alternating: "",
    Constant: "",
    Shared: "scale is shared by units",
    TiedInside: "",
    EveryOutput: "is used behind the next unit",
    SkipsOne: "",
    Statistics: "",
    InPlaceBefore: "writes to memory from outside of its unit",
    InPlaceInInput: "writes to memory from outside of its unit",
    RegionOfTwo: "",
    OneIsDetached: "",
    Twice: "is used outside of its unit",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda m: m.__name__)
def test_unusual_models_are_traced_in_full(
    make: type[Stack], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, full, log = outlines(make(), (X,), {}, monkeypatch, caplog)
    assert "reused" not in log
    assert REFUSED[make] in log
    assert_same(ours, full)


def _constant_in_backward(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.mul.Tensor or node.args[1] != 0.5:
        return False
    node.args = (node.args[0], 0.25)
    return True


def _operands_in_backward(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.tanh_backward.default:
        return False
    node.args = node.args[::-1]
    return True


def _other_source(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.mm.default:
        return False
    other = next(n for n in node.graph.nodes if n.target is node.args[1].target)
    node.args = (node.args[0], other)
    return True


@pytest.mark.parametrize(
    ("damage", "unit"),
    [
        (_constant_in_backward, "blocks.1"),
        (_operands_in_backward, "blocks.2"),
        (_other_source, "blocks.4"),
    ],
)
def test_a_trace_that_does_not_repeat_itself_is_not_reused(
    damage: Callable[[fx.Node], bool],
    unit: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The proof looks at the trace itself: one that comes out otherwise in one unit is found, and made in full."""
    trace = compat.joint_trace
    traces = []

    def damaged(*given: Any) -> Any:
        gm, metadata = trace(*given)
        traces.append(sum(n.op == "placeholder" for n in gm.graph.nodes))
        if len(traces) == 1:
            inside = [
                n
                for n in gm.graph.nodes
                if any(p == f"module.{unit}" for p in equal.paths(n, "fwd_nn_module_stack"))
            ]
            after = [n for n in gm.graph.nodes if inside and not n < inside[0]]
            assert any(damage(n) for n in after)
        return gm, metadata

    monkeypatch.setattr(compat, "joint_trace", damaged)
    ours, full, log = outlines(OperatorsBetween(), (X,), {}, monkeypatch, caplog)
    assert "reused" not in log and "tracing every unit: Unequal" in log
    assert traces[0] < traces[1] == traces[2]
    assert_same(ours, full)


@pytest.mark.parametrize(
    "make", [pytest.param(language_model, marks=pytest.mark.slow), OperatorsBetween, Branches]
)
def test_gradients_are_those_of_the_plain_model(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = lm_batch(0, 0)[0] if make is language_model else X
    with one_rank() as mesh, caplog.at_level(logging.DEBUG, "hp_compile"):
        sharded, plain = pair(make, mesh, dynamic=False)
        assert_same_call(sharded, plain, inputs)
    assert "reused" in messages(caplog)
