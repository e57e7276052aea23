"""Where communication runs: side streams on an accelerator, threads of the backend on the CPU.

On an accelerator every collective is queued on a stream of its own and ordered by events. The CPU
has no streams; there collectives are started asynchronously and their ``Work`` is waited for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["Streams"]


def _no_stream(priority: int) -> None:
    return None


class Streams:
    """The streams of one model.

    Attributes:
        real: Whether the device has streams.
        copy_in: Casts and copies before an all-gather.
        gather: All-gathers.
        scatter: Reduce-scatters and what follows them.
        reduce: All-reduces over replicas, on another network and so beside the others.
    """

    def __init__(self, device: torch.device) -> None:
        self.real = device.type != "cpu"
        self._module: Any = None
        make: Any = _no_stream
        if self.real:
            self._module = torch.get_device_module(device)
            make = self._module.Stream
        self.copy_in: Any = make(priority=-1)
        self.gather: Any = make(priority=-1)
        self.scatter: Any = make(priority=-1)
        self.reduce: Any = make(priority=0)

    def current(self) -> Any:
        """Returns the stream that computes now; None on the CPU."""
        return self._module.current_stream() if self.real else None

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Queues what runs inside on ``stream``."""
        return self._module.stream(stream) if self.real else contextlib.nullcontext()

    def event(self, stream: Any = None) -> Any:
        """Records an event on a stream (the current one by default); None on the CPU."""
        return (stream or self.current()).record_event() if self.real else None

    def wait(self, stream: Any, event: Any) -> None:
        """Makes a stream wait for an event."""
        if event is not None:
            (stream or self.current()).wait_event(event)

    def follow(self, stream: Any, other: Any) -> None:
        """Makes a stream wait for all that is queued on another one."""
        if self.real:
            stream.wait_stream(other)
