"""Semi-private torch for code generation: Inductor's entry and its decompositions.

Checked on torch 2.13.0. Imported lazily by ``hp_compile.lower``: planning does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import BoxedBool

from hyper_parallel.torch_compat.graph import tracing_context

__all__ = ["compile_graph", "decompositions"]


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The table that Inductor requires of the graphs it lowers."""
    return select_decomp_table()


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    fake_mode: Any,
    *,
    is_backward: bool,
    is_inference: bool,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Generates code for one graph; the result is found again in Inductor's disk cache.

    Args:
        gm: graph; consumed.
        example_inputs: fake tensors and symbols, in placeholder order.
        fake_mode: their mode. Its shape environment makes the disk cache usable.
        is_backward: whether it is the backward of a pair.
        is_inference: whether no backward follows.
    """
    with (
        tracing_context(fake_mode),
        inductor_config.patch(fx_graph_cache=True, fallback_random=True),
        torch.no_grad(),
    ):
        compiled: Any = compile_fx_inner(
            gm,
            list(example_inputs),
            cudagraphs=BoxedBool(False),
            is_backward=is_backward,
            is_inference=is_inference,
        )
    return compiled  # type: ignore[no-any-return]
