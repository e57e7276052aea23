"""Building programs: policy, plans and capture come together here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from hp_compile import pipeline
from hp_compile.capture import Captured, capture
from hp_compile.check import check_call
from hp_compile.explain import Refusal
from hp_compile.lower import Lowered, decompositions, lower
from hp_compile.parallel import notes_of, parallel_forward, with_partial_gradients
from hp_compile.program import Program, Reduction, sizes_of
from hp_compile.signature import Signature, TensorSpec
from hp_compile.units import ROOT_UNIT, Units
from hyper_parallel.errors import CaptureError
from hyper_parallel.mesh import MeshLayout
from hyper_parallel.plan import ParamPlan
from hyper_parallel.policy import Policy
from hyper_parallel.tensor_parallel import TensorParallelPlan
from hyper_parallel.torch_compat import graph as compat
from passes.base import (
    GradInput,
    InputUpdate,
    ParamGrad,
    ParamInput,
    ProgramInfo,
    UserOutput,
    aten,
    emit,
    finish,
    outputs,
    set_info,
)
from passes.origin import record

if TYPE_CHECKING:
    from hp_compile.runtime import Runtime


log = logging.getLogger("hp_compile")


def reshard_map(policy: Policy, units: Units) -> dict[str, bool | int]:
    """``reshard_after_forward`` of every unit; ``None`` keeps the root's weights, as in FSDP2."""
    value = policy.reshard_after_forward
    if value is None:
        return {unit: unit != ROOT_UNIT for unit in units.order}
    return dict.fromkeys(units.order, value)


def build_program(
    module: nn.Module,
    signature: Signature,
    tensors: Sequence[torch.Tensor],
    *,
    original_class: type,
    layout: MeshLayout,
    policy: Policy,
    plans: Mapping[str, ParamPlan],
    units: Units,
    reshard: Mapping[str, bool | int],
    device: torch.device,
    grad: bool,
    all_dims: bool = False,
    gathered: bool = True,
    tensor_parallel: TensorParallelPlan | None = None,
) -> Program:
    """Captures and annotates one program; passes and code generation follow lazily.

    Args:
        module: the user's module, sharded or not.
        signature: signature of the call.
        tensors: its flat tensors.
        original_class: the class whose forward is captured.
        layout: the mesh.
        policy: the policy.
        plans: plan of every parameter.
        units: units of the module.
        reshard: ``reshard_after_forward`` of every unit.
        device: device of the mesh.
        grad: with a backward.
        all_dims: every dim of every input is dynamic, not only the batch dim.
        gathered: gathers are in the graph.
        tensor_parallel: the tensor-parallel plan, if there is one.

    Raises:
        CaptureError: the forward cannot be captured.
        TypeError: the call does not fit the parameters of forward.
    """
    check_call(module, original_class, *signature.rebuild(tensors))
    by_name = dict(module.named_parameters())
    options = dict(
        original_class=original_class,
        device=device,
        precision=policy.mp_policy,
        unit_modules=units.modules,
        grad=grad,
        decompositions=decompositions(policy.backend),
        ignored=frozenset(id(by_name[fqn]) for fqn, plan in plans.items() if plan.ignored),
        parallel=parallel_forward(tensor_parallel, plans, layout, policy.loss_parallel),
    )
    with compat.fast_tracing():
        captured = _capture(module, signature, tensors, policy.dynamic, all_dims, options)
    captured.notes = notes_of(tensor_parallel, captured.gathered, captured.uncut)
    steps = pipeline.capture_steps(
        layout=layout,
        params=with_partial_gradients(plans, layout, tensor_parallel, captured.partial),
        units=units.of,
        unit_order=units.order,
        updates=captured.updates,
    )
    captured.gm = pipeline.run(captured.gm, steps)
    _refuse_changed_inputs(captured.gm, signature)
    return Program(captured, signature, policy, dict(reshard), gathered, sizes_of(tensors))


def _capture(
    module: nn.Module,
    signature: Signature,
    tensors: Sequence[torch.Tensor],
    dynamic: bool | None,
    all_dims: bool,
    options: Mapping[str, Any],
) -> Captured:
    """Captures with as many symbolic sizes as asked for; by default with fewer where forward does not allow them."""
    attempts = [dynamic_dims(tensors, dynamic, all_dims)]
    if dynamic is None:
        attempts += [dynamic_dims(tensors, None, False), dynamic_dims(tensors, False, False)]
    attempts = list(dict.fromkeys(attempts))
    first: CaptureError | None = None
    for dims in attempts:
        try:
            return capture(module, signature, tensors, dynamic=dims, **options)
        except CaptureError as error:
            first = first or error
            cause = error.__cause__
            if (
                cause is None
                or isinstance(cause, Refusal)
                or "DataDependent" in type(cause).__name__
            ):
                raise
            log.info("capture with symbolic sizes failed, trying fewer of them: %s", error)
    assert first is not None
    raise first


def _refuse_changed_inputs(gm: fx.GraphModule, signature: Signature) -> None:
    """An input that requires grad cannot be changed by a program: autograd would not know."""
    tensors = [leaf for leaf in signature.leaves if isinstance(leaf, TensorSpec)]
    for _, _, role in outputs(gm, InputUpdate):
        if tensors[role.index].requires_grad:
            raise CaptureError(
                f"forward changes its input tensor {role.index} in place, and that input requires grad\n"
                "Change a copy (x = x.clone()), or pass the input detached"
            )


