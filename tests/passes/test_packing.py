"""Element tracking against the real thing: the same operators on `torch.arange`, where every element is its own name."""

from __future__ import annotations

import random

import pytest
import torch

from passes.verify.compare import Mismatch, match
from passes.verify.packing import Pack, concat, pad, whole
from passes.verify.sources import Cast, Term


def numbers(pack: Pack, start: dict[str, int]) -> torch.Tensor:
    """The pack as numbers: element i of a source is `start[source] + i`, padding is -1."""
    flat: list[int] = []
    for item in pack.elements(0, pack.numel):
        rows = [item.row(r) for r in range(item.rows)] if hasattr(item, "rows") else [[item]]
        for runs in rows:
            for run in runs:
                first = -1 if run.source is None else start[run.source.digest] + run.offset
                step = 0 if run.source is None else 1
                flat += [first + step * i for i in range(run.length)]
    return torch.tensor(flat, dtype=torch.int64).reshape(pack.shape)


def random_step(
    rng: random.Random, packs: list[Pack], tensors: list[torch.Tensor]
) -> tuple[Pack, torch.Tensor]:
    index = rng.randrange(len(packs))
    pack, tensor = packs[index], tensors[index]
    dim = rng.randrange(tensor.dim())
    choice = rng.choice(["reshape", "slice", "pad", "cat", "flat"])
    if choice == "slice":
        start = rng.randrange(tensor.shape[dim] + 1)
        stop = rng.randrange(start, tensor.shape[dim] + 1)
        return pack.slice(dim, start, stop), tensor.narrow(dim, start, stop - start)
    if choice == "pad":
        pads = [rng.randrange(3) for _ in range(2 * rng.randrange(1, tensor.dim() + 1))]
        return pad(pack, pads), torch.nn.functional.pad(tensor, pads, value=-1)
    if choice == "cat":
        same = [
            i
            for i, t in enumerate(tensors)
            if t.dim() == tensor.dim()
            and all(
                a == b
                for d, (a, b) in enumerate(zip(t.shape, tensor.shape, strict=True))
                if d != dim
            )
        ]
        parts = [rng.choice(same) for _ in range(rng.randrange(1, 4))]
        return concat([packs[i] for i in parts], dim), torch.cat([tensors[i] for i in parts], dim)
    if choice == "flat" or not tensor.numel():
        return pack.reshape([-1] if tensor.numel() else [0]), tensor.reshape(-1)
    rows = rng.choice([n for n in range(1, tensor.numel() + 1) if tensor.numel() % n == 0])
    return pack.reshape([rows, -1]), tensor.reshape(rows, -1)


@pytest.mark.parametrize("seed", range(60))
def test_packs_follow_every_element(seed: int) -> None:
    rng = random.Random(seed)
    start = {"a": 0, "b": 1000}
    packs = [whole(Term("a"), (4, 3, 2)), whole(Term("b"), (6, 4))]
    tensors = [torch.arange(24).reshape(4, 3, 2), 1000 + torch.arange(24).reshape(6, 4)]
    for _ in range(12):
        pack, tensor = random_step(rng, packs, tensors)
        if tensor.numel() > 400:
            continue
        assert pack.shape == tuple(tensor.shape)
        assert torch.equal(numbers(pack, start), tensor)
        assert match(pack, pack) == ()
        packs.append(pack)
        tensors.append(tensor)
    for left, a in zip(packs, tensors, strict=True):
        for right, b in zip(packs, tensors, strict=True):
            if left.numel != right.numel or left.numel == 0:
                continue
            if torch.equal(a.reshape(-1), b.reshape(-1)):
                assert match(left, right) == ()
            else:
                with pytest.raises(Mismatch):
                    match(left, right)


def test_wrappers_are_looked_through() -> None:
    plain = whole(Term("a"), (4,))
    cast = plain.map(lambda s: Cast(torch.float32, s))
    assert [layer.dtype for layer in match(cast, plain)] == [torch.float32]
    half = concat([cast.slice(0, 0, 2), plain.slice(0, 2, 4)], 0)
    with pytest.raises(Mismatch):  # not the same wrappers everywhere
        match(half, plain)


def test_a_cut_along_an_inner_dim_costs_one_item() -> None:
    weight = whole(Term("w"), (8192, 4096))
    shards = [weight.slice(1, 1024 * r, 1024 * (r + 1)) for r in range(4)]
    assert all(len(s.items) == 1 for s in shards)
    again = concat(shards, 1)
    assert len(again.items) == 1 and match(again, weight) == ()
