"""Programs of small models on many meshes and policies, built without process groups, and run on all ranks in lockstep."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from hp_compile import pipeline
from hp_compile.build import reshard_map
from hp_compile.capture import Captured, capture
from hp_compile.parallel import parallel_forward, with_partial_gradients
from hp_compile.program import Program, Reduction
from hp_compile.signature import Signature, flatten_call
from hp_compile.units import resolve_units
from hyper_parallel.mesh import MeshLayout, infer_roles
from hyper_parallel.plan import ParamPlan, plan_params
from hyper_parallel.policy import Policy
from hyper_parallel.tensor_parallel import TensorParallelPlan, resolve_tp_plan
from passes.base import (
    BufferInput,
    ParamGrad,
    ParamInput,
    SavedInput,
    SavedOutput,
    TangentInput,
    UserInput,
    UserOutput,
    info,
    inputs,
    outputs,
)
from passes.tensor_parallel import Parallelised
from passes.verify import verify_parallel
from tests import lockstep
from tests.all_ranks import data_group, own_part, without_padding
from tests.models import CASES

Graphs = dict[str, fx.GraphModule]
#: Changes the tensor-parallel forward before it is differentiated.
Change = Callable[[Parallelised], Parallelised]


def _columns(param: torch.nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model on one mesh under one policy.

    Attributes:
        model: Key in `CASES`.
        shape: Mesh shape.
        names: Mesh dim names.
        policy: Fields of the policy.
        variant: Backward variant.
        divide: Gradient divide factor.
        gathered: Gathers are in the programs.
    """

    model: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    policy: tuple[tuple[str, Any], ...] = ()
    variant: str = "sync"
    divide: float | None = None
    gathered: bool = True

    def __str__(self) -> str:
        mesh = ",".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))
        fields = ",".join(f"{k}={_short(v)}" for k, v in self.policy)
        more = "" if self.variant == "sync" else f" {self.variant}"
        more += "" if self.divide is None else f" /{self.divide:g}"
        more += "" if self.gathered else " unsharded weights"
        return f"{self.model} on ({mesh}) {fields}{more}".strip()


def _short(value: Any) -> str:
    if isinstance(value, MixedPrecisionPolicy):
        dtypes = (value.param_dtype, value.reduce_dtype)
        return "/".join(str(d).removeprefix("torch.") for d in dtypes)
    plans = {"tensor": TENSOR_PARALLEL, "sequence": SEQUENCE_PARALLEL, "few modules": FEW_MODULES}
    plans["two layers"] = TWO_LAYERS
    for name, plan in plans.items():
        if value == tuple(plan.items()):
            return name
    return getattr(value, "__name__", str(value))


SHARD = ((4,), ("dp_shard",))
HSDP = ((2, 2), ("dp_replicate", "dp_shard"))
FSDP_TP = ((2, 2), ("dp_shard", "tp"))
DDP_TP = ((2, 2), ("dp_replicate", "tp"))
PURE_TP = ((2,), ("tp",))
DDP = ((4,), ("dp_replicate",))
TWO = ((2, 2), ("dp_shard", "cp"))
THREE = ((3,), ("dp_shard",))
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
DOUBLE = MixedPrecisionPolicy(reduce_dtype=torch.float64)

TENSOR_PARALLEL: dict[str, str] = {
    "embed": "embedding_rowwise",
    "*.q": "colwise",
    "*.k": "colwise",
    "*.v": "colwise",
    "*.o": "rowwise",
    "*.gate": "colwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    "head": "colwise_gather_output",
}
SEQUENCE_PARALLEL = {
    **TENSOR_PARALLEL,
    "*.norm1": "sequence_parallel",
    "*.norm2": "sequence_parallel",
}
FEW_MODULES = {"blocks.0.mlp.up": "colwise", "blocks.1.attention.o": "rowwise"}
TWO_LAYERS = {"inner": "colwise", "outer": "rowwise"}
SMALL_TP = ("two_biases", "unused", "scalar", "batch_norm", "int_buffers")