def dynamic_dims(
    tensors: Sequence[torch.Tensor], dynamic: bool | None, all_dims: bool
) -> tuple[frozenset[int], ...]:
    """Dims of every input that stay symbolic; sizes 0 and 1 always get their own program.

    Args:
        tensors: the flat tensor inputs.
        dynamic: ``Policy.dynamic``: dim 0 by default, ``True`` all, ``False`` none.
        all_dims: all dims although ``dynamic`` does not ask for it.
    """
    result = []
    for tensor in tensors:
        candidates = range(tensor.dim()) if dynamic or all_dims else range(min(tensor.dim(), 1))
        if dynamic is False:
            candidates = range(0)
        result.append(frozenset(d for d in candidates if int(tensor.shape[d]) > 1))
    return tuple(result)


def reduction_program(
    runtime: Runtime, dtypes: tuple[tuple[str, torch.dtype], ...], reduction: Reduction
) -> Lowered:
    """A program that only reduces: accumulated gradients in, gradients as a step hands them out.

    Args:
        runtime: runtime of the module.
        dtypes: FQN and dtype of every gradient, in registration order.
        reduction: variant and factors.
    """
    key = ("reduction", dtypes, reduction)
    cache: dict[Any, Lowered] = runtime.reductions
    if key not in cache:
        mode = compat.fake_mode()
        gm = _grads_only(runtime, dtypes, reduction.variant == "replicate", mode)
        steps = [
            *pipeline.reduce_steps(runtime.policy, reduction),
            *pipeline.schedule_steps(runtime.policy),
        ]
        gm = pipeline.run(gm, steps)
        pipeline.prove({"reduction": gm})
        cache[key] = lower(gm, backend=runtime.policy.backend, fake_mode=mode)
    return cache[key]


def gather_program(runtime: Runtime) -> Callable[[], dict[str, torch.Tensor]]:
    """A program that only gathers: every shard in, full weights in compute dtype out.

    Args:
        runtime: runtime of the module.
    """
    plans = {f: p for f, p in runtime.plans.items() if not p.ignored}
    cache: dict[Any, Any] = runtime.reductions
    if "gather" not in cache:
        mode = compat.fake_mode()
        gm = _weights_only(runtime, plans, mode)
        reshard = dict.fromkeys(runtime.units.order, True)
        gm = pipeline.run(
            gm,
            [
                *pipeline.shard_steps(runtime.policy, reshard, True),
                *pipeline.schedule_steps(runtime.policy),
            ],
        )
        pipeline.prove({"forward": gm})
        cache["gather"] = lower(gm, backend=runtime.policy.backend, fake_mode=mode)

    def run() -> dict[str, torch.Tensor]:
        shards: list[Any] = [runtime.states[fqn].program_input() for fqn in plans]
        with torch.no_grad():
            return dict(zip(plans, cache["gather"](shards), strict=True))

    return run


def _weights_only(runtime: Runtime, plans: Mapping[str, ParamPlan], mode: Any) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = []
    for index, plan in enumerate(plans.values()):
        node = graph.placeholder(f"weight_{index}")
        with mode:
            node.meta["val"] = torch.empty(
                plan.local_shape,
                dtype=compute_dtype(plan, runtime.policy),
                device=runtime.device,
            )
        node.meta["role"] = ParamInput(plan.fqn)
        nodes.append(node)
    with graph.inserting_after(nodes[-1]):
        uses = [emit(graph, aten.alias.default, node) for node in nodes]
    out = graph.output(tuple(uses))
    out.meta["roles"] = tuple(UserOutput(i) for i in range(len(nodes)))
    return _bare_program(runtime, graph, "captured")


def compute_dtype(plan: ParamPlan, policy: Policy) -> torch.dtype:
    """The dtype in which forward uses a parameter."""
    dtype = policy.mp_policy.param_dtype
    if dtype is None or plan.ignored or not plan.dtype.is_floating_point:
        return plan.dtype
    return dtype


def _bare_program(runtime: Runtime, graph: fx.Graph, stage: str) -> fx.GraphModule:
    gm = fx.GraphModule(nn.Module(), graph)
    program = ProgramInfo(
        layout=runtime.layout,
        params=runtime.plans,
        units=runtime.units.of,
        unit_order=runtime.units.order,
        stage=stage,
    )
    return record(finish(set_info(gm, program), "annotate"))


def _grads_only(
    runtime: Runtime,
    dtypes: tuple[tuple[str, torch.dtype], ...],
    partial: bool,
    mode: Any,
) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = []
    for index, (fqn, dtype) in enumerate(dtypes):
        plan = runtime.plans[fqn]
        shape = plan.padded_shard_shape if partial else plan.local_shape
        node = graph.placeholder(f"grad_{index}")
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=runtime.device)
        node.meta["role"] = GradInput(fqn, partial)
        nodes.append(node)
    out = graph.output(tuple(nodes))
    out.meta["roles"] = tuple(ParamGrad(fqn) for fqn, _ in dtypes)
    return _bare_program(runtime, graph, "reduction")
