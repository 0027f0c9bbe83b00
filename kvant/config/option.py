"""One option, declared once: its type, its default and its help stand in one place, and the command line is made from it."""

from dataclasses import MISSING, Field, field, fields
from typing import Any


def option(default: Any = MISSING, help: str = "", *, choices: tuple[str, ...] | None = None, unit: str = "") -> Any:
    """Declares a field of a configuration dataclass.

    `help` is what the command line prints; `choices` the closed set of values; `unit` what a number counts.
    """
    metadata = {"help": help, "choices": choices, "unit": unit}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(cls: type) -> list[Field[Any]]:
    """The fields of `cls` that were declared with `option`, in order."""
    return [f for f in fields(cls) if "help" in f.metadata]
