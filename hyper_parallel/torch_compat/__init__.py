"""Semi-private torch names, each in one place: the only modules that touch ``torch._*`` names.

On a torch that was not tested the first import warns in one line which of the names are missing or have changed.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["NAMES", "TESTED", "problems", "warn_if_untested"]

#: Releases of torch on which the whole test suite ran.
TESTED = ("2.13",)

#: Every semi-private name in use, with the parameters that calls rely on.
NAMES: Mapping[str, tuple[str, ...]] = {
    "torch._C.DispatchKey.CompositeImplicitAutograd": (),
    "torch._C._DisableFuncTorch": (),
    "torch._C._are_functorch_transforms_active": (),
    "torch._C._autograd._get_current_graph_task_keep_graph": (),
    "torch._C._current_graph_task_id": (),
    "torch._C._distributed_c10d._register_process_group": (),
    "torch._C._distributed_c10d._resolve_process_group": (),
    "torch._C._distributed_c10d._unregister_process_group": (),
    "torch._chunk_cat": (),
    "torch._dynamo.disable": ("recursive",),
    "torch._foreach_copy_": (),
    "torch._foreach_mul_": (),
    "torch._foreach_norm": (),
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors": (
        "stack",
        "mod",
        "args",
        "decompositions",
    ),
    "torch._functorch.config": (),
    "torch._functorch.partitioners.min_cut_rematerialization_partition": ("num_fwd_outputs",),
    "torch._guards.TracingContext": (),
    "torch._guards.tracing": (),
    "torch._inductor.compile_fx.compile_fx_inner": ("gm", "example_inputs"),
    "torch._inductor.config": (),
    "torch._inductor.decomposition.select_decomp_table": (),
    "torch._inductor.utils.BoxedBool": (),
    "torch._logging.trace_structured": ("metadata_fn", "payload_fn", "expect_trace_id"),
    "torch._ops.HigherOrderOperator": (),
    "torch._subclasses.fake_tensor.FakeTensor": (),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("shape_env", "allow_non_fake_inputs"),
    "torch._subclasses.fake_tensor.unset_fake_temporarily": (),
    "torch.autograd._unsafe_preserve_version_counter": (),
    "torch.autograd.function._SingleLevelFunction": (),
    "torch.distributed.device_mesh.DeviceMesh._concatenate": (),
    "torch.distributed.device_mesh.DeviceMesh._flatten": (),
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": (),
    "torch.distributed.device_mesh.DeviceMesh._unflatten": (),
    "torch.distributed.distributed_c10d._get_default_store": (),
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": ("mesh", "placements", "tensor_meta"),
    "torch.distributed.tensor._dtensor_spec.TensorMeta": (),
    "torch.distributed.tensor.placement_types._StridedShard": ("dim", "split_factor"),
    "torch.fx._lazy_graph_module._LazyGraphModule": (),
    "torch.fx._lazy_graph_module._use_lazy_graph_module": (),
    "torch.fx.experimental.proxy_tensor.get_proxy_mode": (),
    "torch.fx.experimental.sym_node.SymNode": (),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": (),
    "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols": (),
    "torch.fx.graph._BoxedCodeGen": (),
    "torch.fx.traceback.annotate": (),
    "torch.fx.traceback.preserve_node_meta": (),
    "torch.nn.Module._register_load_state_dict_pre_hook": (),
    "torch.utils._pytree.tree_flatten": (),
    "torch.utils._pytree.tree_flatten_with_path": (),
    "torch.utils._pytree.tree_map_only": (),
    "torch.utils._pytree.tree_unflatten": (),
    "torch.utils.checkpoint.CheckpointFunction": (),
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": (),
}


def problems(names: Mapping[str, tuple[str, ...]] = NAMES) -> list[str]:
    """What the installed torch lacks.

    Args:
        names: dotted names, and the parameters that they must take.

    Returns:
        One text for each name that is missing or does not take a parameter.
    """
    found = []
    for name, parameters in names.items():
        value = _resolve(name)
        if value is None:
            found.append(f"{name} is missing")
            continue
        lacking = [p for p in parameters if not _takes(value, p)]
        if lacking:
            found.append(f"{name} does not take {', '.join(lacking)}")
    return found


def warn_if_untested(version: str = torch.__version__) -> None:
    """Warns in one line when this torch was not tested.

    Args:
        version: the version of torch.
    """
    if version.startswith(tuple(f"{tested}." for tested in TESTED)):
        return
    found = problems()
    detail = "; ".join(found) if found else "all semi-private names that are used exist"
    warnings.warn(
        f"hyper_parallel was tested with torch {', '.join(TESTED)}, this is {version}: {detail}",
        RuntimeWarning,
        stacklevel=2,
    )


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part, None)
        return value
    return None


def _takes(value: Any, parameter: str) -> bool:
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):  # a builtin says nothing about itself
        return True
    variadic = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return variadic or parameter in parameters


warn_if_untested()
