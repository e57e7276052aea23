"""ShardedModule: the user's own module, its class extended."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch import nn

from hyper_parallel.errors import HPCompileError, PolicyError
from hyper_parallel.fully_shard import HSDPParam

if TYPE_CHECKING:
    from hp_compile.plan import Plan


class UnshardHandle:
    """Handle of a finished ``unshard``."""

    def wait(self) -> None:
        """Returns at once."""


class ShardedModule:
    """Mixin that ``hp_compile.shard`` puts in front of the module's own class.

    ``isinstance(model, OriginalClass)`` stays true, FQNs stay, ``parameters()`` are DTensors. Calling the model captures
    and compiles once for each input signature and mode. The model is one unit of its methods: ``recurse`` arguments are
    there for loops written for ``HSDPModule`` and PyTorch's ``FSDPModule``, and change nothing.
    """

    _hp_runtime: Any  # a Runtime; libraries evaluate the annotations of a model's classes

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds the original class: a container makes new ones when it is sliced."""
        original = next(c for c in cls.__mro__ if not issubclass(c, ShardedModule))
        return original(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of one call of the model, as the current flags run it.

        Args:
            *args: example inputs; only shapes, dtypes and structure are read.
            **kwargs: example keyword inputs.
        """
        from hp_compile.api import plan

        runtime = self._hp_runtime
        return plan(self, runtime.mesh, runtime.policy, args=args, kwargs=kwargs)  # type: ignore[arg-type]

    def hsdp_params(self) -> list[HSDPParam]:
        """The parameters of the model as ``HSDPParam`` objects, in registration order; ignored ones left out.

        They show what the model holds: shards, groups, sizes. A gather through one of them does not change the model.
        """
        return self._hp_runtime.hsdp_params()

    def check_replicas(self) -> None:
        """Checks that ranks which should hold the same bytes of a parameter do, and of its ``.grad``.

        Collective over the mesh, and cheap: a checksum of the bits, and an all-gather of 8 bytes a parameter along each mesh
        dim. Best after ``optimizer.step()``. With ``HP_COMPILE_CHECK_REPLICAS=1`` every step does it by itself. Ignored
        parameters and buffers are not looked at.

        Raises:
            ReplicaError: some differ; all ranks raise it, with the first parameter, the mesh dim and the ranks.
            PlacementError: parameters are still on meta, or were replaced.

        Example:
            >>> optimizer.step()  # doctest: +SKIP
            >>> model.check_replicas()  # doctest: +SKIP
        """
        self._hp_runtime.check_replicas()

    # -------------------------------------------------------------- gradient synchronisation

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; ``False`` accumulates them unsharded and leaves ``.grad`` alone.

        Args:
            requires_gradient_sync: the new value, until it is set again.
            recurse: no effect.

        Raises:
            PolicyError: not a bool.
        """
        self._hp_runtime.flags.gradient_sync = _flag(
            "requires_gradient_sync", requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over replicas; ``False`` accumulates reduce-scattered shards.

        Args:
            requires_all_reduce: the new value, until it is set again.
            recurse: no effect.

        Raises:
            PolicyError: not a bool.
        """
        self._hp_runtime.flags.all_reduce = _flag("requires_all_reduce", requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of the step, after which kept weights are freed.

        Args:
            is_last_backward: the new value, until it is set again.

        Raises:
            PolicyError: not a bool.
        """
        self._hp_runtime.flags.last_backward = _flag("is_last_backward", is_last_backward)

    def set_reduce_op_type(self, reduce_op_type: Any, *, recurse: bool = True) -> None:
        """How gradients are combined over the batch dims.

        Args:
            reduce_op_type: ``"avg"`` or ``"sum"``, or ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
            recurse: no effect.

        Raises:
            PolicyError: another value.
        """
        value = reduce_op_type.lower() if isinstance(reduce_op_type, str) else reduce_op_type
        if value in ("avg", "sum"):
            self._hp_runtime.flags.reduce_op = value
        elif value in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            self._hp_runtime.flags.reduce_op = "avg" if value == dist.ReduceOp.AVG else "sum"
        else:
            raise PolicyError(
                f"set_reduce_op_type: expected 'avg' or 'sum', got {reduce_op_type!r}"
            )

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides summed gradients by ``factor`` instead of the number of data-parallel ranks.

        Args:
            factor: the divisor, above 0.

        Raises:
            PolicyError: not such a number.
        """
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise PolicyError(
                f"set_gradient_divide_factor: expected a number above 0, got {factor!r}"
            )
        self._hp_runtime.flags.divide_factor = float(factor)

    # -------------------------------------------------------------- lifetime of gathered weights

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether weights are gathered again for backward; the next call uses (or captures) that program.

        Args:
            reshard_after_forward: the new value, for all units.
            recurse: no effect.

        Raises:
            PolicyError: not a bool.
        """
        value = _flag("reshard_after_forward", reshard_after_forward)
        flags = self._hp_runtime.flags
        flags.reshard = dict.fromkeys(flags.reshard, value)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """``False`` keeps weights gathered between micro-batches until the last backward.

        Args:
            reshard_after_backward: the new value, until it is set again.
            recurse: no effect.

        Raises:
            PolicyError: not a bool.
        """
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

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Accepted for compatibility: the order of gathers is fixed when the program is compiled (see ``passes.overlap``).

        Args:
            modules: submodules of this model.

        Raises:
            PolicyError: one is not.
        """
        self._check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Accepted for compatibility: the order of gathers is fixed when the program is compiled (see ``passes.overlap``).

        Args:
            modules: submodules of this model.

        Raises:
            PolicyError: one is not.
        """
        self._check_modules(modules)

    set_forward_prefetch_cells = set_modules_to_forward_prefetch
    set_backward_prefetch_cells = set_modules_to_backward_prefetch

    def _check_modules(self, modules: Iterable[nn.Module]) -> None:
        own = {id(m) for m in self.modules()}  # type: ignore[attr-defined]
        for module in modules:
            if id(module) not in own:
                raise PolicyError(
                    f"prefetch list: {type(module).__name__} is no submodule of this sharded model"
                )

    # -------------------------------------------------------------- nn.Module behaviour

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty`` and friends; tied parameters stay tied and shards get their padding back."""
        self._hp_runtime.forget_exact_gradients()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._hp_runtime.after_apply()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise HPCompileError(
            f"{type(self).__name__} cannot be deep-copied: its parameters live on process groups. Copy the model before "
            "shard, or build a second one and load this one's state_dict"
        )

    def __copy__(self) -> NoReturn:
        raise HPCompileError(
            f"{type(self).__name__} cannot be copied: two models would share one runtime. Copy the model before shard, or "
            "build a second one and load this one's state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HPCompileError(
            f"{type(self).__name__} cannot be pickled: its parameters live on process groups. Save state_dict() with "
            "torch.distributed.checkpoint instead"
        )


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{name}: expected True or False, got {value!r}")
    return value


class _Forward:
    """``forward`` of a sharded class: runs the program, looks like the original.

    A data descriptor, so that it comes before a ``forward`` that somebody assigned to the instance; capture sees that one.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        @functools.wraps(original, updated=())
        def forward(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
            return self._hp_runtime.call(args, kwargs)

        self._function = forward

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self._function if module is None else types.MethodType(self._function, module)

    def __set__(self, module: Any, value: object) -> NoReturn:
        raise HPCompileError(
            f"{type(module).__name__}.forward cannot be replaced after shard: its programs are captured from the original; "
            "assign it before shard"
        )


def extend_class(module: nn.Module) -> type:
    """Gives ``module`` a class that is both its own and :class:`ShardedModule`; returns its own.

    Raises:
        HPCompileError: the class of the module cannot be extended.
    """
    original = type(module)
    try:
        module.__class__ = type(
            f"Sharded{original.__name__}",
            (ShardedModule, original),
            {"forward": _Forward(original.forward), "__module__": original.__module__},
        )
    except TypeError as error:
        raise HPCompileError(
            f"the class {original.__name__} cannot be extended by ShardedModule: {error}; pass a module of a plain class, for "
            "example one that holds this one and calls it"
        ) from error
    return original


def is_sharded(module: object) -> bool:
    """True for a module that ``shard`` returned."""
    return isinstance(module, ShardedModule)
