"""Tensor-parallel plans: which parameter is cut how, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from hyper_parallel.errors import PlacementError, PolicyError
from hyper_parallel.mesh import MeshLayout, infer_roles
from hyper_parallel.plan import plan_params
from hyper_parallel.policy import Policy
from hyper_parallel.tensor_parallel import (
    ModuleBoundary,
    TensorParallelPlan,
    TensorParallelStyle,
    known_styles,
    resolve_tp_plan,
)
from hyper_parallel.torch_compat.distributed import strided_shard


def layout(
    shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("dp_shard", "tp")
) -> MeshLayout:
    world = 1
    for size in shape:
        world *= size
    names, roles = infer_roles(names, shape, None)
    return MeshLayout(names, shape, tuple(range(world)), 0, roles)


class Conv1D(nn.Module):
    """A projection with its weight as [in, out], as GPT-2 has it."""

    def __init__(self, out: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, out))
        self.bias = nn.Parameter(torch.empty(out))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.o = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.fused = Conv1D(24, 8)
        self.experts = nn.Parameter(torch.empty(4, 16, 8))
        self.act = nn.SiLU()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 32, bias=False)


def resolved(plan: Any, model: nn.Module | None = None, **mesh: Any) -> TensorParallelPlan:
    found = resolve_tp_plan(model or Model(), Policy(tp_plan=plan).tp_plan, layout(**mesh))
    assert found is not None
    return found


def test_no_plan_is_no_plan() -> None:
    assert resolve_tp_plan(Model(), None, layout()) is None


@pytest.mark.parametrize(
    ("plan", "placements"),
    [
        ({"layers.0.q": "colwise"}, {"layers.0.q.weight": Shard(0), "layers.0.q.bias": Shard(0)}),
        ({"layers.0.q": ColwiseParallel()}, {"layers.0.q.weight": Shard(0), "layers.0.q.bias": Shard(0)}),
        ({"layers.0.q": "rowwise"}, {"layers.0.q.weight": Shard(1)}),
        ({"layers.0.q": RowwiseParallel()}, {"layers.0.q.weight": Shard(1)}),
        ({"embed": "embedding_rowwise"}, {"embed.weight": Shard(0)}),
        ({"embed": RowwiseParallel()}, {"embed.weight": Shard(0)}),
        ({"embed": "embedding_colwise"}, {"embed.weight": Shard(1)}),
        ({"layers.0.norm": "sequence_parallel"}, {}),
        ({"layers.0.norm": "replicated_with_grad_allreduce"}, {}),
        ({"layers.0.fused": "colwise"}, {"layers.0.fused.weight": Shard(1), "layers.0.fused.bias": Shard(0)}),
        ({"layers.0.fused": "rowwise"}, {"layers.0.fused.weight": Shard(0)}),
        (
            {"layers.0.fused": TensorParallelStyle(name="qkv", weight="packed_colwise", blocks=3)},
            {"layers.0.fused.weight": strided_shard(1, 3), "layers.0.fused.bias": strided_shard(0, 3)},
        ),
        ({"layers.0.experts": "packed_colwise"}, {"layers.0.experts": strided_shard(1, 2)}),
        ({"layers.0.experts": "rowwise"}, {"layers.0.experts": Shard(2)}),
        ({"*.q": "colwise", "layers.1.q": "replicate"}, {"layers.0.q.weight": Shard(0), "layers.0.q.bias": Shard(0)}),
        ({"*": "replicate", "head": "colwise"}, {"head.weight": Shard(0)}),
    ],
)  # fmt: skip
def test_placements(plan: dict[str, Any], placements: dict[str, Any]) -> None:
    assert resolved(plan).placements == placements


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("ColwiseParallel", r"pass the object ColwiseParallel\(\) of torch"),
        (ColwiseParallel, r"got the class ColwiseParallel; pass an object"),
        (
            TensorParallelStyle(name="qkv", weight="packed_colwise", blocks=3),
            r"\['first'\]: first.weight of shape \(16, 8\).*16 rows are no 3 equal blocks that 2 ranks",
        ),
    ],
)
def test_styles_that_are_none(style: Any, words: str) -> None:
    model = nn.Sequential(collections.OrderedDict(first=nn.Linear(8, 16)))
    with pytest.raises(PolicyError, match=words):
        resolve_tp_plan(model, {"first": style}, layout((2,), ("tp",)))


def test_a_tied_parameter_is_known_by_its_first_name() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    assert resolved({"head": "colwise"}, model).placements == {"embed.weight": Shard(0)}
    both = {"head": "colwise", "embed": "embedding_rowwise"}
    assert resolved(both, model).placements == {"embed.weight": Shard(0)}
    with pytest.raises(
        PolicyError,
        match=r"embed.weight is one parameter under several names.*S\(0\).*S\(1\)|S\(1\).*S\(0\)",
    ):
        resolved({"head": "colwise", "embed": "embedding_colwise"}, model)


@pytest.mark.parametrize(
    ("style", "boundary"),
    [
        ("sequence_parallel", ModuleBoundary(enters=Shard(1))),
        (SequenceParallel(sequence_dim=0), ModuleBoundary(enters=Shard(0))),
        (RowwiseParallel(output_layouts=Shard(1)), ModuleBoundary(leaves=Shard(1))),
        (
            PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            ModuleBoundary(enters=Replicate(), given=Shard(1)),
        ),
        (
            PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}
            ),
            ModuleBoundary(enters=Replicate(), given=Shard(1)),
        ),
        (
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            ModuleBoundary(leaves=Shard(1)),
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=Shard(1),
                desired_input_layouts=Replicate(),
                output_layouts=Replicate(),
                desired_output_layouts=Shard(1),
            ),
            ModuleBoundary(enters=Replicate(), given=Shard(1), leaves=Shard(1)),
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_boundaries(style: Any, boundary: ModuleBoundary) -> None:
    name = "layers.0.o" if isinstance(style, RowwiseParallel) else "layers.0.norm"
    if isinstance(style, PrepareModuleInput | PrepareModuleOutput | PrepareModuleInputOutput):
        name = "layers.0"
    assert resolved({name: style}).boundaries == {name: boundary}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"*.qq": "colwise"}, r"Policy.tp_plan: '\*.qq' matches no module or parameter; "),
        ({"layers.0.k": "colwise"}, r"near it are layers.*layers.0"),
        ({"layers.0.act": "colwise"}, r"'colwise' cuts a matrix, but layers.0.act \(SiLU\) has no weight of its own"),
        ({"layers.0": "rowwise"}, r"layers.0 \(Layer\) has no weight of its own; name the Linear or Embedding inside"),
        ({"layers.0.norm": "colwise"}, r"layers.0.norm \(LayerNorm\) has a weight of shape \(8,\)"),
        ({"embed": "packed_colwise"}, r"embed is an embedding, which has no packed weight"),
        ("auto", r"'auto' takes the model's own plan, but Model has none"),
    ],
)  # fmt: skip
def test_errors(plan: Any, text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        resolved(plan)


@pytest.mark.parametrize(
    ("names", "what"), [(("dp_shard", "cp"), "no dim"), (("dp", "cp"), "no dim")]
)
def test_a_mesh_without_tp(names: tuple[str, ...], what: str) -> None:
    with pytest.raises(
        PolicyError,
        match=rf"Policy.tp_plan: the mesh .* has {what} with role tp; name one dim 'tp'",
    ):
        resolved({"head": "colwise"}, names=names)


def test_a_dim_that_does_not_divide() -> None:
    tp = resolved({"head": "colwise"}, shape=(1, 3))
    with pytest.raises(
        PlacementError,
        match=r"head.weight: dim 0 of shape \(32, 8\) has 32 rows to cut over mesh dim 'tp' of size 3",
    ):
        plan_params(Model(), layout((1, 3)), Policy(), mp=tp.by_axis)


def test_the_models_own_plan() -> None:
    model: Any = Model()
    model._tp_plan = {"layers.*.q": "colwise", "head": "colwise_gather_output", "gone.*": "rowwise"}
    found = resolved("auto", model)
    assert sorted(found.placements) == [
        "head.weight",
        *(f"layers.{i}.q.{n}" for i in (0, 1) for n in ("bias", "weight")),
    ]
    model._tp_plan = {"gone.*": "rowwise"}
    with pytest.raises(PolicyError, match="matches no module"):
        resolved("auto", model)


def test_few_key_heads_stay_whole() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=False) for n in (8, 4, 4))

    @dataclasses.dataclass
    class Config:
        num_key_value_heads: int = 1

    model: Any = nn.ModuleDict({"attention": Attention()})
    model.config = Config()
    model._tp_plan = {"attention.*_proj": "colwise"}
    found = resolved("auto", model)
    assert found.placements == {"attention.q_proj.weight": Shard(0)}
    assert found.notes == (
        "attention.k_proj and 1 more key and value projections stay whole: 1 heads do not divide over 2 ranks",
    )
    model.config.num_key_value_heads = 2
    assert len(resolved("auto", model).placements) == 3
    assert resolved("auto", model).notes == ()


def test_every_string_of_transformers_is_known_or_refused_by_name() -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    known = set(known_styles())
    for name in ALL_PARALLEL_STYLES:
        if name not in known:
            with pytest.raises(PolicyError, match=f"the style '{name}' is not supported"):
                Policy(tp_plan={"*": name})


def test_packed_weights_are_cut_again_on_another_dim() -> None:
    style = TensorParallelStyle(name="qkv", weight="packed_colwise", blocks=3)
    tp = resolved({"layers.0.fused": style})
    plans = plan_params(Model(), layout(), Policy(), mp=tp.by_axis)
    weight, bias = plans["layers.0.fused.weight"], plans["layers.0.fused.bias"]
    assert (weight.shard_dim, weight.reduction) == (0, "RS")
    assert (bias.shard_size, bias.reduction) == (1, "AR")
    assert "cuts it block by block, which leaves no dim to cut again" in bias.reason
    with pytest.raises(
        PlacementError,
        match=r"fused.weight: shard_placement_fn returned Shard\(1\), but the tensor-parallel",
    ):
        plan_params(
            Model(),
            layout(),
            Policy(shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None),
            mp=tp.by_axis,
        )
