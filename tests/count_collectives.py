"""Count the collectives that really run, from outside the code under test.

    with count_collectives() as calls:
        loss_fn(model(tokens), targets).backward()
    assert calls.kinds() == {"all_gather": 5, "reduce_scatter": 3}

Both ways to a collective are seen: `torch.distributed` calls (namespace `c10d`, used by PyTorch's
FSDP2) and functional ones (namespace `_c10d_functional`, used by DTensor and compiled graphs). The
C++ reducer of DistributedDataParallel bypasses the dispatcher and is not seen. Tracing with fake or
meta tensors counts nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")

KINDS = {
    # c10d (broadcast_ is in both)
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "monitored_barrier_": "barrier",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "scatter_": "scatter",
    "send": "send",
    # _c10d_functional
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "batch_p2p_ops": "send",
    "broadcast": "broadcast",
    "irecv": "recv",
    "isend": "send",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
}
NOT_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
# The argument that holds what this rank puts in, where it is not the only one with tensors.
INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list")


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """One collective that ran on this rank.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, ...
        ranks: Global ranks of the group, in group order.
        dtype: Element type on the wire.
        input_bytes: Bytes that this rank puts in, padding included.
        nbytes: Bytes that this rank sends by the ring algorithm; see `ring_bytes`.
        op: Namespace and name of the op.
    """

    kind: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    input_bytes: int
    nbytes: int
    op: str


class CollectiveCalls(list[CollectiveCall]):
    """The calls in the order in which they were issued."""

    def kinds(self) -> dict[str, int]:
        """Return how many calls there were of each kind."""
        return dict(collections.Counter(call.kind for call in self))

    def by_group(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Return how many calls there were of each kind and rank list."""
        return dict(collections.Counter((call.kind, call.ranks) for call in self))

    def nbytes(self, kind: str | None = None) -> int:
        """Return the bytes sent by all calls, or by those of one kind."""
        return sum(call.nbytes for call in self if kind in (None, call.kind))


def ring_bytes(kind: str, input_bytes: int, size: int) -> int:
    """Return the bytes one of `size` ranks sends when `input_bytes` go in, by the ring algorithm.

    An all-gather passes each slice on size - 1 times; a reduce-scatter does so with slices of
    1/size of the input, an all-reduce is both, and an all-to-all keeps its own slice.
    """
    steps = {"all_gather": size, "all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1}
    if kind not in steps:
        return 0 if kind in ("barrier", "recv") or size == 1 else input_bytes
    return steps[kind] * (size - 1) * input_bytes // size


class _CountMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = CollectiveCalls()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor issues the collective itself, on plain tensors
        kwargs = kwargs or {}
        if func.namespace in NAMESPACES:
            call = _describe(func, args, kwargs)
            if call is not None:
                self.calls.append(call)
        return func(*args, **kwargs)


def _describe(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CollectiveCall | None:
    name = func.overloadpacket.__name__
    if name in NOT_COLLECTIVES:
        return None
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    tensors = [t for t in tree_leaves(named) if isinstance(t, Tensor)]
    if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        return None
    given = next((named[key] for key in INPUTS if key in named), None)
    inputs = [t for t in tree_leaves(given) if isinstance(t, Tensor)] or tensors
    kind = KINDS[name]  # a KeyError here is a collective this module does not know yet
    ranks = tuple(dist.get_process_group_ranks(_group(named)))
    size = sum(t.nbytes for t in inputs)
    return CollectiveCall(
        kind=kind,
        ranks=ranks,
        dtype=inputs[0].dtype,
        input_bytes=size,
        nbytes=ring_bytes(kind, size, len(ranks)),
        op=f"{func.namespace}.{name}",
    )


def _group(named: Mapping[str, Any]) -> dist.ProcessGroup:
    group = named["process_group"] if "process_group" in named else named["group_name"]
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    if isinstance(group, dist.ProcessGroup):
        return group
    return dist.ProcessGroup.unbox(group)


@contextlib.contextmanager
def count_collectives() -> Iterator[CollectiveCalls]:
    """Record every collective that this rank issues inside the block."""
    mode = _CountMode()
    with mode:
        yield mode.calls
