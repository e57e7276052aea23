"""Semi-private torch for its structured trace, which ``TORCH_TRACE=folder`` writes and ``tlparse`` shows.

Checked on torch 2.13.0. ``tests/test_torch_compat.py`` probes every name.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._logging import trace_structured

__all__ = ["trace_artifact"]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to the structured trace; costs nothing while nobody writes one.

    Args:
        name: name of the artifact.
        text: makes the text; called only if there is a trace.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
