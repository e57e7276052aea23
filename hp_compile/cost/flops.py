"""FLOPs of a node, by the formulas that ``torch.utils.flop_counter`` registers, on symbolic shapes.

A multiplication and an addition count as two. Operators without a formula (elementwise work, norms, softmax) count as
none, and causal attention counts in full, as ``FlopCounterMode`` counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import flop_counter

from hp_compile.cost.symbols import InputSymbols

aten = torch.ops.aten

#: The CPU's attention kernels: same arguments first as the kernels that torch registers.
_CPU_ATTENTION: Mapping[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


def formula(node: fx.Node) -> Callable[..., Any] | None:
    """The formula for the operator of a node; ``None`` if it has none."""
    packet = getattr(node.target, "overloadpacket", None)
    return flop_counter.flop_registry.get(packet) or _CPU_ATTENTION.get(packet)


def node_flops(node: fx.Node, symbols: InputSymbols) -> sympy.Expr:
    """Floating-point operations of one node.

    Args:
        node: a node of a program.
        symbols: the program's dynamic dims.
    """
    count = formula(node)
    if count is None or node.op != "call_function":
        return sympy.Integer(0)

    def shape(value: Any) -> Any:
        """The shapes that the formulas want, as tuples of expressions."""
        if isinstance(value, torch.Tensor):
            return tuple(symbols.expression(size) for size in value.shape)
        if isinstance(value, tuple | list):
            return type(value)(shape(item) for item in value)
        return value

    args = fx.node.map_arg(node.args, lambda n: shape(n.meta["val"]))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: shape(n.meta["val"]))
    result = count(*args, **kwargs, out_val=shape(node.meta["val"]))
    return sympy.expand(result)


__all__ = ["formula", "node_flops"]
