"""The plots of a page: a step on its streams, and memory over the same step.

Bokeh, because its core is inlined in 1.3 MB (Plotly takes 4.6 MB) and draws on a canvas, on which tens of thousands of
operators stay movable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.embed import components
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure
from bokeh.resources import Resources

from hp_compile.cost import Timeline
from hp_compile.cost.simulate import COMPUTE
from hp_compile.page.data import seconds, size

#: Fill colour of what is drawn, chosen to stay apart in grey and for colour-blind readers.
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#9ecae9",
    "optimizer": "#79706e",
    "all_gather": "#f58518",
    "reduce_scatter": "#54a24b",
    "all_reduce": "#b279a2",
    "all_to_all": "#e45756",
}
MEMORY = {
    "weights": "#f58518",
    "saved": "#4c78a8",
    "activations": "#9ecae9",
    "gradients": "#54a24b",
    "optimizer": "#79706e",
}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "bytes"))
TOOLS = "xpan,xwheel_zoom,xbox_zoom,reset,save"


def resources() -> str:
    """Bokeh's own script, to stand in the page."""
    return Resources(mode="inline", components=["bokeh"]).render_js()


def plots(
    timeline: Timeline,
    places: Sequence[tuple[str, str]],
    live: Mapping[str, Sequence[float]],
    limit: float,
    resting: float,
) -> tuple[str, str]:
    """The timeline above the memory, on one time axis.

    Args:
        timeline: a simulated step.
        places: name and phase of every place in the step.
        live: bytes in memory there, by category.
        limit: memory of the device.
        resting: bytes that are there before the step: shards and optimizer state.

    Returns:
        The script and the element to stand in a page.
    """
    end = max(timeline.seconds, 1e-9) * 1e3
    shared = Range1d(0, end, bounds=(0, end))
    above = _streams(timeline, shared)
    below = _memory(timeline, places, live, shared, limit, resting)
    script, div = components(column(above, below, sizing_mode="stretch_width"))
    return script, div


def _streams(timeline: Timeline, shared: Range1d) -> Any:
    streams = list(timeline.busy)[::-1]
    plot = _figure(shared, 90 + 55 * len(streams), y_range=streams, title="One step, by stream")
    rows: dict[str, dict[str, list[Any]]] = {}
    for span in timeline.spans:
        op = span.op
        kind = op.comm.kind if op.comm else op.phase
        data = rows.setdefault(
            kind, {k: [] for k in ("y", "left", "right", "what", "node", "module", "took", "more")}
        )
        data["y"].append(span.stream)
        data["left"].append(span.start * 1e3)
        data["right"].append((span.start + span.seconds) * 1e3)
        data["what"].append(op.comm.kind if op.comm else op.target)
        data["node"].append(op.name)
        data["module"].append(op.module.removeprefix("module."))
        data["took"].append(seconds(span.seconds))
        data["more"].append(_more(op))
    for kind, data in rows.items():
        plot.hbar(
            y="y",
            left="left",
            right="right",
            height=0.7,
            source=ColumnDataSource(data),
            color=COLOURS.get(kind, "#bab0ac"),
            line_color="white",
            line_width=0.3,
            legend_label=kind.replace("_", "-"),
        )
    hover = [("", "@what"), ("takes", "@took"), ("node", "@node"), ("module", "@module")]
    plot.add_tools(HoverTool(tooltips=[*hover, ("", "@more")]))
    _legend(plot)
    plot.ygrid.visible = False
    plot.xaxis.visible = False
    return plot


def _more(op: Any) -> str:
    if op.comm is None:
        return op.phase
    names = ", ".join(op.comm.params[:3]) + (" …" if len(op.comm.params) > 3 else "")
    return f"{op.comm.purpose} over {'×'.join(op.comm.axes)}: {names}"


def _memory(
    timeline: Timeline,
    places: Sequence[tuple[str, str]],
    live: Mapping[str, Sequence[float]],
    shared: Range1d,
    limit: float,
    resting: float,
) -> Any:
    times = _times(timeline, places)
    kinds = [kind for kind in live if max(live[kind], default=0) > 0]
    data: dict[str, Any] = {"x": [], "node": [], "total": []}
    keep = _steps(times, [[live[kind][i] for kind in kinds] for i in range(len(places))])
    for index, time in keep:
        data["x"].append(time)
        data["node"].append(f"{places[index][1]}: {places[index][0]}")
        data["total"].append(size(resting + sum(live[kind][index] for kind in kinds)))
    top = resting + max((sum(v[i] for v in live.values()) for i in range(len(places))), default=0)
    unit, name = next(((u, n) for u, n in UNITS if top >= u), UNITS[-1])
    data["resting"] = [resting / unit for _ in keep]
    for kind in kinds:
        data[kind] = [live[kind][index] / unit for index, _ in keep]
    top /= unit
    plot = _figure(
        shared, 300, y_range=Range1d(0, top * 1.08 or 1), title="Memory of a rank over the step"
    )
    stack = ["resting", *kinds]
    colours = ["#d8d4d0", *(MEMORY[kind] for kind in kinds)]
    labels = ["shards and optimizer state", *(_label(kind) for kind in kinds)]
    plot.varea_stack(
        stack, x="x", color=colours, source=ColumnDataSource(data), legend_label=labels
    )
    line = plot.line(
        x="x",
        y="edge",
        source=ColumnDataSource(
            {**data, "edge": [sum(data[k][i] for k in stack) for i in range(len(keep))]}
        ),
        color="#333333",
        line_width=1,
    )
    tips = [("in memory", "@total"), ("at", "@node")]
    plot.add_tools(HoverTool(renderers=[line], mode="vline", tooltips=tips))
    if limit < top * unit * 1.08:
        plot.hspan(
            y=[limit / unit], color="#e45756", line_dash="dashed", legend_label="device memory"
        )
    _legend(plot)
    plot.xaxis.axis_label = "milliseconds, simulated"
    plot.yaxis.axis_label = name
    return plot


def _label(kind: str) -> str:
    return {"weights": "gathered weights", "saved": "saved for backward"}.get(kind, kind)


def _times(timeline: Timeline, places: Sequence[tuple[str, str]]) -> list[float]:
    """When each place is reached on the compute stream, in milliseconds; places without time share one."""
    known = {(s.op.name, s.op.phase): s.start for s in timeline.spans if s.stream == COMPUTE}
    times, now = [], 0.0
    for place in places:
        now = max(now, known.get(place, now))
        times.append(now * 1e3)
    return times


def _steps(times: Sequence[float], values: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """Corners of a step function: what holds at a place holds until the next one where something changes."""
    corners: list[tuple[int, float]] = []
    for index, time in enumerate(times):
        if index and values[index] == values[index - 1] and index != len(times) - 1:
            continue
        if index:
            corners.append((index - 1, time))
        corners.append((index, time))
    return corners


def _figure(shared: Range1d, height: int, **options: Any) -> Any:
    plot = figure(
        x_range=shared,
        height=height,
        sizing_mode="stretch_width",
        tools=TOOLS,
        active_drag="xpan",
        active_scroll="xwheel_zoom",
        output_backend="canvas",
        **options,
    )
    plot.toolbar.logo = None
    plot.min_border_left = 110
    plot.title.text_font_size = "13px"
    return plot


def _legend(plot: Any) -> None:
    if not plot.legend:
        return
    legend = plot.legend[0]
    plot.add_layout(legend, "right")
    legend.click_policy = "hide"
    legend.label_text_font_size = "11px"
    legend.border_line_color = None
    legend.padding = 2


__all__ = ["plots", "resources"]
