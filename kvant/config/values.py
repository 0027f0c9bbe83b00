"""Values as people and libraries hand them over, checked and made plain.

numpy's and torch's scalars count as the numbers they are; a bool is no number, and nothing else is turned into one. What is
refused is named, with what would be right.
"""

import math
import operator
from numbers import Real
from typing import Any

from kvant.errors import KvantError

INT64 = (-(2**63), 2**63 - 1)
SHOWN = 60  # characters of a wrong value in a message


def whole(name: str, value: object, low: int, high: int, error: type[KvantError]) -> int:
    """`value` as an int from `low` to `high`; raises `error`."""
    number: Any = value
    try:
        number = None if isinstance(value, bool) else operator.index(number)
    except TypeError:
        number = None
    if number is None:
        raise error(f"{name} must be a whole number, not {shown(value)}", param=name)
    if not low <= number <= high:
        raise error(f"{name} must be between {low} and {high}, not {shown(number)}", param=name)
    return int(number)


def real(name: str, value: object, low: float, high: float, error: type[KvantError]) -> float:
    """`value` as a finite number from `low` to `high`; raises `error`."""
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, Real) or not -math.inf < number < math.inf:
        raise error(f"{name} must be a finite number, not {shown(value)}", param=name)
    if not low <= number <= high:
        raise error(f"{name} must be between {low:g} and {high:g}, not {shown(value)}", param=name)
    plain: float = number if isinstance(number, (int, float)) else float(number)
    return plain


def truth(name: str, value: object, error: type[KvantError]) -> bool:
    """`value` if it is true or false; raises `error`."""
    if not isinstance(value, bool):
        raise error(f"{name} must be true or false, not {shown(value)}", param=name)
    return value


def shown(value: object) -> str:
    """`value` for a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a stranger's __repr__, or a whole number of more digits than Python prints
        text = f"this {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."
