"""The schedule of one unit: when its parameters are gathered, freed, and their gradients reduced.

::

    pre_forward   gather, wait, copy out        post_forward   free, or keep, or a smaller group
    pre_backward  gather again if freed         post_backward  free; reduce gradients

A pre-backward hook sits on every output that requires grad, and on tensors that the modules of the
unit stashed on themselves; the post-backward hook on every input that requires grad. What has no
such input is reduced when the whole backward ends.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.errors import ShardedStateError
from hyper_parallel.fully_shard.autograd import PostBackward
from hyper_parallel.fully_shard.lifetime import ParamLifetime, TrainingState
from hyper_parallel.fully_shard.param import HSDPParam, ShardedState
from hyper_parallel.fully_shard.reduce import (
    PendingReduction,
    ReduceBucket,
    ReduceOptions,
    reduce_buckets,
)
from hyper_parallel.fully_shard.tree import cast_floating_point, grad_tensors, map_tensors
from hyper_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.torch_compat.eager import hide_from_dynamo, in_backward, in_transform

__all__ = ["TrainingState", "UnitState"]

# A stash in a longer container is not looked for: it would cost more than it finds.
_LONGEST_STASH = 64


class UnitState(ParamLifetime):
    """The state and the hooks of the modules that one call of ``fully_shard`` made a unit.

    Attributes:
        ignored: Parameters of its modules that were to be left alone.
        reduce_options: How its gradients are reduced.
        reduce_grads: Whether a backward reduces gradients or accumulates them.
        reshard_after_backward: Whether a backward frees the full parameters.
        keep_until_last_backward: Whether only the last backward of a step frees them (ZeRO-2).
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[HSDPParam],
        *,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        reshard_after_forward: bool | None,
        sync_weights: bool = False,
        ignored: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(params, device, reshard_after_forward)
        self.modules = tuple(modules)
        self.ignored = tuple(ignored)
        self.device = device
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.context.units = [self]
        self.reduce_options = ReduceOptions()
        self.reduce_grads = True
        self.reshard_after_backward = True
        self.keep_until_last_backward = False
        self.forward_prefetch: list[UnitState] = []
        self.backward_prefetch: list[UnitState] = []
        self._buckets: list[ReduceBucket] = []
        self._bucket_key: tuple[Any, ...] | None = None
        self._post_forward_indices: list[int] = []
        self._to_run: set[nn.Module] = set()  # of several modules, those still to run forward
        self._error_before: BaseException | None = None
        self.inner_modules: list[nn.Module] = []
        self._weights_to_sync = sync_weights
        self._register_hooks()

    # Hooks

    def _register_hooks(self) -> None:
        self._pre_forward_hook = hide_from_dynamo(self.pre_forward)
        self._post_forward_hook = hide_from_dynamo(self._post_forward_or_failure)
        self._pre_backward_hook = hide_from_dynamo(self.pre_backward)
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward_hook, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward_hook, always_call=True)

    def _post_forward_or_failure(self, module: nn.Module, args: Any, output: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_before:
            self.fail_forward()
            return None
        if len(self.modules) > 1:
            self._to_run.discard(module)
            if self._to_run:
                self._register_pre_backward(output)  # a loss may use this output only
                return self._cast_output(output)
        return self.post_forward(module, args, output)

    def fail_forward(self) -> None:
        """Leaves the model usable after a forward that raised."""
        if self.training_state is TrainingState.PRE_BACKWARD or in_backward():
            return
        if self.context.forward_root in (self, None):
            self.context.reset(keep_gradients=True)
        else:
            self.reset_after_failure(keep_gradients=True)

    @torch.no_grad()
    def reset_after_failure(self, keep_gradients: bool) -> None:
        """Drops what a failed step left: gathers, unsharded parameters, and what it accumulated."""
        self._drop_gathers()
        self.training_state = TrainingState.IDLE
        self._post_forward_indices.clear()
        self._to_run.clear()
        self._reshard_event = None
        if not keep_gradients:
            self.discard_partial_gradients()
        self.to_sharded(check=False)

    def discard_partial_gradients(self) -> None:
        """Forgets gradients that were not reduced, or not over the replicas."""
        for bucket in self._buckets:
            bucket.partial = None
        for param in self.params:
            param.take_gradient()

    # Forward

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gathers the parameters and prepares the inputs."""
        if self.context.callback_queued and not in_backward():
            self.context.reset()  # a backward raised, so it never ended
        if self.training_state is TrainingState.PRE_BACKWARD:
            # Recomputation of a checkpointed unit: an earlier post-backward may have freed them.
            self.unshard()
            self.wait_for_unshard()
            return self._cast_inputs(args, kwargs)
        first = self.training_state is not TrainingState.FORWARD
        if first:
            self._error_before = sys.exc_info()[1]
            args, kwargs = self._enter_forward(args, kwargs)
            for param in self.params:
                param.adopt_requires_grad()
            self._to_run = set(self.modules)
        self.training_state = TrainingState.FORWARD
        args, kwargs = self._cast_inputs(args, kwargs)
        self.unshard()
        self.wait_for_unshard()
        if first:
            args, kwargs = self._register_post_backward(args, kwargs)
            for unit in self.forward_prefetch:
                unit.prefetch(TrainingState.FORWARD)
        return args, kwargs

    def post_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Frees the parameters, if they are to be, and prepares backward."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            return self._cast_output(output)
        if not in_backward():
            self._reshard_after_forward_or_fail()
            self._post_forward_indices.append(len(self.context.post_forward_order))
            self.context.post_forward_order.append(self)
        self.training_state = TrainingState.IDLE
        self._register_pre_backward(output)
        if self.context.forward_root is self:
            self._finish_partial_forwards(output)
            self.context.leave_forward()
        return self._cast_output(output)

    def _reshard_after_forward_or_fail(self) -> None:
        try:
            self.reshard()
            self.check_unchanged()  # what is kept: the module that changed it is known now
        except ShardedStateError:
            self.fail_forward()
            raise

    def _enter_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.lazy_init()
        context = self.context
        if context.forward_root is not None:
            return args, kwargs
        context.guard.before_forward(context.units)
        context.enter_forward(self)
        if self.device.type != "cpu":
            args, kwargs = map_tensors(
                lambda t: t.to(self.device, non_blocking=True), (args, kwargs)
            )
        return args, kwargs

    def _finish_partial_forwards(self, output: Any) -> None:
        """Ends the forward of units of which only some modules ran (chunked losses)."""
        for unit in reversed(self.context.units):
            if unit is not self and unit.training_state is TrainingState.FORWARD and unit._to_run:
                unit.post_forward(None, (), output)

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating_point(dtype, args), cast_floating_point(dtype, kwargs)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else cast_floating_point(dtype, output)

    # Backward

    def pre_backward(self, grad: Tensor) -> Tensor:
        """Gathers the parameters again; runs before any gradient of the unit is computed.

        Raises:
            ShardedStateError: The backward is to be differentiated.
        """
        if torch.is_grad_enabled() and self.params and not in_transform():
            raise ShardedStateError(
                f"{self.name or 'the model'}: create_graph=True is not supported; a derivative of "
                f"this backward would need parameters that are freed by then, and its gradients "
                f"would not be reduced. Compute it on an unsharded module"
            )
        self.context.queue_final_callback(self.context_end_of_backward)
        if self.training_state is TrainingState.PRE_BACKWARD:
            return grad
        self.training_state = TrainingState.PRE_BACKWARD
        self.unshard()
        self.wait_for_unshard()
        if self.backward_prefetch:
            for unit in self.backward_prefetch:
                unit.prefetch(TrainingState.PRE_BACKWARD)
        elif self._post_forward_indices:
            index = self._post_forward_indices.pop()
            if index > 0:
                before = self.context.post_forward_order[index - 1]
                before.prefetch(TrainingState.PRE_BACKWARD)
        return grad

    def post_backward(self, ends: bool = False) -> None:
        """Frees the parameters and reduces the gradients; does nothing without any.

        Where missing gradients count as zero, another rank may never get here before its backward
        ends. Only the end comes in the same order on all ranks, so the reduction waits for it.

        Args:
            ends: The backward pass ends.
        """
        if in_backward():  # a chunk whose output has no hook ends here only
            self.context.queue_final_callback(self.context_end_of_backward)
        self.training_state = TrainingState.POST_BACKWARD
        for param in self.params:
            param.accumulate_unsharded_grad_if_needed()
        if not self.reduce_grads or (self.reduce_options.fill_unused and not ends):
            self._reshard_after_backward()
            for param in self.params:
                param.to_accumulated_grad_if_needed()
            return
        grads = {id(param): param.take_gradient() for param in self.params}
        self._reshard_after_backward()
        self.context.advance_reductions()
        for bucket in self._reduce_buckets():
            found = [grads.pop(id(param)) for param in bucket.params]
            leftover = bucket.partial is not None and self.reduce_options.all_reduce
            used = any(grad is not None for grad in found)
            if used or leftover or self.reduce_options.fill_unused:
                options = dataclasses.replace(self.reduce_options)
                reduction = PendingReduction(bucket, options, self.context.streams)
                self.context.add_reduction(reduction)
                reduction.start(found)

    def _reshard_after_backward(self) -> None:
        keeps = self.keep_until_last_backward and not self.context.is_last_backward
        if self.reshard_after_backward and not keeps:
            self.reshard()

    def _reduce_buckets(self) -> list[ReduceBucket]:
        key = tuple(
            (p.sharded_param.requires_grad, p.reduce_dtype, p.reduce_scatter_group_info.group)
            for p in self.params
        )
        if key != self._bucket_key:
            if any(bucket.partial is not None for bucket in self._buckets):
                raise ShardedStateError(
                    f"{self.name}: requires_grad, a dtype or the group of the reduce-scatter "
                    f"changed between a backward without and one with all-reduce; change it between "
                    f"optimizer steps"
                )
            self._buckets, self._bucket_key = reduce_buckets(self.params), key
        return self._buckets

    def context_end_of_backward(self) -> None:
        """Ends a backward pass for all units of the model."""
        context = self.context
        try:
            for unit in reversed(context.units):  # inner units first, as in backward
                done = unit.training_state is TrainingState.POST_BACKWARD
                if not done or (unit.reduce_grads and unit.reduce_options.fill_unused):
                    unit.post_backward(ends=True)
                unit.training_state = TrainingState.IDLE
                unit._to_run.clear()
            if context.is_last_backward or not context.streams.real:
                context.finish_reductions()
            if context.is_last_backward:
                for unit in context.units:
                    unit._finalize_backward()
                context.post_forward_order.clear()
                context.guard.after_backward(context.units)
            context.forward_root = None
            context.callback_queued = False
        except BaseException:  # an interrupted backward leaves nothing behind for the next
            context.reset()
            raise

    def _finalize_backward(self) -> None:
        for param in self.params:
            if param.grad_offload_event is not None:
                param.grad_offload_event.synchronize()
                param.grad_offload_event = None
        self._drop_gathers()  # a prefetch that nobody needed
        self._post_forward_indices.clear()

    # Autograd

    def _register_post_backward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not torch.is_grad_enabled():
            return args, kwargs
        inputs = list(grad_tensors((args, kwargs)))
        if not inputs:
            return args, kwargs
        outputs = iter(PostBackward.apply(self, *inputs))
        return map_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))

    def _register_pre_backward(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in grad_tensors(output):
            tensor.register_hook(self._pre_backward_hook)
        for tensor in self._stashed_tensors():
            tensor.register_hook(self._pre_backward_hook)
            tensor._hsdp_unit = self  # type: ignore[attr-defined]

    def _stashed_tensors(self) -> Iterator[Tensor]:
        """Yields tensors that forward left on the unit's modules: a loss may start from them."""
        for module in self.inner_modules:
            for value in list(vars(module).values()):
                if isinstance(value, Tensor):
                    found = [value]
                elif isinstance(value, list | tuple | dict) and 0 < len(value) <= _LONGEST_STASH:
                    found = list(grad_tensors(value))
                else:
                    continue
                for tensor in found:
                    fresh = getattr(tensor, "_hsdp_unit", None) is not self
                    if fresh and tensor.requires_grad and not tensor.is_leaf:
                        yield tensor

    # First use

    def lazy_init(self) -> None:
        """Makes this unit the root of its module tree, if it has no root yet."""
        if self.is_root is not None:
            return
        from hyper_parallel.fully_shard.root import init_root

        init_root(self)

    def check_ready(self) -> None:
        """Checks what may have changed since ``fully_shard``.

        Raises:
            ShardedStateError: Parameters are on the meta device, or not on the CPU although they
                are to be offloaded.
        """
        for param in self.params:
            if self.sharded_state is ShardedState.SHARDED and not param.is_registered():
                param.reset_sharded_param()
            param.refresh_extension()
        meta = [param.fqn for param in self.params if param.local_tensor.is_meta]
        if meta:
            raise ShardedStateError(
                f"parameters are still on the meta device: {', '.join(meta)}; call "
                f"module.to_empty(device=...) and initialise them, or load a state dict"
            )
        if isinstance(self.offload_policy, CPUOffloadPolicy):
            moved = [p.fqn for p in self.params if p.local_tensor.device.type != "cpu"]
            if moved:
                raise ShardedStateError(
                    f"parameters to be offloaded are not on the CPU: {', '.join(moved)}; load a "
                    f'CPU state dict or call module.to_empty(device="cpu")'
                )

        if self._weights_to_sync:
            for param in self.params:
                param.sync_weights()
            self._weights_to_sync = False

    def __repr__(self) -> str:
        return f"UnitState({self.name or '(root)'}, {len(self.params)} parameters)"
