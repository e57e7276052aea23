"""Sizes: which programs serve them, how many are captured, and what the log says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel.torch_compat import graph as compat
from tests.hp_compile.single import Net, one_rank, pair, programs


def matches(sharded: Any, plain: nn.Module, *shapes: tuple[int, ...]) -> None:
    """Both models agree on inputs of these sizes."""
    for shape in shapes:
        x = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()]
        torch.testing.assert_close(sharded(x.reshape(shape)), plain(x.reshape(shape)))


def test_twenty_batch_sizes_share_a_program(caplog: pytest.LogCaptureFixture) -> None:
    with one_rank() as mesh, caplog.at_level(logging.INFO, "hp_compile"):
        sharded, plain = pair(Net, mesh)
        matches(sharded, plain, *((n, 6) for n in range(20, 1, -1)))
        assert programs(sharded) == 1
        matches(sharded, plain, (1, 6), (0, 6))  # sizes 1 and 0 get their own
        assert programs(sharded) == 3
        matches(sharded, plain, (4, 3, 6), (5, 9, 6), (6, 2, 6))  # two patterns: all dims symbolic
        assert programs(sharded) == 5
    captured = [r.getMessage() for r in caplog.records if "capturing program" in r.getMessage()]
    assert len(captured) == 5 and "sizes 20x6" in captured[0]
    assert [text.endswith("all dims symbolic") for text in captured] == [False] * 4 + [True]


class Loop(Net):
    """A loop over the batch: export fixes its size."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.body(x[i]) for i in range(x.shape[0])])


class Halves(Net):
    """Needs an even batch, and asks how large it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x.view(x.shape[0] // 2, 2, 6)).reshape(-1, 5)
        return y * 2 if x.shape[0] > 8 else y


@pytest.mark.slow
def test_sizes_that_forward_fixes_or_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    with one_rank() as mesh, caplog.at_level(logging.WARNING, "hp_compile"):
        sharded, plain = pair(Loop, mesh)
        matches(sharded, plain, *((n, 6) for n in range(2, 11)))
        assert programs(sharded) == 9
        assert "captured 9 programs for one input signature" in caplog.text
        assert "accepts only 9x6" in caplog.text
        sharded, plain = pair(Halves, mesh)
        matches(sharded, plain, (4, 6), (6, 6), (8, 6), (10, 6), (16, 6), (4, 6))
        assert programs(sharded) == 2


class Two(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x) + y


def test_equal_sizes_and_the_policy() -> None:
    with one_rank() as mesh:
        sharded, plain = pair(Two, mesh)
        for n in (4, 3, 5):
            x, y = torch.ones(n, 6), torch.ones(n, 5)
            torch.testing.assert_close(sharded(x, y), plain(x, y))
        assert programs(sharded) == 1
        with pytest.raises(Exception, match=r"(?s)must match|size"):
            sharded(torch.ones(4, 6), torch.ones(3, 5))
        fixed, plain = pair(Net, mesh, dynamic=False)
        matches(fixed, plain, (4, 6), (3, 6), (4, 6))
        assert programs(fixed) == 2
        every, plain = pair(Net, mesh, dynamic=True)
        matches(every, plain, (4, 3, 6), (5, 9, 6))
        assert programs(every) == 1


def test_constants_that_change_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(Net):
        def forward(self, x: Tensor, step: int) -> Tensor:
            return self.l(x) * step

    with one_rank() as mesh, caplog.at_level(logging.WARNING, "hp_compile"):
        sharded, plain = pair(Scaled, mesh)
        x = torch.ones(2, 6)
        with torch.no_grad():
            for step in range(9):
                assert torch.equal(sharded(x, step), plain(x, step))
        assert "9 values of a constant argument" in caplog.text and ": 8;" in caplog.text


def traced(mode: Any, *hints: int) -> list[Any]:
    """One symbol for each size."""
    return [mode.from_tensor(torch.empty(h), static_shapes=False).shape[0] for h in hints]


def test_guards_on_sizes_are_respected() -> None:
    mode = compat.fake_mode()
    a, b = traced(mode, 8, 12)
    shapes = ((a, 3), (b,))
    assert compat.sizes_fit(mode, shapes, ((10, 3), (5,)))
    assert not compat.sizes_fit(mode, shapes, ((10, 4), (5,)))  # a fixed dim
    assert not compat.sizes_fit(mode, shapes, ((10, 3, 1), (5,)))  # another number of dims
    assert not compat.sizes_fit(mode, shapes, ((1, 3), (5,)))  # below the range of a symbol
    assert bool(b % 4 == 0)  # as code generation would ask: true for the traced size, now a guard
    assert compat.sizes_fit(mode, shapes, ((10, 3), (16,)))
    assert not compat.sizes_fit(mode, shapes, ((10, 3), (5,)))


def test_derived_dims_are_solved_for() -> None:
    mode = compat.fake_mode()
    (a,) = traced(mode, 6)
    assert compat.bind_sizes(mode, ((a * 4,),), ((20,),)) == {a.node.expr: 5}
    assert compat.bind_sizes(mode, ((a * 4,),), ((21,),)) is None
    assert compat.sizes_fit(mode, ((a * 2 + 1,), (a,)), ((11,), (5,)))
    assert not compat.sizes_fit(mode, ((a * 2 + 1,), (a,)), ((11,), (6,)))
