"""The tensor-parallel pass: collectives of a layer at their minimum, and every rank's numbers those of one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import hp_compile
from hp_compile import Plan, Policy
from hyper_parallel.errors import CaptureError, PolicyError
from hyper_parallel.tensor_parallel import TensorParallelStyle
from tests import all_ranks
from tests.fake_dist import fake_world

SHARD_TP = ((2, 2), ("dp_shard", "tp"))
TP = ((2,), ("tp",))


class Layer(nn.Module):
    """One pre-norm transformer layer, written in the operators that models use."""

    def __init__(
        self, dim: int = 16, heads: int = 4, kv_heads: int = 2, bias: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.o = nn.Linear(dim, dim, bias=bias)
        self.gate, self.up = nn.Linear(dim, 24, bias=bias), nn.Linear(dim, 24, bias=bias)
        self.down = nn.Linear(24, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        n = self.norm1(x)
        q, k, v = (
            f(n).view(b, s, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, -1))
        n = self.norm2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    """Embedding, layers, norm and head; returns the loss and, if asked, the logits."""

    def __init__(
        self, layers: int = 1, vocab: int = 20, logits: bool = False, **layer: Any
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 16, padding_idx=3)
        self.layers = nn.ModuleList(Layer(**layer) for _ in range(layers))
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, vocab, bias=False)
        self.logits = logits

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=0, label_smoothing=0.1
        )
        return (loss, logits) if self.logits else (loss,)


MEGATRON = {
    "*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise",
    "*.gate": "colwise", "*.up": "colwise", "*.down": "rowwise",
    "embed": "embedding_rowwise", "head": "colwise_gather_output",
}  # fmt: skip
SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm*": SequenceParallel(), "norm": SequenceParallel(),
    "*.q": ColwiseParallel(), "*.k": ColwiseParallel(), "*.v": ColwiseParallel(),
    "*.o": RowwiseParallel(output_layouts=Shard(1)),
    "*.gate": ColwiseParallel(), "*.up": ColwiseParallel(),
    "*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip


PAIR = {"enter": "colwise", "leave": "rowwise"}


def plan_of(
    module: nn.Module,
    tp_plan: Any,
    inputs: tuple[Tensor, ...],
    mesh: tuple[tuple[int, ...], tuple[str, ...]] = SHARD_TP,
    **policy: Any,
) -> Plan:
    """Plans on a fake mesh; graphs are made and proved."""
    options = {"backend": "aot_eager", "dynamic": False, "reshard_after_forward": True, **policy}
    shape, names = mesh
    with fake_world(math.prod(shape)):
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan = hp_compile.plan(module, device_mesh, Policy(tp_plan=tp_plan, **options), args=inputs)
        plan.collectives  # noqa: B018  the graphs are made while the groups exist
    plan.verify()
    return plan


def tokens(group: int, vocab: int = 20, shape: tuple[int, int] = (2, 8)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(group)
    return [torch.randint(0, vocab, shape, generator=generator) for _ in range(2)]


def vectors(*shape: int) -> Callable[[int], list[Tensor]]:
    return lambda group: [torch.randn(shape, generator=torch.Generator().manual_seed(group))]


def check(
    module: nn.Module,
    tp_plan: Any,
    data: Callable[[int], list[Tensor]],
    mesh: tuple[tuple[int, ...], tuple[str, ...]] = SHARD_TP,
    **policy: Any,
) -> Plan:
    """Plans, proves, runs all ranks, and compares them with one device."""
    plan = plan_of(module, tp_plan, tuple(data(0)), mesh, **policy)

    def call(copied: nn.Module, *inputs: Tensor) -> Any:
        found = copied(*inputs)
        return found if isinstance(found, tuple) else (found,)

    all_ranks.run(module, plan, data, call).check()
    return plan


def of_the_model(plan: Plan) -> str:
    """The collectives of the model's own computation, one a line."""
    return "\n".join(
        f"{c.phase} {c.kind} {c.module or '(root)'}"
        for c in plan.collectives
        if c.purpose == "tp" and not c.params
    )


