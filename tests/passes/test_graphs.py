"""One small program a pass, as text before and after it. Accept an intended change with ``EXPECTTEST_ACCEPT=1``."""

from __future__ import annotations

import copy
import functools
from typing import Any

import expecttest
import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import passes
from hp_compile import pipeline
from hp_compile.capture import capture
from hp_compile.dump import graph_text
from hp_compile.signature import flatten_call
from hp_compile.units import resolve_units
from hyper_parallel.mesh import MeshLayout, infer_roles
from hyper_parallel.plan import plan_params
from hyper_parallel.policy import Policy


class Tiny(nn.Module):
    """Two weights: one of 3 rows (uneven over 2 ranks), one of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 3, bias=False)
        self.leave = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x.view(x.shape))))


@functools.cache
def _captured(param_dtype: torch.dtype | None) -> fx.GraphModule:
    module = Tiny()
    signature, tensors = flatten_call((torch.ones(5, 4),), {})
    return capture(
        module,
        signature,
        tensors,
        original_class=Tiny,
        device=torch.device("cpu"),
        precision=MixedPrecisionPolicy(param_dtype=param_dtype),
        unit_modules=(),
        grad=True,
        dynamic=(frozenset(),),
        decompositions={},
    ).gm


def annotated(
    names: tuple[str, ...] = ("dp_shard",),
    shape: tuple[int, ...] = (2,),
    param_dtype: torch.dtype | None = None,
) -> fx.GraphModule:
    dims, roles = infer_roles(names, shape)
    world = tuple(range(torch.Size(shape).numel()))
    layout = MeshLayout(dims, shape, world, 0, roles)
    module, policy = Tiny(), Policy(mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    units = resolve_units(module, "auto")
    options: dict[str, Any] = {
        "layout": layout,
        "params": plan_params(module, layout, policy),
        "units": units.of,
        "unit_order": units.order,
    }
    step = pipeline.Step(passes.annotate, options)
    return pipeline.run(copy.deepcopy(_captured(param_dtype)), [step])


def run(gm: fx.GraphModule, *steps: tuple[Any, dict[str, Any]]) -> fx.GraphModule:
    return pipeline.run(gm, [pipeline.Step(function, options) for function, options in steps])


def unsharded(gm: fx.GraphModule, reshard: bool | int = True) -> fx.GraphModule:
    return run(gm, (passes.cleanup, {}), (passes.unshard, {"reshard": {"(root)": reshard}}))


class TestGraphs(expecttest.TestCase):
    maxDiff = None

    def test_annotate(self) -> None:
        self.assertExpectedInline(
            graph_text(annotated()),
            """\
primals_1: f32[3, 4] = input ParamInput(fqn='enter.weight')
primals_2: f32[2, 3] = input ParamInput(fqn='leave.weight')
primals_3: f32[5, 4] = input UserInput(index=0)
tangents_1: f32[5, 2] = input TangentInput(of=UserOutput(index=0))
view: f32[5, 4] = aten.view(primals_3, [5, 4])
t: f32[4, 3] = aten.t(primals_1)
mm: f32[5, 3] = aten.mm(view, t)
tanh: f32[5, 3] = aten.tanh(mm)
detach: f32[5, 3] = aten.detach(tanh)
t_1: f32[3, 2] = aten.t(primals_2)
mm_1: f32[5, 2] = aten.mm(tanh, t_1)
_unsafe_view: f32[5, 2] = aten._unsafe_view(mm_1, [5, 2])
view_1: f32[5, 2] = aten.view(tangents_1, [5, 2])
t_2: f32[2, 5] = aten.t(view_1)
mm_2: f32[2, 3] = aten.mm(t_2, tanh)
t_3: f32[3, 2] = aten.t(mm_2)
t_4: f32[2, 3] = aten.t(t_1)
mm_3: f32[5, 3] = aten.mm(view_1, t_4)
t_5: f32[2, 3] = aten.t(t_3)
detach_1: f32[5, 3] = aten.detach(detach)
tanh_backward: f32[5, 3] = aten.tanh_backward(mm_3, detach_1)
t_6: f32[3, 5] = aten.t(tanh_backward)
mm_4: f32[3, 4] = aten.mm(t_6, view)
t_7: f32[4, 3] = aten.t(mm_4)
t_8: f32[3, 4] = aten.t(t_7)
return _unsafe_view as UserOutput(index=0)
return t_8 as ParamGrad(fqn='enter.weight')
return t_5 as ParamGrad(fqn='leave.weight')
return None as NoGrad()
""",
        )

    def test_cleanup(self) -> None:
        gm = run(annotated(), (passes.cleanup, {}))
        self.assertExpectedInline(
            graph_text(gm),
            """\
