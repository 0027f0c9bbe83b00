"""Results: rows with the floor beside the value, as a table and as JSON.

    scenario     value  unit    floor  fraction  spread
    decode         2.61  ms       2.17      0.83    0.04

fraction   how near the floor is: 1 cannot be passed. Floor over value for times, value over floor for rates.
spread     (longest - shortest) / shortest time of the repetitions; a difference smaller than that means nothing.
"""

import json
import platform
import subprocess
from collections.abc import Iterable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kvant.config.hardware import detect

VERSIONS = ("kvant", "torch", "triton", "numpy")


class Row(NamedTuple):
    """One line of a result."""

    scenario: str
    value: float
    unit: str
    floor: float | None
    fraction: float | None
    spread: float | None = None
    note: str = ""


def timed(scenario: str, seconds: Iterable[float], floor: float | None, unit: str = "s", note: str = "") -> Row:
    """The shortest of several times; `floor` in seconds too."""
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    times = sorted(seconds)
    least = times[0]
    fraction = None if floor is None else floor / least
    floor = None if floor is None else floor * scale
    return Row(scenario, least * scale, unit, floor, fraction, _spread(times), note)


def rate(scenario: str, count: float, seconds: Iterable[float], floor: float | None, unit: str, note: str = "") -> Row:
    """`count` per second at the shortest of several times; `floor` is the least time, in seconds."""
    times = sorted(seconds)
    best = count / times[0]
    most = None if floor is None else count / floor
    return Row(scenario, best, unit, most, None if most is None else best / most, _spread(times), note)


def table(rows: Iterable[Row]) -> list[list[str]]:
    """The rows as cells, a head above them."""
    cells = [["scenario", "value", "unit", "floor", "fraction", "spread", ""]]
    for row in rows:
        numbers = [_number(row.value), row.unit, _number(row.floor), _percent(row.fraction), _percent(row.spread)]
        cells.append([row.scenario, *numbers, row.note])
    return cells


def origin() -> dict[str, Any]:
    """Where and when a result was measured."""
    hardware = detect()
    card = hardware.gpus[0].name if hardware.gpus else hardware.cpu_name
    return {"card": card, "versions": versions(), "commit": commit(), "date": date.today().isoformat()}


def versions() -> dict[str, str]:
    """Of everything that takes part and is installed."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the working copy, "-dirty" where files differ from it; empty for an installed package."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def save(path: Path, rows: Iterable[Row], **about: Any) -> None:
    """Writes {"rows": [...]}, every row with its origin, and `about` beside them."""
    where = origin()
    path.write_text(json.dumps({**about, "rows": [row._asdict() | where for row in rows]}, indent=1) + "\n")


def _spread(times: list[float]) -> float | None:
    return (times[-1] - times[0]) / times[0] if len(times) > 1 else None


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
