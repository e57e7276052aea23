"""Distributed worlds inside one process: groups that only pretend, ranks simulated on real data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.dist_worker import clear_mesh_caches


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a fake world of any size; its collectives move no data.

    Meshes, groups, plans and shapes are real, values after a collective are not.

    Args:
        world_size: The number of ranks of the default group.
        rank: The rank that this process plays.

    Raises:
        RuntimeError: A process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("fake_world needs a process without a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        clear_mesh_caches()


@contextlib.contextmanager
def local_ranks(world_size: int) -> Iterator[LocalTensorMode]:
    """Compute with the data of all ranks at once in this process, collectives included.

    Inside, tensors are `LocalTensor`s that hold one value per rank: make one that differs per rank
    with `mode.rank_map(lambda rank: ...)`, read one value back with `tensor.reconcile()` (all ranks
    must agree) or all of them through `mode.tensor_map`.

    Args:
        world_size: The number of ranks.

    Yields:
        The active mode.
    """
    with fake_world(world_size), LocalTensorMode(world_size) as mode:
        yield mode