primals_1: f32[3, 4] = input ParamInput(fqn='enter.weight')
primals_2: f32[2, 3] = input ParamInput(fqn='leave.weight')
primals_3: f32[5, 4] = input UserInput(index=0)
tangents_1: f32[5, 2] = input TangentInput(of=UserOutput(index=0))
t: f32[4, 3] = aten.t(primals_1)
mm: f32[5, 3] = aten.mm(primals_3, t)
tanh: f32[5, 3] = aten.tanh(mm)
t_1: f32[3, 2] = aten.t(primals_2)
mm_1: f32[5, 2] = aten.mm(tanh, t_1)
_unsafe_view: f32[5, 2] = aten._unsafe_view(mm_1, [5, 2])
t_2: f32[2, 5] = aten.t(tangents_1)
mm_2: f32[2, 3] = aten.mm(t_2, tanh)
t_3: f32[3, 2] = aten.t(mm_2)
t_4: f32[2, 3] = aten.t(t_1)
mm_3: f32[5, 3] = aten.mm(tangents_1, t_4)
t_5: f32[2, 3] = aten.t(t_3)
tanh_backward: f32[5, 3] = aten.tanh_backward(mm_3, tanh)
t_6: f32[3, 5] = aten.t(tanh_backward)
mm_4: f32[3, 4] = aten.mm(t_6, primals_3)
t_7: f32[4, 3] = aten.t(mm_4)
t_8: f32[3, 4] = aten.t(t_7)
return _unsafe_view as UserOutput(index=0)
return t_8 as ParamGrad(fqn='enter.weight')
return t_5 as ParamGrad(fqn='leave.weight')
return None as NoGrad()
""",
        )

    def test_unshard(self) -> None:
        self.assertExpectedInline(
            graph_text(unsharded(annotated())),
            """\
