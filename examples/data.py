"""Real text that every machine has: the Python sources of the standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel import MeshLayout

SKIPPED = {
    "__pycache__",
    "dist-packages",
    "idlelib",
    "lib-dynload",
    "site-packages",
    "test",
    "tests",
}


def standard_library(limit: int = 4_000_000) -> Tensor:
    """Returns up to `limit` bytes of source, uint8 of shape (bytes,), equal on every rank of a machine.

    Args:
        limit: Stop after this many bytes, so that every run starts quickly.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)
        for name in sorted(files):
            if name.endswith(".py"):
                text += (Path(folder) / name).read_bytes()
            if len(text) >= limit:
                return torch.frombuffer(text, dtype=torch.uint8)[:limit]
    return torch.frombuffer(text, dtype=torch.uint8)


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Number of this rank among those that see different data, and how many these are.

    Ranks that differ in a tp dim only share their data.

    Args:
        mesh: A mesh whose dims have roles.
    """
    layout = MeshLayout.from_mesh(mesh)
    at, count = 0, 1
    for name, size, index in zip(layout.dim_names, layout.shape, layout.coordinate, strict=True):
        if name in layout.batch_dims:
            at, count = at * size + index, count * size
    return at, count


class Batches:
    """Windows of the text in a shuffled order that depends on the seed only, never on the ranks.

    The whole state is `position`: how many windows all ranks together have taken. A run on other
    ranks, or on one, therefore goes through the same windows in the same order.

    Args:
        text: uint8 of shape (bytes,).
        seq_len: Tokens per sequence; a window is one longer, for the targets.
        seed: Of the order; every epoch has its own.
        position: Windows already taken.
    """

    def __init__(self, text: Tensor, seq_len: int, seed: int, position: int = 0) -> None:
        self.windows = text[: len(text) // (seq_len + 1) * (seq_len + 1)].view(-1, seq_len + 1)
        self.seed = seed
        self.position = position
        self._order: tuple[int, Tensor] | None = None

    def take(self, size: int, rank: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the next `size * ranks` windows.

        Args:
            size: Sequences a rank.
            rank: Number of this rank among those that see different data.
            ranks: How many these are.
            device: Where to put the result.

        Returns:
            Tokens and targets, both int64 of shape (size, seq_len).
        """
        first = self.position + rank * size
        self.position += size * ranks
        rows = torch.stack([self.windows[self._index(first + i)] for i in range(size)]).long()
        rows = rows.to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _index(self, taken: int) -> int:
        epoch, offset = divmod(taken, len(self.windows))
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(len(self.windows), generator=generator)
        return int(self._order[1][offset])
