"""The `plait` command. Exit codes: 0 ok, 1 failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from typer.exceptions import TyperException

from plait.service.commands import (
    cancel,
    demo,
    dev,
    doctor,
    generate,
    schema,
    simulate,
    summarize,
    topics,
    trace_view,
    worker,
)
from plait.service.commands.connect import quiet

app = typer.Typer(
    name="plait",
    help="Turns a Kafka topic of LLM requests into streams of tokens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (demo, dev, worker, generate, summarize, cancel, topics, schema, doctor, simulate, trace_view):
    app.command(module.__name__.rpartition(".")[2].replace("_", "-"))(module.command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"plait {version('plait')}")
        raise typer.Exit()


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Turns a Kafka topic of LLM requests into streams of tokens."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors become one line on stderr."""
    quiet()
    try:
        code = app(args=list(arguments), prog_name="plait", standalone_mode=False)
    except TyperException as error:
        if message := error.format_message():
            context = getattr(error, "ctx", None)
            _complain(message + (f" (see {context.command_path} --help)" if context else ""))
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of a pipe has left; a second complaint at interpreter exit would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("PLAIT_DEBUG"):
            raise
        from plait.service.settings import SettingsError

        _complain(_reason(error))
        return 2 if isinstance(error, SettingsError) else 1
    return code if isinstance(code, int) else 0


def _reason(error: BaseException) -> str:
    """One line; of a group of errors the first, which the others mostly follow from."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(filter(None, lines)) or type(error).__name__


def _complain(message: str) -> None:
    typer.echo(f"plait: {message}", err=True)


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