def seeded(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


class TestCollectivesOfOneLayer(expecttest.TestCase):
    """Megatron's minimum: two all-reduces a layer and direction, or as many pairs of the same bytes."""

    def test_tensor_parallel(self) -> None:
        plan = check(seeded(Model), MEGATRON, tokens)
        self.assertExpectedInline(
            of_the_model(plan),
            """\
forward all_reduce embed
forward all_reduce layers.0.o
forward all_reduce layers.0.down
forward all_reduce (root)
forward all_reduce (root)
backward all_reduce head
backward all_reduce layers.0.gate
backward all_reduce layers.0.q""",
        )
        assert not [c for c in plan.collectives if c.purpose == "tp" and c.params]
        assert plan.notes == ()

    def test_sequence_parallel(self) -> None:
        plan = check(seeded(Model), SEQUENCE, tokens)
        self.assertExpectedInline(
            of_the_model(plan),
            """\
forward reduce_scatter embed
forward all_gather layers.0.q
forward reduce_scatter layers.0.o
forward all_gather layers.0.gate
forward reduce_scatter layers.0.down
forward all_gather head
forward all_reduce (root)
forward all_reduce (root)
backward reduce_scatter head
backward all_gather layers.0.down
backward reduce_scatter layers.0.gate
backward all_gather layers.0.o
backward reduce_scatter layers.0.q
backward all_gather embed""",
        )
        summed = {f for c in plan.collectives if c.purpose == "tp" for f in c.params}
        assert summed == {f for f in plan.params if "norm" in f}
        assert {f for f, p in plan.params.items() if p.sum_axes} == summed
        assert (
            "summed over tp(2), of which each rank has a term" in plan.params["norm.weight"].reason
        )

    @pytest.mark.slow
    def test_bytes_are_the_same(self) -> None:
        sent = {}
        for name, tp_plan in (("tp", MEGATRON), ("sp", SEQUENCE)):
            layers = (1, 2)
            plans = [
                plan_of(seeded(lambda n=n: Model(n)), tp_plan, tuple(tokens(0))) for n in layers
            ]
            totals = [
                sum(c.nbytes for c in plan.collectives if c.purpose == "tp" and not c.params)
                for plan in plans
            ]
            sent[name] = totals[1] - totals[0]
        assert sent["tp"] == sent["sp"]


def test_strings_say_sequence_parallel_too() -> None:
    """Sums of row-wise strings leave as parts of the sequence where another string asks for it."""
    strings = {
        **MEGATRON,
        "*.norm1": "sequence_parallel",
        "*.norm2": "sequence_parallel",
        "norm": "sequence_parallel",
    }
    plan = check(seeded(Model), strings, tokens)
    assert of_the_model(plan) == of_the_model(plan_of(seeded(Model), SEQUENCE, tuple(tokens(0))))
    assert plan.notes == ()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sequence_that_does_not_divide_stays_whole_and_the_plan_says_so(dynamic: bool) -> None:
    odd = functools.partial(tokens, shape=(2, 7))
    plan = check(seeded(Model), SEQUENCE, odd, TP, dynamic=dynamic)
    kinds = {line.split()[1] for line in of_the_model(plan).splitlines()}
    assert kinds == {"all_reduce"}
    (note,) = plan.notes
    assert "dim 1" in note and "length 7" in note and "2 ranks" in note and "layers.*.o" in note


def test_ranks_that_do_the_same_are_reported() -> None:
    plan = plan_of(seeded(Model), None, tuple(tokens(0)))
    (note,) = plan.notes
    assert "mesh dim 'tp'" in note and "cuts no parameter" in note and "Policy.tp_plan" in note
    with pytest.raises(PolicyError, match=r"loss_parallel: .*tp_plan"):
        plan_of(seeded(Model), None, tuple(tokens(0)), loss_parallel=True)


@pytest.mark.parametrize(
    ("tp_plan", "model", "words"),
    [
        ({"enter": "colwise"}, lambda: Through(F.gelu), "its weight is whole; a row-wise style"),
        (
            MEGATRON,
            lambda: Model(heads=2, kv_heads=1),
            "its heads (2, 1, 1) do not divide over 2 ranks",
        ),
        (PAIR, lambda: Through(lambda h: h.sort(-1).values), "it has no rule for parts"),
        (PAIR, lambda: Through(lambda h: h.softmax(-1)), "it mixes what the ranks hold apart"),
    ],
)
def test_notes_say_why_a_value_is_gathered(tp_plan: Any, model: Any, words: str) -> None:
    inputs = tokens(0) if tp_plan is MEGATRON else vectors(2, 3, 6)(0)
    plan = plan_of(seeded(model), tp_plan, tuple(inputs), TP)
    assert any(words in note for note in plan.notes), plan.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [TP, ((2, 2), ("tp", "dp_shard")), ((2, 2), ("dp_replicate", "tp"))]
)
@pytest.mark.parametrize("tp_plan", [MEGATRON, SEQUENCE], ids=["tensor", "sequence"])
def test_meshes(tp_plan: Any, mesh: Any) -> None:
    check(seeded(lambda: Model(bias=True)), tp_plan, tokens, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("tp_plan", [MEGATRON, SEQUENCE], ids=["tensor", "sequence"])
@pytest.mark.parametrize(
    ("mesh", "policy"),
    [
        (((2, 2, 2), ("dp_replicate", "dp_shard", "tp")), {}),
        (((4, 2), ("dp_shard", "tp")), {"reshard_after_forward": 2}),
        (((4, 2), ("dp_shard", "tp")), {"reshard_after_forward": False, "bucket_mb": 0}),
        (((3, 2), ("dp_shard", "tp")), {"dynamic": None}),
        (((2, 2), ("dp_shard", "tp")), {"dynamic": True}),
        (((2, 4), ("dp_shard", "tp")), {"enable_param_shard": False}),
    ],
)
def test_meshes_and_policies(tp_plan: Any, mesh: Any, policy: dict[str, Any]) -> None:
    check(seeded(lambda: Model(kv_heads=4)), tp_plan, tokens, mesh, **policy)


def test_loss_parallel_sees_no_full_vocabulary() -> None:
    plan = check(seeded(lambda: Model(vocab=28)), MEGATRON, lambda g: tokens(g, 28), TP)
    for graph in plan.graphs.values():
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                assert 28 not in value.shape, node.format_node()
    kept = plan_of(
        seeded(lambda: Model(vocab=28, logits=True)),
        MEGATRON,
        tuple(tokens(0, 28)),
        TP,
        loss_parallel=True,
    )
    shapes = [
        tuple(n.meta["val"].shape)
        for g in kept.graphs.values()
        for n in g.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    ]
    assert not [shape for shape in shapes if 28 in shape]
    assert kept.fingerprint != plan.fingerprint


def test_logits_are_gathered_for_the_caller_only() -> None:
    plan = check(seeded(lambda: Model(logits=True)), MEGATRON, tokens, TP)
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert [c.phase for c in gathers] == ["forward"]


# ------------------------------------------------------------------ single operators


class Through(nn.Module):
    """``function`` between a column-cut and a row-cut projection."""

    def __init__(self, function: Callable[[Tensor], Tensor], middle: int = 8, out: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, middle), nn.Linear(out, 5)
        self.function = function
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.function(self.enter(x)))


