"""What of a call selects a program, and what of it is shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hp_compile import CaptureError
from hp_compile.signature import Signature, flatten_call


def signature(*args: Any, **kwargs: Any) -> Signature:
    return flatten_call(args, kwargs)[0]


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    scale: float = 1.0


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (signature(X), signature(torch.ones(5, 7)), True),  # sizes do not count
        (signature(X), signature(torch.ones(2, 3, 1)), False),
        (signature(X), signature(X.double()), False),
        (signature(X), signature(X.clone().requires_grad_()), False),
        (signature(a=X, b=1), signature(b=1, a=X), True),
        (signature(X), signature(x=X), False),
        (signature(1), signature(1.0), False),
        (signature(1), signature(True), False),
        (signature(0.0), signature(-0.0), False),
        (signature(float("nan")), signature(float("nan")), True),
        (signature([X, None]), signature((X, None)), False),
        (signature({"a": X}), signature({"b": X}), False),
        (signature(Batch(X)), signature(Batch(torch.ones(9, 9))), True),
        (signature(Batch(X)), signature(Batch(X, 2.0)), False),
        (signature(torch.float32), signature(torch.float64), False),
    ],
)
def test_equality(left: Signature, right: Signature, equal: bool) -> None:
    assert (left == right) is equal
    if equal:
        assert hash(left) == hash(right)


def test_rebuild_and_text() -> None:
    made, tensors = flatten_call((X, [1, Batch(X * 2)]), {"flag": None})
    args, kwargs = made.rebuild(tensors)
    assert args[0] is X and torch.equal(args[1][1].tokens, X * 2) and kwargs == {"flag": None}
    text = "\n".join(made.describe())
    assert "float32[2d]" in text and "2, 3" not in text and "cpu" not in text


def test_grad_does_not_count_without_grad_mode() -> None:
    with torch.no_grad():
        assert signature(X.clone().requires_grad_()) == signature(X)


def test_unknown_argument() -> None:
    with pytest.raises(CaptureError, match="argument of type object"):
        signature(object())
