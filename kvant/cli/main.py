"""The program `kvant`: builds the commands, and turns what goes wrong into one line and an exit code.

0    done              2    a mistake of the user's: `error: ...` on stderr, one line, no traceback
130  Ctrl-C            1    the reader of a pipe went away; or a fault of Kvant's own, with its traceback
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

import kvant
from kvant.cli import doctor, explain, models, options, run, streams
from kvant.cli.doors import Doors
from kvant.cli.screen import Screen
from kvant.errors import KvantError

EXIT_READER_GONE = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

# Recent versions of typer carry their own copy of click under a private name; this is UsageError in any of them.
UsageError: Any = typer.BadParameter.__base__


def build_app() -> typer.Typer:
    """The commands. They find what they reach out to in the context's `obj`, a `Doors`."""
    # Plain help: rich's panels cut the long option names short on 80 columns.
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(start)
    app.command("run")(run.run)
    app.command("pull")(models.pull)
    app.command("list")(models.list_)
    app.command("rm")(models.remove)
    app.command("explain-config")(explain.explain_config)
    app.command("doctor")(doctor.doctor)
    return app


def start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version")] = False
) -> None:
    """Kvant runs language models, on a laptop's CPU and on an H200 alike."""
    if version:
        print(f"kvant {kvant.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None, doors: Doors | None = None) -> None:
    """Runs one command and exits. `doors` are replaced in tests."""
    streams.prepare()
    code = run_command(list(arguments if arguments is not None else sys.argv[1:]), doors)
    problem = streams.finish()
    if problem is not None and code == 0:
        code = EXIT_READER_GONE if isinstance(problem, BrokenPipeError) else EXIT_MISTAKE
    sys.exit(code)


def run_command(arguments: list[str], doors: Doors | None = None) -> int:
    """The exit code of one command."""
    screen = doors.screen if doors else Screen()
    try:
        doors = doors or Doors.of_this_process()
        screen = doors.screen
        command = typer.main.get_command(build_app())
        return command.main(arguments, prog_name="kvant", standalone_mode=False, obj=doors) or 0
    except KvantError as error:
        _tell(screen, options.spelled(str(error), error.param))
    except UsageError as error:
        _tell(screen, error.format_message())
    except MemoryError:
        _tell(screen, "out of memory; close other programs, or take a smaller model or --max-model-len")
    except BrokenPipeError:
        return EXIT_READER_GONE
    except OSError as error:  # a full disk, a file without permission: the system's words name it
        _tell(screen, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return EXIT_MISTAKE


def _tell(screen: Screen, message: str) -> None:
    with suppress(OSError):  # nothing can be written there: then the exit code has to do
        screen.error(message)
