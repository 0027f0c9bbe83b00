"""The decoding seam: what a strategy answers, the strategies there are, and the one call a step makes.

    want(sequence)  ─▶ Scheduled.want ─▶ [device] ─▶ Selection ─▶ decode ─▶ Decision ─▶ Scheduler.commit

Deciding has two halves. What a strategy needs from the device is a `Want` from a closed set; what it does with the answer
is pure Python over plain data. A strategy changes only `Sequence.state`, which is its own.
"""

from collections.abc import Iterable
from typing import Protocol

from kvant.decoding.ancestral import Ancestral
from kvant.decoding.stopping import DecodeContext
from kvant.errors import RequestError
from kvant.types import Advance, Decision, Request, Schedule, Scheduled, Selected, Selection, Sequence, Status, Want


class Strategy(Protocol):
    """A way to turn distributions into tokens."""

    def width(self, request: Request) -> int:
        """How many sequences of `request` live at the same time, at most: the seats that it reserves."""

    def want(self, sequence: Sequence) -> Want:
        """What the device shall do with the row behind the sequence's last known token."""

    def advance(self, rows: Iterable[tuple[Scheduled, Selected]], context: DecodeContext) -> list[Advance]:
        """What becomes of the rows of its sequences, in order; a fork comes before the sequence it forks from."""


STRATEGIES: dict[str, Strategy] = {"ancestral": Ancestral()}


def strategy_of(request: Request) -> Strategy:
    """Raises `RequestError` for a name that is not built here."""
    strategy = STRATEGIES.get(request.strategy)
    if strategy is None:
        raise RequestError(
            f"decoding strategy {request.strategy!r} is unknown; known are {', '.join(sorted(STRATEGIES))}", param="strategy"
        )
    return strategy


def width(request: Request) -> int:
    """Seats that `request` takes."""
    return strategy_of(request).width(request)


def want(sequence: Sequence) -> Want:
    """What `sequence` needs from the device next."""
    return STRATEGIES[sequence.request.strategy].want(sequence)


def decode(schedule: Schedule, selection: Selection, context: DecodeContext) -> Decision:
    """Lets every strategy decide about its rows. Rows of sequences that ended while the step ran are dropped."""
    by_strategy: dict[str, list[tuple[Scheduled, Selected]]] = {}
    for row, selected in zip(schedule.rows, selection.rows, strict=True):
        if row.sequence.status is not Status.FINISHED:
            by_strategy.setdefault(row.sequence.request.strategy, []).append((row, selected))
    advances: list[Advance] = []
    for name, rows in by_strategy.items():
        advances += STRATEGIES[name].advance(rows, context)
    return Decision(advances=tuple(advances))
