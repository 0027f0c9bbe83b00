"""`kvant pull`, `kvant list` and `kvant rm`: the local model store. No torch."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kvant.checkpoint.download import Progress as Report
from kvant.checkpoint.kept import forget, total_bytes
from kvant.checkpoint.store import list_models, pull_model, remove_model, resolve_model
from kvant.cli.doors import Doors
from kvant.cli.screen import Screen, columns
from kvant.config.kv_memory import show_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def model_argument(
    help: str, *, required: bool = True, here: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The argument MODEL, which the shell completes: with `here`, to models of the store only."""

    def completed(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        models = [model for model in list_models() if model.path is not None or not here]
        return [model.alias for model in models if model.alias.startswith(incomplete)]

    return click.argument("model", help=help, required=required, shell_complete=completed)


@click.command()
@model_argument("Alias (kvant list shows them), or a Hugging Face model: org/name, org/name@REVISION, org/name:FILE.gguf")
@click.pass_obj
def pull(doors: Doors, model: str) -> None:
    """Fetch a model into the store. What was interrupted goes on where it stopped.

    A Hugging Face model stays as it was fetched until it is pulled again. Gated ones need HF_TOKEN, or `hf auth login`.
    """
    with progress_bar(doors.screen) as report:
        path = pull_model(model, doors.environment, progress=report, notify=doors.screen.notice)
    doors.screen.line(f"{model} is at {path}")


@click.command()
@model_argument("Alias or Hugging Face model; kvant list shows them", here=True)
@click.pass_obj
def remove(doors: Doors, model: str) -> None:
    """Delete a model from the store."""
    freed = remove_model(model, doors.environment) + forget(doors.environment.packed)
    doors.screen.line(f"{model} is removed; {show_bytes(freed)} are free again")


@click.command()
@click.pass_obj
def list_(doors: Doors) -> None:
    """List the models that are here, and those that can be fetched."""
    for line in columns(model_rows(doors)):
        doors.screen.line(line)
    if packed := total_bytes(doors.environment.packed):
        doors.screen.line(f"packed for this CPU  {show_bytes(packed)}  {doors.environment.packed}")


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
    bar: Progress | None = None  # made when something is reported: most of the time the model is here
    tasks: dict[str, TaskID] = {}

    def report(done: int, total: int, label: str) -> None:
        nonlocal bar
        bar = bar or _bar(screen)
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
        if bar is not None and bar.console.is_terminal:
            bar.stop()


def _bar(screen: Screen) -> "Progress":
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=screen.console(sys.stderr), transient=True)