def tp_settings() -> list[Setting]:
    """Tensor and sequence parallelism, with and without FSDP."""
    plans = (TENSOR_PARALLEL, SEQUENCE_PARALLEL, FEW_MODULES)
    found = [
        Setting("lm", *mesh, (("tp_plan", tuple(plan.items())),))
        for plan in plans
        for mesh in (FSDP_TP, DDP_TP, PURE_TP)
    ]
    tensor, sequence = (("tp_plan", tuple(p.items())) for p in plans[:2])
    for fields in (
        (tensor, ("mp_policy", BF16)),
        (sequence, ("mp_policy", DOUBLE)),
        (sequence, ("reshard_after_forward", False)),
        (sequence, ("bucket_mb", 0)),
    ):
        found.append(Setting("lm", *FSDP_TP, fields))
    found.append(Setting("lm_tied", *FSDP_TP, (tensor,)))
    three = ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"))
    found.append(Setting("lm", *three, (sequence,)))
    found.append(Setting("lm", *three, (sequence,), "scatter"))
    layers = ("tp_plan", tuple(TWO_LAYERS.items()))
    found += [Setting(model, *mesh, (layers,)) for model in SMALL_TP for mesh in (FSDP_TP, PURE_TP)]
    found += [
        Setting("two_biases", *FSDP_TP, (layers, extra))
        for extra in (("mp_policy", BF16), ("mp_policy", DOUBLE), ("reduce_op", "sum"))
    ]
    return found


def settings() -> list[Setting]:
    """Every model on every mesh, and the policies that change programs on a few models."""
    found = [Setting(m, *mesh) for m in CASES for mesh in (SHARD, HSDP, DDP, TWO, THREE)]
    wide = ((2, 3), ("dp_shard", "cp"))
    both = ("roles", (("shard", ("dp_shard", "cp")),))
    for model in ("uneven", "lm", "frozen", "tied", "scalar"):
        for fields in (
            (("reshard_after_forward", 2),),
            (("reshard_after_forward", False),),
            (("reshard_after_forward", True),),
            (("bucket_mb", 0),),
            (("bucket_mb", 1000.0),),
            (("shard_placement_fn", _columns),),
            (("reduce_op", "sum"),),
            (("enable_param_shard", False),),
            (("mp_policy", BF16),),
            (("mp_policy", DOUBLE),),
            (("min_shard_numel", 20),),
        ):
            found.append(Setting(model, *SHARD, fields))
            if fields[0][0] in ("bucket_mb", "mp_policy", "reduce_op", "shard_placement_fn"):
                found.append(Setting(model, *HSDP, fields))
        found.append(Setting(model, *SHARD, (("mp_policy", FP16),)))
        found.append(Setting(model, *HSDP, (("mp_policy", FP16),)))
        found.append(Setting(model, *wide, (both,)))
        found.append(Setting(model, *wide, (both, ("shard_placement_fn", _columns))))
        for variant in ("scatter", "none"):
            found.append(Setting(model, *HSDP, (), variant))
            found.append(Setting(model, *HSDP, (("mp_policy", BF16),), variant))
        found.append(Setting(model, *HSDP, (), divide=3.0))
        found.append(Setting(model, *HSDP, (), gathered=False))
    return found + tp_settings()


# ------------------------------------------------------------------ building


@functools.cache
def _capture(model: str, precision: MixedPrecisionPolicy) -> tuple[Captured, Signature]:
    return _captured(model, precision, None)


def _captured(
    model: str, precision: MixedPrecisionPolicy, parallel: Any
) -> tuple[Captured, Signature]:
    case = CASES[model]
    module = case.make()
    signature, tensors = flatten_call((case.batch(0, 0)[0],), {})
    captured = capture(
        module,
        signature,
        tensors,
        original_class=type(module),
        device=torch.device("cpu"),
        precision=precision,
        unit_modules=resolve_units(module, "auto").modules,
        grad=True,
        dynamic=tuple(frozenset() for _ in tensors),
        decompositions={},
        parallel=parallel,
    )
    return captured, signature


