"""One HTML file that shows a plan: notes, parameters, a step on its streams, memory, programs, the difference to another.

Needs the extra ``page`` (jinja2 and bokeh): ``pip install 'hyper-parallel[page]'``.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from hp_compile.cost import CostModel, Profile
from hp_compile.plan import Plan
from hyper_parallel.errors import HPCompileError

#: Nodes of a program that a page lists; of a larger one, the first.
MAX_LINES = 20_000


def render(
    plan: Plan,
    other: Plan | None = None,
    profile: str | Profile = "h100",
    *,
    streams: int = 1,
) -> str:
    """Renders a plan as one HTML file that needs no network.

    Args:
        plan: a plan with a program.
        other: a plan to compare with: its parameters and its dump appear as the state before.
        profile: the machine that the step is simulated on (see ``hp_compile.cost.load_profile``).
        streams: communication streams of the simulation, 1 or 2.

    Returns:
        The text of the file.

    Raises:
        CaptureError: a plan was made without example inputs.
        HPCompileError: jinja2 or bokeh is not installed, or the profile does not exist.

    Example:
        >>> Path("plan.html").write_text(render(plan))  # doctest: +SKIP
    """
    try:
        import jinja2

        from hp_compile.page import plots
    except ModuleNotFoundError as error:
        raise HPCompileError(
            f"a page needs {error.name}, which is not installed: pip install 'hyper-parallel[page]'"
        ) from error
    from hp_compile.page import data

    model = CostModel(plan)
    estimate = model.at()
    timeline = model.timeline(profile, streams=streams)
    places, live = model.live()
    resting = estimate.memory.params + estimate.memory.optimizer
    script, drawing = plots.plots(timeline, places, live, timeline.profile.memory_bytes, resting)
    assets = resources.files(__name__).joinpath("assets")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(assets.joinpath("page.html.j2").read_text())
    return template.render(
        plan=plan,
        other=other,
        notes=data.note_rows(plan, other),
        columns=data.COLUMNS,
        rows=data.parameter_rows(plan, other),
        collectives=data.collective_rows(plan),
        figures=data.figures(plan, estimate, timeline),
        formulas=data.formulas(model),
        modules=data.modules(plan),
        max_lines=MAX_LINES,
        difference=[] if other is None else data.difference(plan, other),
        profile=timeline.profile,
        bokeh=plots.resources(),
        plot_script=script,
        plot_drawing=drawing,
        style=assets.joinpath("page.css").read_text(),
        script=assets.joinpath("page.js").read_text(),
    )


def write(
    path: str | Path,
    plan: Plan,
    other: Plan | None = None,
    profile: str | Profile = "h100",
) -> None:
    """Writes :func:`render` to a file.

    Args:
        path: where to.
        plan: as for :func:`render`.
        other: as for :func:`render`.
        profile: as for :func:`render`.
    """
    Path(path).write_text(render(plan, other, profile), encoding="utf-8")


__all__ = ["render", "write"]
