"""Command-line options made from the fields that configuration dataclasses declare (`config/option.py`).

    max_num_seqs: int = option(64, "the most sequences ...")  ──▶  --max-num-seqs  the most sequences ... [default: 64]

A command asks for them with `@generated(engine=fields, sampling=fields)` and receives one dictionary per group, which
holds only what the user really gave. Defaults and checks stay in the dataclass.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kvant.config.engine import EngineConfig
from kvant.config.explain import Layer
from kvant.config.option import options_of
from kvant.config.sampling import SamplingParams
from kvant.errors import ConfigError, KvantError, RequestError

# What makes no sense for one answer on a terminal (n, log-probabilities, ids instead of text) stays out, and so does the
# engine's `seed`: --seed is the request's own.
_RUN_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "skip_special_tokens",
)
# Their defaults depend on what is asked (a chat, one answer, a model without a template): the command's help says how.
_DECIDED_BY_COMMAND = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
ENGINE_OPTIONS: tuple[Field[Any], ...] = tuple(f for f in options_of(EngineConfig) if f.name not in ("model", "seed"))
SAMPLING_OPTIONS: tuple[Field[Any], ...] = tuple(f for f in options_of(SamplingParams) if f.name in _RUN_SAMPLING)
# What a file may say: all of that, and which model.
FILE_OPTIONS = {f.name: f for f in (*ENGINE_OPTIONS, *SAMPLING_OPTIONS, *options_of(EngineConfig)[:1])}
_NAMES = {f.name for cls in (EngineConfig, SamplingParams) for f in fields(cls)}


config_file = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Options from a YAML file, by the names given here; the command line goes before",
)


def layers(config: Path | None, model: str | None, engine: dict[str, Any], sampling: dict[str, Any]) -> list[Layer]:
    """What the user gave, each with the place it came from; the last one counts. Raises `ConfigError` for the file."""
    line = Layer("command line", {**({"model": model} if model is not None else {}), **engine, **sampling})
    if config is None:
        return [line]
    from kvant.config.file import read_options  # and with it YAML

    given = read_options(config, FILE_OPTIONS)
    try:
        EngineConfig(**chosen(given, ENGINE_OPTIONS))
        SamplingParams(**{"max_tokens": None, **chosen(given, SAMPLING_OPTIONS)})
    except KvantError as error:
        raise ConfigError(f"{config}: {error}") from None
    return [Layer(str(config), given), line]


def chosen(given: Mapping[str, Any], options: Sequence[Field[Any]]) -> dict[str, Any]:
    """The part of `given` that `options` name."""
    return {f.name: given[f.name] for f in options if f.name in given}


def generated(**groups: Sequence[Field[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option per field, after its own; its parameter `group` gets {name: given value}."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = {group: [f.name for f in members] for group, members in groups.items()}

        @wraps(command)
        def with_options(*own: Any, **values: Any) -> None:
            given = {
                group: {name: value for name in members if (value := values.pop(name)) is not None and value != ()}
                for group, members in names.items()
            }
            command(*own, **values, **given)

        for field in reversed([f for members in groups.values() for f in members]):
            with_options = _option(field)(with_options)
        return with_options

    return decorate


def parse(field: Field[Any], words: list[str]) -> Any:
    """The value that a chat's `/set NAME WORDS` gives: by the field's type; "none" for no value. Ranges are checked later."""
    kind, many = _kind(field)
    if [word.lower() for word in words] == ["none"]:
        return field.default if many else None
    if not many and len(words) != 1:
        raise RequestError(f"{field.name} takes one value, not {len(words)}", param=field.name)
    try:
        values = [_word(kind, word) for word in words]
    except ValueError:
        raise RequestError(f"{field.name} must be {_NOUNS[kind]}, not {' '.join(words)!r}", param=field.name) from None
    return tuple(values) if many else values[0]


def spelled(message: str, param: str | None) -> str:
    """An error's message with option names as they are typed: `max_model_len` -> `--max-model-len`."""
    words = message.split(" ")
    if param in _NAMES and words[0] == param:
        words[0] = _flag(param)
    # Longer names occur inside a sentence; a single word such as "model" or "stop" may be just a word there.
    return " ".join(_flag(word) if "_" in word and word in _NAMES else word for word in words)


_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _word(kind: type, word: str) -> Any:
    if kind is not bool:
        return kind(word)
    if word.lower() not in ("true", "false", "on", "off"):
        raise ValueError(word)
    return word.lower() in ("true", "on")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind(field: Field[Any]) -> tuple[type, bool]:
    """(int, float, bool or str; whether there may be several)."""
    plain = [t for t in (typing.get_args(field.type) or (field.type,)) if t not in (type(None), ...)]
    if typing.get_origin(field.type) is tuple:
        return plain[0], True
    return plain[0], False


def _option(field: Field[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    kind, many = _kind(field)
    choices, unit = field.metadata["choices"], field.metadata["unit"]
    flag = _flag(field.name)
    return click.option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        type=kind,
        default=None,
        multiple=many,
        help=_help(field, many),
        metavar="|".join(choices) if choices else unit.upper() or _METAVARS[kind],
    )


_METAVARS = {int: "N", float: "X", bool: None, str: "TEXT"}


def _help(field: Field[Any], many: bool) -> str:
    text: str = field.metadata["help"].replace("; None: ", "; by default ")
    text = text[0].upper() + text[1:] + ("; may be given several times" if many else "")
    if field.default in (MISSING, None, ()) or field.name in _DECIDED_BY_COMMAND:
        return text
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"{text} [default: {value}]"
