"""Options from a YAML file: the names of the command line, flat, with dashes or underscores.

    model: smollm2-135m
    max-model-len: 2048          # every option once; what the command line says as well goes before
    temperature: 0.7
    stop: ["###", "User:"]

YAML's own surprises (a key given twice, `1e-5` as a text, `no` as a truth value) are met here; what a value may be is
checked where the option is declared.
"""

import difflib
from collections.abc import Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any, get_args

import yaml  # type: ignore[import-untyped]

from kvant.config.values import shown
from kvant.errors import ConfigError

MAX_BYTES = 1 << 20  # far more than options can fill


def read_options(path: Path, known: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """The options in `path`, by field name. Raises `ConfigError` naming the file, the line or the key, and the remedy."""
    options: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{path}: unknown option {shown(key)}; {remedy}")
        if name in options:
            raise ConfigError(f"{path}: {name} is given twice; remove one of them")
        options[name] = _value(path, known[name], value)
    return options


def _read(path: Path) -> dict[Any, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is too large for a file of options; it may have {MAX_BYTES} bytes")
    try:
        # SafeLoader makes plain data only, never an object.
        content = yaml.load(data, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold lines of the form `option: value`, not a {type(content).__name__}")
    return content


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise ValueError(f"{shown(key.value)} is given twice; remove one of them")
            seen.add(str(key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _value(path: Path, field: Field[Any], value: Any) -> Any:
    """`value` as YAML meant it. Lists stay for options that take several."""
    kinds = get_args(field.type) or (field.type,)
    if isinstance(value, dict) or (isinstance(value, list) and ... not in kinds):
        raise ConfigError(f"{path}: {field.name} takes one value, not a {type(value).__name__}")
    if float in kinds and isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 takes 1e-5 for a text, since it has no dot
        except ValueError:
            return value
    if str in kinds:
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if not isinstance(text, str) and text is not None:
                raise ConfigError(f"{path}: {field.name} must be a text, not {shown(text)}; put it in quotes")
    return value
