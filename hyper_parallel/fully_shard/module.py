"""HSDPModule: what ``fully_shard`` adds to a module's class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.errors import PolicyError, ShardedStateError
from hyper_parallel.fully_shard.guard import compare_replicas
from hyper_parallel.fully_shard.param import HSDPParam
from hyper_parallel.fully_shard.registry import unit_of
from hyper_parallel.fully_shard.state import UnitState
from hyper_parallel.groups import get_second_group_info

__all__ = ["HSDPCell", "HSDPModule", "UnshardHandle", "share_comm_ctx"]


class UnshardHandle:
    """A pending ``unshard(async_op=True)``."""

    def __init__(self, unit: UnitState) -> None:
        self._unit: UnitState | None = unit

    def wait(self) -> None:
        """Ends the all-gather; the full parameters are then registered on the module."""
        if self._unit is not None:
            self._unit.wait_for_unshard()
            self._unit = None


class HSDPModule:
    """The methods of a module after ``fully_shard``; its class derives from this and the original.

    Setters with ``recurse`` apply to all units below the module, the module's own included.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds the original class: a container makes new ones when it is indexed."""
        original = next(c for c in cls.__mro__ if not issubclass(c, HSDPModule))
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ShardedStateError(
            f"deepcopy of a sharded {type(self).__name__} is not supported: its parameters belong "
            f"to process groups and hooks; copy the model before fully_shard, or use state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardedStateError(
            f"a sharded {type(self).__name__} cannot be pickled: its parameters belong to process "
            f"groups and hooks; save state_dict() instead"
        )

    # Parameters

    def hsdp_params(self) -> list[HSDPParam]:
        """Returns the parameters of the module's own unit."""
        return list(_unit(self).params)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the full parameters of the module's own unit and registers them.

        Args:
            async_op: Return a handle to wait on; the module's forward waits by itself.
        """
        unit = _unit(self)
        unit.check_ready()
        unit.unshard(async_op=async_op)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the full parameters of the module's own unit and registers the slices."""
        _unit(self).reshard()

    def check_replicas(self) -> None:
        """Checks that ranks which should hold the same bytes of a slice do, and of its ``.grad``.

        Collective over the meshes of the units below the module. A checksum of the bits is compared
        along each mesh dim. With ``HP_COMPILE_CHECK_REPLICAS=1`` every step of the model does it.

        Raises:
            ReplicaError: Some differ; all ranks of the mesh raise it, with the first parameter, the
                mesh dim and the ranks.
            ShardedStateError: Parameters are still on the meta device, or a step is running.
        """
        _unit(self).lazy_init()
        units = _units(self, True)
        for unit in units:
            unit.check_ready()
        compare_replicas(units)

    def reset_iter_state(self) -> None:
        """Forgets a step that failed in the middle of backward; its gradients are lost.

        A forward that raises cleans up by itself, and so does the next forward after a backward
        that raised; this does it at once.

        Raises:
            ShardedStateError: The module is not the root.
        """
        unit = _unit(self)
        if unit.is_root is False:
            raise ShardedStateError(
                f"{unit.name}: reset_iter_state must be called on the root module"
            )
        unit.context.reset()

    # Gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Says whether the next backward is the last one of the step and waits for everything."""
        _unit(self).context.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Says whether backward reduces gradients or accumulates them without communication."""
        for unit in _units(self, recurse):
            unit.reduce_grads = requires_gradient_sync
            unit.reduce_options.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Says whether backward all-reduces over replicas, or accumulates slices until one does."""
        for unit in _units(self, recurse):
            unit.reduce_options.all_reduce = requires_all_reduce

    def set_reduce_op_type(self, reduce_op_type: Any, *, recurse: bool = True) -> None:
        """Sets how gradients are combined over the batch dims.

        Args:
            reduce_op_type: ``"avg"`` or ``"sum"``, or ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
            recurse: Apply to all units below.

        Raises:
            PolicyError: Another value.
        """
        means = {"avg": True, "sum": False}
        if isinstance(reduce_op_type, str):
            mean = means.get(reduce_op_type.lower())
        elif reduce_op_type in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            mean = reduce_op_type == dist.ReduceOp.AVG
        else:
            mean = None
        if mean is None:
            raise PolicyError(
                f"set_reduce_op_type: expected 'avg' or 'sum', got {reduce_op_type!r}"
            )
        for unit in _units(self, recurse):
            unit.reduce_options.mean = mean

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum over the batch dims by ``factor`` instead of by the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
            raise PolicyError(
                f"set_gradient_divide_factor: expected a positive number, got {factor!r}"
            )
        _unit(self).reduce_options.factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Does what :meth:`set_gradient_divide_factor` does, under its older name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Uses SUM collectives and a scale even where the backend has an average."""
        _unit(self).reduce_options.sum_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Counts a gradient that some ranks lack as zero there, instead of raising an error.

        A parameter that no rank used still gets none. The reductions of these units run at the end
        of backward, the only moment that comes on all ranks alike; until then their unreduced
        gradients stay, so set it on the units that need it.
        """
        for unit in _units(self, recurse):
            unit.reduce_options.fill_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Says how many reductions may run before backward waits for the oldest of them.

        More overlap and more memory: each keeps the gradients that it sends. All units of a model
        share one number, the largest that was set.

        Raises:
            PolicyError: Not a positive int.
        """
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            raise PolicyError(
                f"set_reduce_scatter_max_input_buffers: expected a positive int, got "
                f"{max_input_buffers!r} of type {type(max_input_buffers).__name__}"
            )
        for unit in _units(self, recurse):
            unit.reduce_options.max_in_flight = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Runs reduce-scatters in a process group of their own, of the same ranks.

        A communicator runs one collective at a time, so that a gather and a reduce-scatter of one
        group wait for each other even on two streams. Collective: call it alike on all ranks.
        """
        for unit in _units(self, recurse):
            for param in unit.params:
                info = param.sharded_group_info
                param.reduce_scatter_group_info = (
                    get_second_group_info(info, "reduce_scatter") if enable else info
                )

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Calls ``hook`` with the flat reduced gradients of the unit before they are scaled.

        Args:
            hook: Takes the flat tensor; the gradient of a complex parameter is pairs of reals.
            stream: Where it runs; only for a unit without replicas, whose all-reduce has its own.

        Raises:
            PolicyError: A stream for a unit with replicas.
        """
        unit = _unit(self)
        if stream is not None and any(
            p.unsharded_group_info.group is not None for p in unit.params
        ):
            raise PolicyError(
                f"set_all_reduce_hook: {unit.name or 'the unit'} has replicas, so its hook runs on "
                f"the stream of its own all-reduce; leave stream None"
            )
        unit.reduce_options.hook, unit.reduce_options.hook_stream = hook, stream

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Runs reduce-scatters by ``comm``, which has the methods of ``ReduceScatter``."""
        _unit(self).reduce_options.comm = comm

    # Lifetime and order

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Says whether forward frees the full parameters.

        Raises:
            PolicyError: Not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise PolicyError(
                f"set_reshard_after_forward: expected True or False, got "
                f"{reshard_after_forward!r} of type {type(reshard_after_forward).__name__}"
            )
        for unit in _units(self, recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Says whether backward frees the full parameters."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Says whether backward needs the parameters; an embedding's does not."""
        _unit(self).unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Iterable[HSDPModule]) -> None:
        """Starts the gathers of ``modules`` during this module's forward, in this order."""
        _unit(self).forward_prefetch = _units_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[HSDPModule]) -> None:
        """Starts the gathers of ``modules`` in this module's backward, not the previous one's."""
        _unit(self).backward_prefetch = _units_of("set_modules_to_backward_prefetch", modules)

    set_forward_prefetch_cells = set_modules_to_forward_prefetch
    set_backward_prefetch_cells = set_modules_to_backward_prefetch

    def set_custom_all_gather(self, comm: Any) -> None:
        """Runs all-gathers by ``comm``, which has the methods of ``AllGather``."""
        _unit(self).all_gather_comm = comm

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the next step's gathers wait for ``event`` only, not for all queued work."""
        _unit(self).context.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Gathers on the computing stream, for explicit prefetching without side streams."""
        for unit in _units(self, True):
            unit.unshard_async_op = async_op

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, also while full parameters are registered or none is reduced yet.

        After a forward that keeps its parameters, ``parameters()`` are the full ones, and the
        gradients are on the slices.
        """
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]
        for unit in _units(self, True):
            unit.discard_partial_gradients()
            for param in unit.params:
                grad = param.sharded_param.grad
                if set_to_none:
                    param.sharded_param.grad = None
                elif grad is not None:
                    grad.detach_().zero_()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        unit = _unit(self)
        unit.to_sharded()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for param in unit.params:
            param.reset_sharded_param()
        return result


HSDPCell = HSDPModule


def share_comm_ctx(modules: Sequence[HSDPModule]) -> None:
    """Makes several models, e.g. the stages of a pipeline, use the streams of the first.

    Args:
        modules: Their roots.

    Raises:
        PolicyError: Something that ``fully_shard`` was not applied to.
    """
    units = _units_of("share_comm_ctx", modules)
    for unit in units[1:]:
        unit.context.share_streams(units[0].context)


def _unit(module: HSDPModule) -> UnitState:
    unit = unit_of(cast(nn.Module, module))
    if unit is None:
        raise ShardedStateError(f"fully_shard was not applied to this {type(module).__name__}")
    return cast(UnitState, unit)


def _units(module: HSDPModule, recurse: bool) -> list[UnitState]:
    if not recurse:
        return [_unit(module)]
    found = (unit_of(child) for child in cast(nn.Module, module).modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def _units_of(what: str, modules: Iterable[HSDPModule]) -> list[UnitState]:
    modules = list(modules)
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise PolicyError(
                f"{what}: expected modules that fully_shard was applied to, got "
                f"{type(module).__name__}"
            )
    return [_unit(module) for module in modules]
