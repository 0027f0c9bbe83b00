"""Committed results: rows that say by themselves where they come from, so that a part can be measured anew.

    {"rows": [{"scenario": "one_short", ..., "machine": {...}, "versions": {...}, "commit": "4ad0", "date": "2026-12-01"}, ...]}

`merge` replaces the rows that were measured and leaves every other with the commit and date it was measured at.
"""

import json
import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.peers.machine import Machine

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]


def origin(threads: int, versions: dict[str, str]) -> Row:
    """Where and when a row was measured. The commit ends in `-dirty` where files differ from it."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    machine = Machine.describe() | {"threads": threads}
    return {"machine": machine, "versions": versions, "commit": commit, "date": date.today().isoformat()}


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file yet."""
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def merge(path: Path, measured: Iterable[Row], order: Iterable[str]) -> list[Row]:
    """Writes `path` with the rows of `measured` in place of those with the same scenario; returns all.

    `order` names every scenario there is. Rows of scenarios that are no longer among them go.
    """
    rows = {row["scenario"]: row for row in (*read(path), *measured)}
    kept = [rows[scenario] for scenario in order if scenario in rows]
    path.write_text(json.dumps({"rows": kept}, indent=1) + "\n")
    return kept