primals_1: f32[2, 4] = input ParamInput(fqn='enter.weight')
primals_2: f32[1, 3] = input ParamInput(fqn='leave.weight')
primals_3: f32[5, 4] = input UserInput(index=0)
tangents_1: f32[5, 2] = input TangentInput(of=UserOutput(index=0))
all_gather_into_tensor_default: f32[4, 4] = _c10d_functional.all_gather_into_tensor(primals_1, 2)  # unshard over dp_shard
wait_tensor_default: f32[4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
slice_tensor: f32[3, 4] = aten.slice.Tensor(wait_tensor_default, 0, 0, 3)
t: f32[4, 3] = aten.t(slice_tensor)
mm: f32[5, 3] = aten.mm(primals_3, t)
tanh: f32[5, 3] = aten.tanh(mm)
all_gather_into_tensor_default_1: f32[2, 3] = _c10d_functional.all_gather_into_tensor(primals_2, 2)  # unshard over dp_shard
wait_tensor_default_1: f32[2, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
t_1: f32[3, 2] = aten.t(wait_tensor_default_1)
mm_1: f32[5, 2] = aten.mm(tanh, t_1)
_unsafe_view: f32[5, 2] = aten._unsafe_view(mm_1, [5, 2])
t_2: f32[2, 5] = aten.t(tangents_1)
mm_2: f32[2, 3] = aten.mm(t_2, tanh)
t_3: f32[3, 2] = aten.t(mm_2)
t_4: f32[2, 3] = aten.t(t_1)
mm_3: f32[5, 3] = aten.mm(tangents_1, t_4)
t_5: f32[2, 3] = aten.t(t_3)
tanh_backward: f32[5, 3] = aten.tanh_backward(mm_3, tanh)
t_6: f32[3, 5] = aten.t(tanh_backward)
mm_4: f32[3, 4] = aten.mm(t_6, primals_3)
t_7: f32[4, 3] = aten.t(mm_4)
t_8: f32[3, 4] = aten.t(t_7)
return _unsafe_view as UserOutput(index=0)
return t_8 as ParamGrad(fqn='enter.weight')
return t_5 as ParamGrad(fqn='leave.weight')
return None as NoGrad()
""",
        )

    def test_unshard_casts_before_it_gathers(self) -> None:
        gm = unsharded(annotated(param_dtype=torch.bfloat16))
        kept = [
            line for line in graph_text(gm).splitlines() if "convert" in line or "gather" in line
        ]
        self.assertExpectedInline(
            "\n".join(kept),
            """\
convert_element_type_default: bf16[2, 4] = prims.convert_element_type(primals_1, torch.bfloat16)
all_gather_into_tensor_default: bf16[4, 4] = _c10d_functional.all_gather_into_tensor(convert_element_type_default, 2)  # unshard over dp_shard
wait_tensor_default: bf16[4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
convert_element_type_default_1: bf16[1, 3] = prims.convert_element_type(primals_2, torch.bfloat16)
all_gather_into_tensor_default_1: bf16[2, 3] = _c10d_functional.all_gather_into_tensor(convert_element_type_default_1, 2)  # unshard over dp_shard
wait_tensor_default_1: bf16[2, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)""",
        )

    def test_partition(self) -> None:
        forward, backward = pipeline.split(unsharded(annotated()))
        self.assertExpectedInline(
            graph_text(forward) + "\n" + graph_text(backward),
            """\
primals_1: f32[2, 4] = input ParamInput(fqn='enter.weight')
primals_2: f32[1, 3] = input ParamInput(fqn='leave.weight')
primals_3: f32[5, 4] = input UserInput(index=0)
all_gather_into_tensor_default: f32[4, 4] = _c10d_functional.all_gather_into_tensor(primals_1, 2)  # unshard over dp_shard
wait_tensor_default: f32[4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
slice_tensor: f32[3, 4] = aten.slice.Tensor(wait_tensor_default, 0, 0, 3)
t: f32[4, 3] = aten.t(slice_tensor)
mm: f32[5, 3] = aten.mm(primals_3, t)
tanh: f32[5, 3] = aten.tanh(mm)
all_gather_into_tensor_default_1: f32[2, 3] = _c10d_functional.all_gather_into_tensor(primals_2, 2)  # unshard over dp_shard
wait_tensor_default_1: f32[2, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
t_1: f32[3, 2] = aten.t(wait_tensor_default_1)
mm_1: f32[5, 2] = aten.mm(tanh, t_1)
_unsafe_view: f32[5, 2] = aten._unsafe_view(mm_1, [5, 2])
return _unsafe_view as UserOutput(index=0)
return primals_2 as SavedOutput(index=0)
return primals_3 as SavedOutput(index=1)
return tanh as SavedOutput(index=2)

primals_2: f32[1, 3] = input SavedInput(index=0)
primals_3: f32[5, 4] = input SavedInput(index=1)
tanh: f32[5, 3] = input SavedInput(index=2)
tangents_1: f32[5, 2] = input TangentInput(of=UserOutput(index=0))
t_2: f32[2, 5] = aten.t(tangents_1)
mm_2: f32[2, 3] = aten.mm(t_2, tanh)
t_3: f32[3, 2] = aten.t(mm_2)
all_gather_into_tensor_default_1: f32[2, 3] = _c10d_functional.all_gather_into_tensor(primals_2, 2)  # unshard over dp_shard
wait_tensor_default_1: f32[2, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
t_1: f32[3, 2] = aten.t(wait_tensor_default_1)
t_4: f32[2, 3] = aten.t(t_1)
mm_3: f32[5, 3] = aten.mm(tangents_1, t_4)
t_5: f32[2, 3] = aten.t(t_3)
tanh_backward: f32[5, 3] = aten.tanh_backward(mm_3, tanh)
t_6: f32[3, 5] = aten.t(tanh_backward)
mm_4: f32[3, 4] = aten.mm(t_6, primals_3)
t_7: f32[4, 3] = aten.t(mm_4)
t_8: f32[3, 4] = aten.t(t_7)
return t_8 as ParamGrad(fqn='enter.weight')
return t_5 as ParamGrad(fqn='leave.weight')
return None as NoGrad()
""",
        )

    def test_partition_to_a_smaller_group(self) -> None:
        gm = unsharded(annotated(shape=(4,)), reshard=2)
        forward, backward = pipeline.split(gm)
        self.assertExpectedInline(
            graph_text(forward) + "\n" + graph_text(backward),
            """\
primals_1: f32[1, 4] = input ParamInput(fqn='enter.weight')
primals_2: f32[1, 3] = input ParamInput(fqn='leave.weight')
primals_3: f32[5, 4] = input UserInput(index=0)
all_gather_into_tensor_default: f32[4, 4] = _c10d_functional.all_gather_into_tensor(primals_1, 4)  # unshard over dp_shard
wait_tensor_default: f32[4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
slice_tensor: f32[3, 4] = aten.slice.Tensor(wait_tensor_default, 0, 0, 3)
t: f32[4, 3] = aten.t(slice_tensor)
mm: f32[5, 3] = aten.mm(primals_3, t)
tanh: f32[5, 3] = aten.tanh(mm)
all_gather_into_tensor_default_2: f32[4, 3] = _c10d_functional.all_gather_into_tensor(primals_2, 4)  # unshard over dp_shard
wait_tensor_default_2: f32[4, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_2)
slice_tensor_2: f32[2, 3] = aten.slice.Tensor(wait_tensor_default_2, 0, 0, 2)
shard_slice_default_1: f32[2, 3] = hyper_parallel.shard_slice(wait_tensor_default_2, 2)
t_1: f32[3, 2] = aten.t(slice_tensor_2)
mm_1: f32[5, 2] = aten.mm(tanh, t_1)
_unsafe_view: f32[5, 2] = aten._unsafe_view(mm_1, [5, 2])
return _unsafe_view as UserOutput(index=0)
return primals_3 as SavedOutput(index=0)
return tanh as SavedOutput(index=1)
return shard_slice_default_1 as SavedOutput(index=2)

primals_3: f32[5, 4] = input SavedInput(index=0)
tanh: f32[5, 3] = input SavedInput(index=1)
shard_slice_default_1: f32[2, 3] = input SavedInput(index=2)
tangents_1: f32[5, 2] = input TangentInput(of=UserOutput(index=0))
t_2: f32[2, 5] = aten.t(tangents_1)
mm_2: f32[2, 3] = aten.mm(t_2, tanh)
t_3: f32[3, 2] = aten.t(mm_2)
all_gather_into_tensor_default_3: f32[4, 3] = _c10d_functional.all_gather_into_tensor(shard_slice_default_1, 2)  # unshard over dp_shard
wait_tensor_default_3: f32[4, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_3)
slice_tensor_3: f32[2, 3] = aten.slice.Tensor(wait_tensor_default_3, 0, 0, 2)
t_9: f32[3, 2] = aten.t(slice_tensor_3)
t_4: f32[2, 3] = aten.t(t_9)
mm_3: f32[5, 3] = aten.mm(tangents_1, t_4)
t_5: f32[2, 3] = aten.t(t_3)
tanh_backward: f32[5, 3] = aten.tanh_backward(mm_3, tanh)
t_6: f32[3, 5] = aten.t(tanh_backward)
mm_4: f32[3, 4] = aten.mm(t_6, primals_3)
t_7: f32[4, 3] = aten.t(mm_4)
t_8: f32[3, 4] = aten.t(t_7)
return t_8 as ParamGrad(fqn='enter.weight')
return t_5 as ParamGrad(fqn='leave.weight')
return None as NoGrad()
""",
        )

    def test_reduce_grads(self) -> None:
        gm = annotated(("dp_replicate", "dp_shard"), (2, 2))
        _, backward = pipeline.split(unsharded(gm))
        gm = run(backward, (passes.reduce_grads, {"reduce_dtype": torch.float32}))
        self.assertExpectedInline(
            graph_text(gm),
            """\
primals_2: f32[1, 3] = input SavedInput(index=0)
primals_3: f32[5, 4] = input SavedInput(index=1)
tanh: f32[5, 3] = input SavedInput(index=2)
tangents_1: f32[5, 2] = input TangentInput(of=UserOutput(index=0))
t_2: f32[2, 5] = aten.t(tangents_1)
mm_2: f32[2, 3] = aten.mm(t_2, tanh)
t_3: f32[3, 2] = aten.t(mm_2)
all_gather_into_tensor_default_1: f32[2, 3] = _c10d_functional.all_gather_into_tensor(primals_2, 2)  # unshard over dp_shard
wait_tensor_default_1: f32[2, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
t_1: f32[3, 2] = aten.t(wait_tensor_default_1)
t_4: f32[2, 3] = aten.t(t_1)
mm_3: f32[5, 3] = aten.mm(tangents_1, t_4)
t_5: f32[2, 3] = aten.t(t_3)
reduce_scatter_tensor_default_1: f32[1, 3] = _c10d_functional.reduce_scatter_tensor(t_5, sum, 2)  # reduce_grad over dp_shard
wait_tensor_default_3: f32[1, 3] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default_1)
all_reduce_default_1: f32[1, 3] = _c10d_functional.all_reduce(wait_tensor_default_3, sum)  # replicate_grad over dp_replicate
wait_tensor_default_4: f32[1, 3] = _c10d_functional.wait_tensor(all_reduce_default_1)
div_tensor_1: f32[1, 3] = aten.div.Tensor(wait_tensor_default_4, 4.0)
tanh_backward: f32[5, 3] = aten.tanh_backward(mm_3, tanh)
t_6: f32[3, 5] = aten.t(tanh_backward)
mm_4: f32[3, 4] = aten.mm(t_6, primals_3)
t_7: f32[4, 3] = aten.t(mm_4)
t_8: f32[3, 4] = aten.t(t_7)
constant_pad_nd_default: f32[4, 4] = aten.constant_pad_nd(t_8, [0, 0, 0, 1])
reduce_scatter_tensor_default: f32[2, 4] = _c10d_functional.reduce_scatter_tensor(constant_pad_nd_default, sum, 2)  # reduce_grad over dp_shard
wait_tensor_default: f32[2, 4] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
all_reduce_default: f32[2, 4] = _c10d_functional.all_reduce(wait_tensor_default, sum)  # replicate_grad over dp_replicate
wait_tensor_default_2: f32[2, 4] = _c10d_functional.wait_tensor(all_reduce_default)
div_tensor: f32[2, 4] = aten.div.Tensor(wait_tensor_default_2, 4.0)
return div_tensor as ParamGrad(fqn='enter.weight')
return div_tensor_1 as ParamGrad(fqn='leave.weight')
return None as NoGrad()
""",
        )

    def test_bucket(self) -> None:
        _, backward = pipeline.split(unsharded(annotated()))
        gm = run(backward, (passes.reduce_grads, {}), (passes.bucket, {}))
        self.assertExpectedInline(
            graph_text(gm),
            """\
primals_2: f32[1, 3] = input SavedInput(index=0)
primals_3: f32[5, 4] = input SavedInput(index=1)
tanh: f32[5, 3] = input SavedInput(index=2)
tangents_1: f32[5, 2] = input TangentInput(of=UserOutput(index=0))
t_2: f32[2, 5] = aten.t(tangents_1)
mm_2: f32[2, 3] = aten.mm(t_2, tanh)
t_3: f32[3, 2] = aten.t(mm_2)
all_gather_into_tensor_default_1: f32[2, 3] = _c10d_functional.all_gather_into_tensor(primals_2, 2)  # unshard over dp_shard
wait_tensor_default_1: f32[2, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
t_1: f32[3, 2] = aten.t(wait_tensor_default_1)
t_4: f32[2, 3] = aten.t(t_1)
mm_3: f32[5, 3] = aten.mm(tangents_1, t_4)
t_5: f32[2, 3] = aten.t(t_3)
tanh_backward: f32[5, 3] = aten.tanh_backward(mm_3, tanh)
t_6: f32[3, 5] = aten.t(tanh_backward)
mm_4: f32[3, 4] = aten.mm(t_6, primals_3)
t_7: f32[4, 3] = aten.t(mm_4)
t_8: f32[3, 4] = aten.t(t_7)
constant_pad_nd_default: f32[4, 4] = aten.constant_pad_nd(t_8, [0, 0, 0, 1])
reshape_default: f32[2, 8] = aten.reshape(constant_pad_nd_default, [2, -1])
reshape_default_1: f32[2, 3] = aten.reshape(t_5, [2, -1])
cat_default: f32[2, 11] = aten.cat([reshape_default, reshape_default_1], 1)
reshape_default_2: f32[22] = aten.reshape(cat_default, [-1])
reduce_scatter_tensor_default_2: f32[11] = _c10d_functional.reduce_scatter_tensor(reshape_default_2, sum, 2)  # reduce_grad over dp_shard
wait_tensor_default_3: f32[11] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default_2)
div_tensor_2: f32[11] = aten.div.Tensor(wait_tensor_default_3, 2.0)
split_with_sizes_default = aten.split_with_sizes(div_tensor_2, [8, 3], 0)
getitem: f32[8] = <built-in function getitem>(split_with_sizes_default, 0)
getitem_1: f32[3] = <built-in function getitem>(split_with_sizes_default, 1)
view_default: f32[2, 4] = aten.view(getitem, [2, 4])
view_default_1: f32[1, 3] = aten.view(getitem_1, [1, 3])
return view_default as ParamGrad(fqn='enter.weight')
return view_default_1 as ParamGrad(fqn='leave.weight')
return None as NoGrad()
""",
        )

    def test_overlap(self) -> None:
        forward, _ = pipeline.split(unsharded(annotated()))
        gm = run(forward, (passes.bucket, {"bucket_mb": 0}), (passes.overlap, {}))
        self.assertExpectedInline(
            graph_text(gm),
            """\
primals_1: f32[2, 4] = input ParamInput(fqn='enter.weight')
primals_2: f32[1, 3] = input ParamInput(fqn='leave.weight')
primals_3: f32[5, 4] = input UserInput(index=0)
all_gather_into_tensor_default: f32[4, 4] = _c10d_functional.all_gather_into_tensor(primals_1, 2)  # unshard over dp_shard
wait_tensor_default: f32[4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
all_gather_into_tensor_default_1: f32[2, 3] = _c10d_functional.all_gather_into_tensor(primals_2, 2)  # unshard over dp_shard
slice_tensor: f32[3, 4] = aten.slice.Tensor(wait_tensor_default, 0, 0, 3)
t: f32[4, 3] = aten.t(slice_tensor)
mm: f32[5, 3] = aten.mm(primals_3, t)
tanh: f32[5, 3] = aten.tanh(mm)
wait_tensor_default_1: f32[2, 3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
t_1: f32[3, 2] = aten.t(wait_tensor_default_1)
mm_1: f32[5, 2] = aten.mm(tanh, t_1)
_unsafe_view: f32[5, 2] = aten._unsafe_view(mm_1, [5, 2])
return _unsafe_view as UserOutput(index=0)
return primals_2 as SavedOutput(index=0)
return primals_3 as SavedOutput(index=1)
return tanh as SavedOutput(index=2)
""",
        )
