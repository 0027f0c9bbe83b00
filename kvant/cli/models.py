"""`kvant pull`, `kvant list` and `kvant rm`: the local model store. No torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvant.checkpoint.download import Progress as Report
from kvant.checkpoint.store import list_models, pull_model, remove_model, resolve_model
from kvant.cli.doors import Doors
from kvant.cli.screen import Screen, columns
from kvant.config.kv_memory import show_bytes


def completed(incomplete: str) -> list[str]:
    """Names of models that begin so, for the shell."""
    return [model.alias for model in list_models() if model.alias.startswith(incomplete)]


def stored(incomplete: str) -> list[str]:
    """The same, of those that are here."""
    return [model.alias for model in list_models() if model.path is not None and model.alias.startswith(incomplete)]


def pull(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Alias (kvant list shows them), or a Hugging Face model: org/name, org/name@REVISION, org/name:FILE.gguf",
            autocompletion=completed,
        ),
    ],
) -> None:
    """Fetch a model into the store. What was interrupted goes on where it stopped.

    A Hugging Face model stays as it was fetched until it is pulled again. Gated ones need HF_TOKEN, or `hf auth login`.
    """
    doors: Doors = context.obj
    with progress_bar(doors.screen) as report:
        path = pull_model(model, doors.environment, progress=report, notify=doors.screen.notice)
    doors.screen.line(f"{model} is at {path}")


def remove(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Alias or Hugging Face model; kvant list shows them", autocompletion=stored)],
) -> None:
    """Delete a model from the store."""
    doors: Doors = context.obj
    freed = remove_model(model, doors.environment)
    doors.screen.line(f"{model} is removed; {show_bytes(freed)} are free again")


def list_(context: typer.Context) -> None:
    """List the models that are here, and those that can be fetched."""
    doors: Doors = context.obj
    for line in columns(model_rows(doors)):
        doors.screen.line(line)


def model_rows(doors: Doors) -> list[list[str]]:
    """Alias, size, where it is or how to get it, description."""
    return [
        [
            model.alias,
            show_bytes(model.num_bytes if model.path else model.download_bytes),
            str(model.path) if model.path else f"not here; kvant pull {model.alias}",
            model.description,
        ]
        for model in list_models(doors.environment)
    ]


def fetched(doors: Doors, model: str) -> None:
    """Makes sure that what the user named as `model` is here. Fetches an alias on its first use."""
    with progress_bar(doors.screen) as report:
        resolve_model(model, doors.environment, progress=report, notify=doors.screen.notice)


@contextmanager
def progress_bar(screen: Screen) -> Iterator[Report]:
    """A bar on stderr for as long as something is reported; without a terminal one line per stage."""
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=screen.console(sys.stderr),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(done: int, total: int, label: str) -> None:
        if label not in tasks:
            for task in tasks.values():
                bar.update(task, visible=False)
            tasks[label] = bar.add_task(label, total=total)
            if bar.console.is_terminal:
                bar.start()  # again and again does no harm
            else:
                screen.aside(label)
        bar.update(tasks[label], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks and bar.console.is_terminal:
            bar.stop()
