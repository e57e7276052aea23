"""A checksum sees every difference in the bits, and nothing else."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import checksum as module
from hyper_parallel.checksum import Checksum, bit_patterns, layout_number
from hyper_parallel.errors import PolicyError
from hyper_parallel.replicas import VARIABLE, checks_every_step

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.complex64, torch.complex128, torch.int64, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def of(value: torch.Tensor | None) -> int:
    return int(Checksum()(value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    value = torch.randint(0, 2, (3, 5)).to(dtype)
    found = {of(value)}
    bits = bit_patterns(value.clone())
    width = 1 if dtype == torch.bool else 8 * bits.element_size()
    for index in range(bits.numel()):
        for bit in range(width):
            copy = value.clone()
            flipped = bit_patterns(copy)  # a view of a contiguous tensor
            mask = 1 << bit if bit < 8 * bits.element_size() - 1 else -(1 << bit)
            flipped[index] ^= mask
            found.add(of(copy))
    assert len(found) == 1 + bits.numel() * width


def test_what_counts_and_what_does_not() -> None:
    value = torch.randn(6, 4)
    assert of(value) == of(value.clone()) == of(value.t().contiguous().t())
    assert of(value[1:]) == of(value[1:].clone())
    assert of(value) != of(value.reshape(4, 6)) and of(torch.zeros(2)) != of(torch.zeros(3))
    assert of(torch.zeros(2)) != of(torch.zeros(2).int()) and of(None) != of(torch.zeros(0))
    assert of(torch.tensor(0.0)) != of(torch.tensor(-0.0))
    nan = torch.full((3,), float("nan"))
    assert of(nan) == of(nan.clone())
    assert layout_number(value) == layout_number(-value) != layout_number(value.t())
    pair = torch.tensor([1 + 2j, 3 + 4j])
    assert of(pair.conj()) == of(pair.conj().resolve_conj()) != of(pair)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_differences_that_could_cancel(dtype: torch.dtype) -> None:
    value = torch.randn(4096, dtype=dtype)
    others = [value, -value, value.flip(0), value.roll(1), value + 1]
    for i in range(0, 4094, 89):
        swapped = value.clone()
        swapped[i], swapped[i + 1] = value[i + 1], value[i]
        others.append(swapped)
        signs = value.clone()
        signs[i : i + 2] *= -1
        others.append(signs)
    distinct = {tuple(bit_patterns(v).tolist()) for v in others}
    assert len({of(v) for v in others}) == len(distinct) > 50


def test_long_tensors_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    value = torch.arange(64.0).repeat(5)
    swapped = value.clone()
    swapped[0], swapped[64 + 1] = value[64 + 1], value[0]
    parts = torch.cat([value[64:], value[:64]]) + torch.arange(5).repeat_interleave(64)
    assert len({of(value), of(swapped), of(parts), of(value[:-1])}) == 4
    one = Checksum()
    assert [int(one(value[:n])) for n in (3, 200, 7)] == [of(value[:n]) for n in (3, 200, 7)]


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not checks_every_step()
    monkeypatch.setenv(VARIABLE, "1")
    assert checks_every_step()
    monkeypatch.setenv(VARIABLE, "often")
    with pytest.raises(
        PolicyError, match="HP_COMPILE_CHECK_REPLICAS: expected 0 or 1, got 'often'"
    ):
        checks_every_step()