ON_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "chain": lambda h: torch.tanh(h).square().clamp(max=0.5) + h.sigmoid(),
    "cast": lambda h: h.double().exp().float(),
    "heads": lambda h: h.unflatten(-1, (4, 2)).transpose(1, 2).flatten(2).reshape(2, 4, 3, 2).transpose(1, 2).flatten(2),
    "softmax over rows": lambda h: h.softmax(1),
    "mean over features": lambda h: h - h.mean(-1, keepdim=True),
    "sum over features": lambda h: h * h.sum(-1, keepdim=True).tanh(),
    "rms": lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "cumsum over rows": lambda h: h.cumsum(1),
    "repeat heads": lambda h: h.unflatten(-1, (4, 2)).repeat_interleave(2, -2)[..., :1].flatten(-2),
    "stack": lambda h: torch.stack([h, h * 2], 0).sum(0),
    "cat rows": lambda h: torch.cat([h, -h], 1).unflatten(1, (2, -1)).sum(1),
    "einsum": lambda h: torch.einsum("bsh,bth->bsth", h, h * 2).sum(2),
    "expand": lambda h: h.unsqueeze(2).expand(-1, -1, 3, -1).sum(2),
    "squeeze": lambda h: h.unsqueeze(0).unsqueeze(2).squeeze(),
    "permute": lambda h: h.permute(2, 0, 1).movedim(0, -1),
    "pad rows": lambda h: F.pad(h, (0, 0, 1, 0))[:, 1:],
    "unbind rows": lambda h: torch.stack(h.unbind(1), 1),
    "in place": lambda h: h.clone().mul_(2.0).add_(1.0),
    "select": lambda h: h * h[:, :1],
    "outer": lambda h: (h.unsqueeze(-1) @ h.unsqueeze(-2).detach()).sum(-1),
}  # fmt: skip
GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over features": lambda h: h.softmax(-1),
    "sort": lambda h: h.sort(-1).values,
    "slice of features": lambda h: torch.cat([h[..., 4:], h[..., :4]], -1),
    "chunk of features": lambda h: torch.cat([c * (i + 1) for i, c in enumerate(h.chunk(2, -1))], -1),
    "flip features": lambda h: h.flip(-1),
    "heads that do not divide": lambda h: h.unflatten(-1, (1, 8)).transpose(1, 2).flatten(2).view(2, 3, 8),
    "variance": lambda h: h / (1 + h.var(-1, keepdim=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in ON_PARTS if n != "outer"])
