"""Tensor parallel: turn the exported single-device forward into the forward of one tensor-parallel rank.

Contract: needs an exported forward (operators, shapes and parameters of one device) and, for every parameter that is cut,
its layout. Provides the same forward on parts: parameters have their local shapes, and the collectives between operators
are differentiable calls (``passes.tensor_parallel.functional``), so the joint trace that follows finds the backward ones.

    before                              after (tp=2; w1 cut on dim 0, w2 on dim 1)
      h = linear(x, w1)  [b, 64]          xv = vary(x)                  backward: all-reduce
      a = silu(h)                         h = linear(xv, w1)  [b, 32]
      y = linear(a, w2)  [b, 16]          a = silu(h)
      return add(x, y)                    p = linear(a, w2)   [b, 16], a term
                                          y = total(p)                  forward: all-reduce
                                          return add(x, y)

It works in two walks. The first (``follow``) follows layouts through the graph: each operator has a rule that says which
layouts it can work on (``elementwise``, ``views``, ``products``; what a rule is: ``rule``). The second (``write``) writes
the local graph; a value is converted to a layout once, however many operators read it there. An operator without a rule
gets whole inputs, and a :class:`Gathered` note says so.
"""

from __future__ import annotations

from passes.tensor_parallel import elementwise, products, views  # noqa: F401  they register their rules
from passes.tensor_parallel.layout import REPLICATED, Layout, sharded
from passes.tensor_parallel.transform import (
    Boundary,
    Gathered,
    Parallelised,
    tensor_parallel,
)

__all__ = [
    "REPLICATED",
    "Boundary",
    "Gathered",
    "Layout",
    "Parallelised",
    "sharded",
    "tensor_parallel",
]
