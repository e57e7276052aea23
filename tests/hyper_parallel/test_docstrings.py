"""The examples in the docstrings of the vocabulary run as printed."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.dist_pool import fake_world


@pytest.mark.parametrize("name", ["mesh", "placement", "policy", "roles"])
def test_examples(name: str) -> None:
    with fake_world(8):
        failed, run = doctest.testmod(import_module(f"hyper_parallel.{name}"))
    assert run > 0
    assert failed == 0
