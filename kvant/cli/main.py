"""The program `kvant`: finds the command, and turns what goes wrong into one line and an exit code.

A command's module is imported when the command is called: the libraries of the others would cost a first answer its time.

0    done              2    a mistake of the user's: `error: ...` on stderr, one line, no traceback
130  Ctrl-C            1    the reader of a pipe went away; or a fault of Kvant's own, with its traceback
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import click

import kvant
from kvant.cli import streams
from kvant.cli.doors import Doors
from kvant.cli.screen import Screen
from kvant.errors import KvantError

EXIT_READER_GONE = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

# Where each command is, in the order of the help. They find what they reach out to in the context's `obj`, a `Doors`.
COMMANDS = {
    "run": ("kvant.cli.run", "run"),
    "pull": ("kvant.cli.models", "pull"),
    "list": ("kvant.cli.models", "list_"),
    "rm": ("kvant.cli.models", "remove"),
    "bench": ("kvant.cli.bench", "bench"),
    "plan": ("kvant.cli.plan", "plan"),
    "explain-config": ("kvant.cli.explain", "explain_config"),
    "doctor": ("kvant.cli.doctor", "doctor"),
}


class Commands(click.Group):
    """A group whose members are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            import difflib

            close = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            ctx.fail(f"No such command {cmd_name!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), name)
        return command


@click.command("kvant", cls=Commands, invoke_without_command=True)
@click.option("--version", is_flag=True, help="Print the version")
@click.pass_context
def program(context: click.Context, version: bool) -> None:
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
        return program.main(arguments, prog_name="kvant", standalone_mode=False, obj=doors) or 0
    except KvantError as error:
        from kvant.cli.options import spelled

        _tell(screen, spelled(str(error), error.param))
    except click.UsageError as error:
        _tell(screen, error.format_message())
    except MemoryError:
        _tell(screen, "out of memory; close other programs, or take a smaller model or --max-model-len")
    except BrokenPipeError:
        return EXIT_READER_GONE
    except OSError as error:  # a full disk, a file without permission: the system's words name it
        _tell(screen, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    return EXIT_MISTAKE


def _tell(screen: Screen, message: str) -> None:
    with suppress(OSError):  # nothing can be written there: then the exit code has to do
        screen.error(message)
