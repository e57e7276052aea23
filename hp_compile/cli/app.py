"""The program ``hp-compile``: its commands, and what happens to errors.

A command is a module of this folder with a ``typer.Typer`` called ``app``; to add one, write the module and name it in
``COMMANDS``. Exit codes: 0 all is well, 1 a finding of ``check``, ``diff --exit-code`` or ``verify``, 2 the request
cannot be carried out.
"""

from __future__ import annotations

import signal
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from hp_compile.cli import check, cost, diff, explain, plan, sweep, verify
from hp_compile.cli.console import stderr
from hp_compile.cli.errors import Finding
from hyper_parallel.errors import HPCompileError

COMMANDS = (plan, diff, check, explain, verify, cost, sweep)


class _Group(TyperGroup):
    """Commands whose errors are one message and an exit code instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except Finding as finding:
            raise typer.Exit(1) from finding
        except HPCompileError as error:
            console = stderr()
            console.print("error:", style="bold red", end=" ")
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    name="hp-compile",
    help="Read, compare, check and prove the communication of a sharded PyTorch model. No GPU, no weights, no launched "
    "processes: one process plays one rank of a mesh of any size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in COMMANDS:
    app.add_typer(_module.app)


def main() -> None:
    """The console script."""
    if hasattr(signal, "SIGPIPE"):  # hp-compile plan ... | head
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # What torch says about its own kernels and deprecations is no news about a plan.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    app(prog_name="hp-compile")
