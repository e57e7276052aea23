"""Fixtures and session hooks for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported: several ranks share the cores, and sums must not depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Models are built from configs; a test that reaches for the network must fail everywhere alike.
os.environ["HF_HUB_OFFLINE"] = "1"
# Every pass of every test is verified, in this process and in the workers, which inherit it.
os.environ.setdefault("HP_COMPILE_VERIFY", "each")

import pytest
import torch
import torch.distributed as dist

from tests.dist_pool import close_pools
from tests.dist_worker import reset_state


def pytest_sessionstart(session: pytest.Session) -> None:
    """Use one thread, as the workers do."""
    torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the workers before the interpreter starts to shut down."""
    close_pools()


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Start every test with the same seeds, and fail one that leaves a process group behind."""
    reset_state()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group initialised")
