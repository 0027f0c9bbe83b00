"""Where the value of every option came from, and why: default, file, command line, or decided for this machine and model.

layers      [("the model", {...}), ("kvant.yaml", {...}), ("command line", {...})]     the last one that names it counts
decided     what resolving made of it, with its reasons ("threads: 2, because ...")    where it was left open
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Any, NamedTuple

DEFAULT, DECIDED = "default", "decided"


class Layer(NamedTuple):
    """Options from one place."""

    origin: str
    values: Mapping[str, Any]


class Explained(NamedTuple):
    """One option."""

    name: str
    value: Any
    origin: str
    reason: str = ""


def merged(layers: Iterable[Layer]) -> dict[str, Any]:
    """What the layers say together; later ones go before."""
    return {name: value for layer in layers for name, value in layer.values.items()}


def explain(
    options: Sequence[Field[Any]], layers: Sequence[Layer], decided: Any = None, reasons: Iterable[str] = ()
) -> list[Explained]:
    """One line per option. `decided` is the resolved configuration, where there is one."""
    why = {name: text for name, _, text in (reason.partition(": ") for reason in reasons)}
    return [_explain(option, layers, decided, why) for option in options]


def others(options: Sequence[Field[Any]], reasons: Iterable[str]) -> list[str]:
    """Reasons of what was decided and is no option."""
    names = {option.name for option in options}
    return [reason for reason in reasons if reason.partition(": ")[0] not in names]


def _explain(option: Field[Any], layers: Sequence[Layer], decided: Any, why: Mapping[str, str]) -> Explained:
    name = option.name
    given = [layer for layer in layers if name in layer.values]
    value = given[-1].values[name] if given else None if option.default is MISSING else option.default
    origin = given[-1].origin if given else DEFAULT
    if decided is not None and (name in why or getattr(decided, name) != value):
        value, origin = getattr(decided, name), DECIDED
    return Explained(name, value, origin, why.get(name, "").removeprefix(f"{value}, "))