def test_operators_on_parts(name: str) -> None:
    plan = check(seeded(lambda: Through(ON_PARTS[name])), PAIR, vectors(2, 3, 6), TP)
    assert plan.notes == (), name
    assert {c.kind for c in plan.collectives} <= {"all_reduce"}, name


class Uses(Through):
    """Something of the whole input, or of a whole parameter, that looks at a cut value."""

    def __init__(self, use: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__(F.gelu)
        self.one, self.bare = nn.Parameter(torch.tensor([1.5])), nn.Parameter(torch.tensor(0.7))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.leave(F.gelu(h)) + self.use(self, x, h)


ONLY_LOOKED_AT: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "type_as of one column": lambda m, x, h: x[..., :1].type_as(h).logsumexp(-1, keepdim=True),
    "type_as of a parameter": lambda m, x, h: m.one.type_as(h).norm() * m.bare.type_as(h),
    "type_as of a mask": lambda m, x, h: 1 / ((x[..., :1] > 0).type_as(h).sum() + 1),
    "type_as of a weight": lambda m, x, h: m.leave(m.enter(x.type_as(m.enter.weight))).mean(1, keepdim=True),
    "type_as of as many columns": lambda m, x, h: m.scale.type_as(h).prod() + x.mean(-1, keepdim=True),
    "to of another": lambda m, x, h: x[..., :1].to(h).prod(-1, keepdim=True),
    "expand_as": lambda m, x, h: x[..., :1].expand_as(h).sum(-1, keepdim=True),
    "new_ones": lambda m, x, h: (h.new_ones(h.shape) * m.bare).sum(-1, keepdim=True),
    "new_full": lambda m, x, h: h.new_full((3, 1), 2.0) * m.bare,
    "zeros_like": lambda m, x, h: (torch.zeros_like(h) + m.bare).mean(-1, keepdim=True),
    "constant mask": lambda m, x, h: x[:, torch.tensor([True, False, True])].sum(1, keepdim=True)[..., :1],
    "constant index": lambda m, x, h: m.leave.weight[torch.tensor([1, 2]), :].sum() + x[..., :1],
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY_LOOKED_AT)
def test_values_of_which_only_dtype_or_size_is_read(name: str) -> None:
    check(seeded(lambda: Uses(ONLY_LOOKED_AT[name])), PAIR, vectors(2, 3, 6), TP)


def test_constant_numbers_in_a_cut_vocabulary() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(torch.tanh(x + self.embed(torch.tensor([3, 5, 1]))))
            return F.cross_entropy(y.flatten(0, 1), torch.tensor([1, 7, -100, 0, 2, 4]))

    plan = {"embed": "embedding_rowwise", "head": "colwise"}
    check(seeded(Fixed), plan, vectors(2, 3, 6), TP)


