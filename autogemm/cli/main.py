"""The command line: one file per command, joined here, with the exit codes all of them share."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer
import typer.core

from .. import __version__
from ..errors import AutogemmError, InputError
from . import render
from .bench import bench
from .bundle import bundle
from .check import check
from .compile import compile_command
from .database import diff, export, merge, prune
from .doctor import doctor
from .explain import explain
from .predict import predict
from .report import report
from .shapes import shapes
from .show import show
from .tune import tune
from .verify import verify
from .worker import worker

NOTHING_USABLE: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

# The base of what typer raises for wrong arguments; it exports only this subclass.
_UsageError: Final[Any] = typer.BadParameter.__base__


class _Commands(typer.core.TyperGroup):
    """The commands; wrong arguments are one line on stderr, as every other bad input is."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **named: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        try:
            status = super().main(given or ["--help"], *rest, **{**named, "standalone_mode": False})
        except _UsageError as problem:
            path = problem.ctx.command_path if problem.ctx is not None else "autogemm"
            text = " ".join(problem.format_message().split()).rstrip(".")
            render.error(InputError(f"{text}{_got(problem, given)}; see: {path} --help"))
            status = BAD_INPUT
        except InputError as problem:  # From --version, which is no command.
            render.error(problem)
            status = BAD_INPUT
        sys.exit(status if given else BAD_INPUT)


def _got(problem: Any, given: Sequence[str]) -> str:
    """Return ``, got VALUE`` for a refused value of an option, read from the command line; empty if there was none."""
    names = getattr(getattr(problem, "param", None), "opts", ())
    for name, value in zip(given, [*given[1:], ""], strict=True):
        if name in names and value:
            return f", got {value!r}"
        if "=" in name and name.split("=", 1)[0] in names:
            return f", got {name.split('=', 1)[1]!r}"
    return ""


app = typer.Typer(
    name="autogemm",
    cls=_Commands,
    help="Generate, check on the CPU, tune and ship GEMM kernels.\n\n"
    "Exit status: 0 done, 1 nothing usable found or a finding, 2 bad input. Results go to stdout, progress to stderr.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with every error that is raised on purpose turned into one message and an exit status."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AutogemmError as error:
            render.error(error)
            raise typer.Exit(BAD_INPUT if isinstance(error, InputError) else NOTHING_USABLE) from None
        except KeyboardInterrupt:
            render.note("interrupted; what is finished is kept, and the same command goes on from there")
            raise typer.Exit(INTERRUPTED) from None

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        render.line(f"autogemm {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


# In the order of the help: the main job, then looking at results, then moving them, then the rest.
_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "tune": tune, "bench": bench, "show": show, "explain": explain, "report": report, "predict": predict, "check": check,
    "compile": compile_command, "shapes": shapes, "verify": verify, "merge": merge, "diff": diff, "prune": prune,
    "export": export, "bundle": bundle, "worker": worker, "doctor": doctor,
}  # fmt: skip
for _name, _command in _COMMANDS.items():
    app.command(_name)(guarded(_command))


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        app()
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            # Leaving in the ordinary way would first finish all that background threads have queued. What only that would end:
            compiling = sys.modules.get("autogemm.compile.pool")
            if compiling is not None:
                compiling.close_shared_pools()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