def layout_of(setting: Setting) -> MeshLayout:
    """The mesh seen from rank 0."""
    roles: Any = dict(dict(setting.policy).get("roles", ())) or None
    names, found = infer_roles(setting.names, setting.shape, roles)
    return MeshLayout(names, setting.shape, tuple(range(math.prod(setting.shape))), 0, found)


def policy_of(setting: Setting) -> Policy:
    """The policy object."""
    fields = dict(setting.policy)
    for name in ("roles", "tp_plan"):
        if name in fields:
            fields[name] = dict(fields[name])
    return Policy(backend="aot_eager", **fields)


def build(setting: Setting, change: Change | None = None, *, prove: bool = True) -> Graphs:
    """Forward and backward program; the capture of a model that no tensor parallelism changes is made once and shared.

    Args:
        setting: What to build.
        change: Changes the tensor-parallel forward before it is differentiated.
        prove: Prove that forward.
    """
    policy, layout = policy_of(setting), layout_of(setting)
    module = CASES[setting.model].make()
    tp = resolve_tp_plan(module, policy.tp_plan, layout)
    plans = plan_params(module, layout, policy, mp=tp.by_axis if tp else None)
    units = resolve_units(module, "auto")
    if tp is None:
        captured, signature = _capture(setting.model, policy.mp_policy)
    else:
        parallel = _parallel(tp, plans, layout, change, prove)
        captured, signature = _captured(setting.model, policy.mp_policy, parallel)
    steps = pipeline.capture_steps(
        layout=layout,
        params=with_partial_gradients(plans, layout, tp, captured.partial),
        units=units.of,
        unit_order=units.order,
    )
    gm = pipeline.run(copy.deepcopy(captured.gm), steps)
    program = Program(
        dataclasses.replace(captured, gm=gm),
        signature,
        policy,
        reshard_map(policy, units),
        setting.gathered,
    )
    reduction = Reduction(setting.variant, policy.reduce_op, setting.divide)
    return {"forward": program.forward, "backward": program.backward(reduction)}


def _parallel(
    tp: TensorParallelPlan,
    plans: Mapping[str, ParamPlan],
    layout: MeshLayout,
    change: Change | None,
    prove: bool,
) -> Callable[[fx.GraphModule, Any], Parallelised]:
    correct = parallel_forward(tp, plans, layout)
    assert correct is not None

    def run(forward: fx.GraphModule, mode: Any) -> Parallelised:
        made = correct(forward, mode)
        if change is not None:
            with mode, torch.no_grad():
                made = change(made)
        if prove:
            verify_parallel(made)
        return made

    return run


# ------------------------------------------------------------------ running


Results = dict[str, list[torch.Tensor]]


def simulate(graphs: Mapping[str, fx.GraphModule]) -> Results:
    """Run forward and backward of a program on every rank of its mesh; weights and data come from its setting."""
    forward, backward = graphs["forward"], graphs["backward"]
    program = info(forward)
    setting: Setting = forward.meta["setting"]
    layout, world = program.layout, len(program.layout.ranks)
    layouts = [dataclasses.replace(layout, rank=rank) for rank in layout.ranks]
    module = CASES[setting.model].make()
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    captured, _ = _capture(setting.model, policy_of(setting).mp_policy)
    data = [CASES[setting.model].batch(data_group(one), 0)[0] for one in layouts]
    feed: list[lockstep.Ranks] = []
    role: Any
    for node, role in inputs(forward):
        if isinstance(role, ParamInput):
            full = params[role.fqn].detach().to(node.meta["val"].dtype)
            plan = program.params[role.fqn]
            if not setting.gathered:
                plan = dataclasses.replace(plan, shard_dim=None)
            feed.append([own_part(full, plan, one, pad=True) for one in layouts])
        elif isinstance(role, BufferInput):
            value = captured.constants.get(role.fqn)
            feed.append([(buffers[role.fqn] if value is None else value).clone()] * world)
        else:
            assert isinstance(role, UserInput)
            feed.append([x.clone() for x in data])
    found = lockstep.run(forward, feed, layout)
    results: Results = {}
    saved: dict[int, lockstep.Ranks] = {}
    for position, _, role in outputs(forward):
        if isinstance(role, SavedOutput):
            saved[role.index] = found[position]
        elif isinstance(role, UserOutput):
            results[f"output {role.index}"] = found[position]
    return {**results, **_simulate_backward(backward, saved, layout)}