def test_a_product_of_a_cut_value_with_itself_is_gathered() -> None:
    check(seeded(lambda: Through(ON_PARTS["outer"])), PAIR, vectors(2, 3, 6), TP)


@pytest.mark.parametrize("name", list(GATHERED))
def test_operators_without_a_rule_are_gathered_and_the_plan_says_so(name: str) -> None:
    plan = check(seeded(lambda: Through(GATHERED[name])), PAIR, vectors(2, 3, 6), TP)
    assert any("gathered for" in note for note in plan.notes), name
    assert "tensor parallel:" in plan.dump()


def test_packed_projections() -> None:
    def swiglu(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    def by_view(h: Tensor) -> Tensor:
        gate, up = h.unflatten(-1, (2, -1)).unbind(-2)
        return F.silu(gate) * up

    def by_slice(h: Tensor) -> Tensor:
        return F.silu(h[..., :8]) * h[..., 8:]

    packed = {"enter": "packed_colwise", "leave": "rowwise"}
    for function in (swiglu, by_view, by_slice):
        plan = check(seeded(lambda f=function: Through(f, 16)), packed, vectors(2, 3, 6))
        assert plan.notes == ()
        assert {c.kind for c in plan.collectives if c.purpose == "tp"} == {"all_reduce"}


def test_a_whole_parameter_used_in_both_ways() -> None:
    """Its gradient is a term on one path and whole on the other; it is summed where it is a term only."""

    class Both(Through):
        def forward(self, x: Tensor) -> Tensor:
            h = self.enter(x) * self.scale
            return self.leave(h) + self.scale.sum() * x.mean()

    plan = check(seeded(lambda: Both(F.gelu)), PAIR, vectors(2, 3, 6), TP)
    assert plan.params["scale"].sum_axes == ()


def test_a_cast_whole_parameter_is_summed_once() -> None:
    class Cast(Through):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.enter(x).unflatten(-1, (2, 4)) * (1.0 + self.scale[:4].double()).float()
            return self.leave(rows.flatten(-2))

    plan = check(seeded(lambda: Cast(F.gelu)), PAIR, vectors(2, 3, 6))
    assert plan.params["scale"].sum_axes == ("tp",)


def test_dropout_draws_the_mask_of_one_device() -> None:
    class Dropped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            n = self.norm1(x)
            q, k, v = (
                f(n).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            return x + self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), 0.5))

    module = seeded(lambda: Dropped(kv_heads=4))
    styles = {k.removeprefix("*."): v for k, v in MEGATRON.items() if "." in k}
    plan = plan_of(module, styles, (torch.randn(2, 8, 16),))
    assert plan.notes == ()
    forward = plan.graphs["forward"].graph
    drawn = [tuple(n.args[0].meta["val"].shape) for n in forward.nodes if "random" in n.meta]
    assert drawn == [(2, 4, 8, 8), (2, 8, 24)]  # of the whole value, on every rank
    assert len([n for n in forward.nodes if "take_chunk" in str(n.target)]) == 2


def test_unequal_packed_projection_is_gathered() -> None:
    style = TensorParallelStyle(name="qkv", weight="packed_colwise", blocks=4)

    def split(h: Tensor) -> Tensor:
        q, k, v = h.split([8, 4, 4], -1)
        return q * torch.cat([k, v], -1)

    check(
        seeded(lambda: Through(split, 16)),
        {"enter": style, "leave": "rowwise"},
        vectors(2, 3, 6),
        TP,
    )


def test_prepare_module_input_gathers_once() -> None:
    plan = check(
        seeded(Model),
        {
            **SEQUENCE,
            "layers.*": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            ),
        },
        tokens,
        TP,
    )
    assert (
        len([c for c in plan.collectives if c.kind == "all_gather" and c.phase == "forward"]) == 4
    )


def test_writing_into_a_cut_value_is_refused() -> None:
    def write(h: Tensor) -> Tensor:
        h = h.clone()
        h[..., 1:3].mul_(0.5)
        return h

    with pytest.raises(
        CaptureError,
        match=r"writes into a part of a value that the tensor-parallel plan cuts \(.*test_tensor_parallel",
    ):
        plan_of(seeded(lambda: Through(write)), PAIR, (torch.randn(2, 3, 6),), TP)
