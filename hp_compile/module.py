"""ShardedModule: the user's own module, its class extended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hyper_parallel.errors import HPCompileError, PolicyError

if TYPE_CHECKING:
    from hp_compile.plan import Plan
    from hp_compile.runtime import Runtime


class UnshardHandle:
    """Handle of a finished ``unshard``."""

    def wait(self) -> None:
        """Returns at once."""


class ShardedModule:
    """Mixin that ``hp_compile.shard`` puts in front of the module's own class.

    ``isinstance(model, OriginalClass)`` stays true, FQNs stay, ``parameters()`` are DTensors. Calling the model captures
    and compiles once for each input signature and mode.
    """

    _hp_runtime: Runtime

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's original forward as a sharded program."""
        return self._hp_runtime.call(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of one call of the model, as the current flags run it.

        Args:
            *args: example inputs; only shapes, dtypes and structure are read.
            **kwargs: example keyword inputs.
        """
        from hp_compile.api import plan

        runtime = self._hp_runtime
        return plan(self, runtime.mesh, runtime.policy, args=args, kwargs=kwargs)  # type: ignore[arg-type]

    # -------------------------------------------------------------- gradient synchronisation

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; ``False`` accumulates them unsharded and leaves ``.grad`` alone."""
        self._hp_runtime.flags.gradient_sync = _flag(
            "requires_gradient_sync", requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over replicas; ``False`` accumulates reduce-scattered shards."""
        self._hp_runtime.flags.all_reduce = _flag("requires_all_reduce", requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of the step, after which kept weights are freed."""
        self._hp_runtime.flags.last_backward = _flag("is_last_backward", is_last_backward)

    def set_reduce_op_type(self, reduce_op: str) -> None:
        """``"avg"`` or ``"sum"`` over the batch dims."""
        if reduce_op not in ("avg", "sum"):
            raise PolicyError(f"set_reduce_op_type: expected 'avg' or 'sum', got {reduce_op!r}")
        self._hp_runtime.flags.reduce_op = reduce_op

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides summed gradients by ``factor`` instead of the number of data-parallel ranks."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise PolicyError(
                f"set_gradient_divide_factor: expected a number above 0, got {factor!r}"
            )
        self._hp_runtime.flags.divide_factor = float(factor)

    # -------------------------------------------------------------- lifetime of gathered weights

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether weights are gathered again for backward; the next call uses (or captures) that program."""
        value = _flag("reshard_after_forward", reshard_after_forward)
        flags = self._hp_runtime.flags
        flags.reshard = dict.fromkeys(flags.reshard, value)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """``False`` keeps weights gathered between micro-batches until the last backward."""
        self._hp_runtime.flags.reshard_after_backward = _flag(
            "reshard_after_backward", reshard_after_backward
        )

    def unshard(self, async_op: bool = False) -> Any:
        """Gathers all weights now and keeps them; the following calls run the program without gathers.

        Args:
            async_op: return a handle with ``wait()``, for loops written for FSDP2. The gather program waits for its own
                collectives, so the handle is ready at once.
        """
        self._hp_runtime.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Frees the weights that ``unshard`` gathered."""
        self._hp_runtime.reshard()

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Accepted for compatibility: the order of gathers is fixed when the program is compiled (see ``passes.overlap``)."""
        self._check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Accepted for compatibility: the order of gathers is fixed when the program is compiled (see ``passes.overlap``)."""
        self._check_modules(modules)

    set_forward_prefetch_cells = set_modules_to_forward_prefetch
    set_backward_prefetch_cells = set_modules_to_backward_prefetch

    def _check_modules(self, modules: Sequence[nn.Module]) -> None:
        own = {id(m) for m in self.modules()}  # type: ignore[attr-defined]
        for module in modules:
            if id(module) not in own:
                raise PolicyError(
                    f"prefetch list: {type(module).__name__} is no submodule of this sharded model"
                )

    # -------------------------------------------------------------- nn.Module behaviour

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``to``, ``to_empty`` and friends; tied parameters stay tied and padding is made again."""
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        self._hp_runtime.after_apply()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise HPCompileError(
            f"{type(self).__name__} cannot be deep-copied: its parameters live on process groups. Copy the model before "
            "shard, or build a second one and load this one's state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HPCompileError(
            f"{type(self).__name__} cannot be pickled: its parameters live on process groups. Save state_dict() with "
            "torch.distributed.checkpoint instead"
        )


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{name}: expected True or False, got {value!r}")
    return value


def extend_class(module: nn.Module) -> type:
    """Gives ``module`` a class that is both its own and :class:`ShardedModule`; returns its own."""
    original = type(module)
    module.__class__ = type(f"Sharded{original.__name__}", (ShardedModule, original), {})
    return original


def is_sharded(module: torch.nn.Module) -> bool:
    """True for a module that ``shard`` returned."""
    return isinstance(module, ShardedModule)