def _simulate_backward(
    backward: fx.GraphModule, saved: Mapping[int, lockstep.Ranks], layout: MeshLayout
) -> Results:
    program = info(backward)
    layouts = [dataclasses.replace(layout, rank=rank) for rank in layout.ranks]
    feed: list[lockstep.Ranks] = []
    role: Any
    for node, role in inputs(backward):
        if isinstance(role, SavedInput):
            feed.append(saved[role.index])
        else:
            assert isinstance(role, TangentInput)
            feed.append([tangent(node.meta["val"], data_group(one)) for one in layouts])
    found = lockstep.run(backward, feed, layout)
    results: Results = {}
    for position, node, role in outputs(backward):
        if isinstance(role, ParamGrad) and node is not None:
            plan = program.params[role.fqn]
            results[role.fqn] = [
                _real_rows(value, plan, layout, rank) for rank, value in enumerate(found[position])
            ]
    return results


def tangent(like: torch.Tensor, rank: int) -> torch.Tensor:
    """A gradient of the loss that differs per rank."""
    generator = torch.Generator().manual_seed(77 + rank)
    return torch.randn(tuple(int(s) for s in like.shape), generator=generator).to(like.dtype)


def _real_rows(value: torch.Tensor, plan: ParamPlan, layout: MeshLayout, rank: int) -> torch.Tensor:
    padded = plan.shard_dim is not None and tuple(value.shape) == plan.padded_shard_shape
    return without_padding(value, plan, rank, layout) if padded else value


def unsharded_gradients(setting: Setting) -> dict[str, torch.Tensor]:
    """Mean over all data of plain autograd's gradients, from the same data and tangents."""
    total: dict[str, torch.Tensor] = {}
    layout = layout_of(setting)
    groups = {data_group(dataclasses.replace(layout, rank=rank)) for rank in layout.ranks}
    for group in groups:
        module = CASES[setting.model].make()
        output = module(CASES[setting.model].batch(group, 0)[0])
        output.backward(tangent(output, group))
        for fqn, param in module.named_parameters():
            if param.grad is not None:
                total[fqn] = total.get(fqn, 0) + param.grad / len(groups)
    return total


def full_gradient(shards: list[torch.Tensor], plan: ParamPlan, layout: MeshLayout) -> torch.Tensor:
    """The whole gradient from everybody's part, from rank 0's group."""
    if plan.shard_dim is None or plan.shard_size == 1:
        return shards[0]
    group = lockstep.group_ranks(layout.group_name(plan.shard_axes), layout)[0]
    return torch.cat([shards[r] for r in group], plan.shard_dim)


def differs(found: Callable[[], Results], wanted: Results) -> str:
    """Why results differ from the correct ones; empty if they do not. A program that cannot run differs."""
    try:
        results = found()
    except Exception as error:  # any failure counts
        return f"{type(error).__name__}"
    if results.keys() != wanted.keys():
        return "other outputs"
    for name, values in wanted.items():
        for rank, (a, b) in enumerate(zip(results[name], values, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{name} has another shape or dtype"
            low = b.dtype in (torch.bfloat16, torch.float16)
            tolerance = {"rtol": 2e-3, "atol": 1e-4} if low else {"rtol": 2e-5, "atol": 1e-6}
            if not torch.allclose(a, b, **tolerance):
                return f"{name} on rank {rank}"
    return ""
