"""A checksum of a tensor's bits: one int64, the same on every kind of device.

Every 32 bits or less of an element count as an integer times an odd number that depends on the position, in arithmetic
modulo 2^64. So equal bits have equal checksums, NaN included, and a difference in one integer is always seen: an odd number
has an inverse modulo 2^64. Differences in several cancel with a probability of 2^-32 at most, that of flipped signs. Integers
of 64 bits would not do: two flipped signs of float64 would cancel always.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["Checksum", "bit_patterns", "layout_number"]

# Elements that are multiplied at once: 8 MiB of products, whatever the size of the tensor.
_CHUNK = 1 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class Checksum:
    """Computes checksums of many tensors; keeps the factors of the positions while it lives.

    Example:
        >>> checksum = Checksum()
        >>> a, b = torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])
        >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(b))
        (True, False)
    """

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def __call__(self, value: Tensor | None) -> Tensor:
        """Returns a 0-dim int64 tensor on the device of ``value``, without waiting for the device.

        Args:
            value: A plain tensor of any shape, strides and dtype, or None. Shape and dtype count; strides do not.
        """
        if value is None:
            return torch.tensor(layout_number(None))
        bits = bit_patterns(value)
        total = bits.new_full((), layout_number(value), dtype=torch.int64)
        for index, piece in enumerate(bits.split(_CHUNK)):
            products = piece.to(torch.int64) * self._factors_on(piece.device, piece.numel())
            total += products.sum() * (_number(f"chunk {index}") | 1)
        return total

    def _factors_on(self, device: torch.device, count: int) -> Tensor:
        known = self._factors.get(device)
        if known is None or known.numel() < count:
            size = min(_CHUNK, 1 << max(count - 1, 1).bit_length())
            mixed = torch.arange(1, size + 1, device=device) * _number("first")
            mixed = (mixed ^ (mixed >> 32)) * (_number("second") | 1)
            known = self._factors[device] = (mixed ^ (mixed >> 29)) | 1
        return known[:count]


def layout_number(value: Tensor | None) -> int:
    """Returns a number that stands for shape and dtype of a tensor, or for None, the same in every process.

    Args:
        value: A tensor, or None.
    """
    return _number("none" if value is None else f"{value.dtype} {tuple(value.shape)}")


def bit_patterns(value: Tensor) -> Tensor:
    """Returns the bits of a plain tensor as a flat tensor of integers: one an element, or one for each of its 32 bits.

    Args:
        value: Any shape, strides and dtype.
    """
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.contiguous().reshape(-1).view(_INTEGERS[value.element_size()])


def _number(text: str) -> int:
    """A 64-bit number with a sign that looks drawn by chance, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
