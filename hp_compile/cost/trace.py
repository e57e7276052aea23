"""A simulated step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hp_compile.cost.simulate import Span, Timeline


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object: one thread a stream, times in microseconds.

    Args:
        timeline: a simulated step.
    """
    streams = list(timeline.busy)
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "pid": 0,
            "tid": index,
            "name": "thread_name",
            "args": {"name": stream},
        }
        for index, stream in enumerate(streams)
    ]
    name = {"name": f"one rank, simulated on {timeline.profile.name}"}
    events.append({"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": name})
    events += [_event(span, streams.index(span.stream)) for span in timeline.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, thread: int) -> dict[str, Any]:
    op = span.op
    args: dict[str, Any] = {"phase": op.phase, "node": op.name, "module": op.module}
    if op.comm is not None:
        args |= {"axes": list(op.comm.axes), "purpose": op.comm.purpose}
        args["params"] = list(op.comm.params)
    return {
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "name": op.comm.kind if op.comm else op.target,
        "cat": op.phase,
        "ts": span.start * 1e6,
        "dur": span.seconds * 1e6,
        "args": args,
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Writes the trace to a file.

    Args:
        timeline: a simulated step.
        path: where to, e.g. ``step.json``.
    """
    Path(path).write_text(json.dumps(chrome_trace(timeline)))


__all__ = ["chrome_trace", "write_trace"]
