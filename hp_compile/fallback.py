"""The eager fall-back: a model that cannot be captured runs through ``hyper_parallel.fully_shard``, and says so once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from hyper_parallel.errors import CaptureError
from hyper_parallel.fully_shard.by_policy import adopt_by_policy
from hyper_parallel.fully_shard.module import HSDPModule

if TYPE_CHECKING:
    from hp_compile.runtime import Runtime


def run_eagerly(runtime: Runtime, error: CaptureError) -> nn.Module:
    """Turns a sharded module into one of the eager path; its parameters stay the same objects.

    Args:
        runtime: the module's runtime; it is of no use afterwards.
        error: why capture failed.

    Returns:
        The same module, now with hooks of ``fully_shard`` and the class ``HSDP<Orig>``.

    Raises:
        VerificationError: other ranks captured a program, or built another model.
    """
    if not runtime.checked:
        lines = ["runs eagerly: forward cannot be captured"]
        runtime.board.post("program", lines)
        runtime.board.compare("program", lines)
    module = runtime.module
    warnings.warn(
        f"{runtime.original_class.__name__} runs eagerly through hyper_parallel.fully_shard, without a program or a proof, "
        f"because Policy(fallback='eager') is set and {str(error).splitlines()[0]}",
        UserWarning,
        stacklevel=4,
    )
    runtime.reshard()
    plans = runtime.current_plans()
    module.__class__ = runtime.original_class
    del module._hp_runtime
    sharded = adopt_by_policy(module, runtime.mesh, runtime.policy, runtime.units.modules, plans)
    _take_over_flags(runtime, sharded)
    return module


def _take_over_flags(runtime: Runtime, sharded: HSDPModule) -> None:
    """What the setters said before the first call still holds."""
    flags = runtime.flags
    sharded.set_requires_gradient_sync(flags.gradient_sync)
    sharded.set_requires_all_reduce(flags.all_reduce)
    sharded.set_is_last_backward(flags.last_backward)
    sharded.set_reshard_after_backward(flags.reshard_after_backward)
    sharded.set_reduce_op_type(flags.reduce_op)
    if flags.divide_factor is not None:
        sharded.set_gradient_divide_factor(flags.divide_factor)
