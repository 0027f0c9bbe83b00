"""`kvant explain-config`: every option's value, where it came from, and why. Reads no weights, downloads nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvant.cli.doors import Doors
from kvant.cli.models import model_argument
from kvant.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, chosen, config_file, generated, layers
from kvant.cli.run import CHAT_SAMPLING
from kvant.cli.screen import columns
from kvant.config.engine import DEFAULT_MODEL, EngineConfig
from kvant.config.explain import Explained, Layer, explain, merged, others
from kvant.config.sampling import SamplingParams


@click.command()
@model_argument(f"As for kvant run [default: {DEFAULT_MODEL}]", required=False)
@config_file
@generated(engine=ENGINE_OPTIONS, sampling=SAMPLING_OPTIONS)
@click.pass_obj
def explain_config(
    doors: Doors,
    *,
    model: str | None,
    config: Path | None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Show the value of every option, where it came from, and why.

    Takes the options of `kvant run`. The sampling is that of a chat; an answer for -p or a pipe is greedy unless a sampling
    option is given. The model must be here: nothing is downloaded.
    """
    from kvant.checkpoint.store import resolve_model
    from kvant.engine.create import plan

    given = layers(config, model, engine, sampling)
    values = merged(given)
    options = EngineConfig(model=values.get("model", DEFAULT_MODEL), **chosen(values, ENGINE_OPTIONS))
    SamplingParams(**{"max_tokens": None, **chosen(values, SAMPLING_OPTIONS)})
    path = resolve_model(options.model, doors.environment, allow_download=False)
    opened, resolved = plan(replace(options, model=str(path)), doors.detect())
    recommended = Layer("model", opened.default_sampling) if opened.default_sampling else Layer("chat", CHAT_SAMPLING)
    occasion = Layer("chat", {"max_tokens": None})
    name = _model(options.model, given, str(path))
    sections = {
        "Engine": [name, *explain(ENGINE_OPTIONS, given, resolved.config, resolved.reasons)],
        "Sampling": explain(SAMPLING_OPTIONS, [occasion, recommended, *given]),
    }
    for title, rows in sections.items():
        doors.screen.rule(title)
        for line in columns([_cells(row) for row in rows]):
            doors.screen.line("  " + line)
    for reason in others(ENGINE_OPTIONS, resolved.reasons):
        doors.screen.line(reason)
    for notice in (*resolved.notices, *opened.notices):
        doors.screen.notice(notice)


def _model(name: str, given: list[Layer], path: str) -> Explained:
    origins = [layer.origin for layer in given if "model" in layer.values]
    return Explained("model", name, origins[-1] if origins else "default", path if path != name else "")


def _cells(row: Explained) -> list[str]:
    return [row.name, _shown(row.value), row.origin, row.reason]


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(repr, value)) if isinstance(value, (tuple, list)) else str(value)
