"""What a step may spend: the limits of the engine, and seats, the rows of device state that running sequences sit on."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`max_num_seqs` seats; `max_num_batched_tokens` tokens a step; `max_model_len` tokens in one context."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Seats:
    """Small numbers below `num_seats`. The lowest free one is taken first, so that device state stays dense.

    A request may reserve seats for choices that do not exist yet. A seat can be given back and taken again between two
    steps: whoever mirrors seats clears `take_freed()` first and fills the new ones after.
    """

    def __init__(self, num_seats: int):
        self.num_seats = num_seats
        self.num_reserved = 0
        self._free = list(range(num_seats))  # a heap
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        """Seats that are neither taken nor reserved."""
        return len(self._free) - self.num_reserved

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give_back(self, seat: int) -> None:
        heapq.heappush(self._free, seat)
        self._freed.append(seat)

    def take_freed(self) -> tuple[int, ...]:
        """The seats given back since the last call."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def check(self, taken: Iterable[int | None]) -> None:
        """Raises AssertionError unless `taken`, and nobody else, sit on all seats that are not free."""
        seats = list(taken)
        assert sorted([*(s for s in seats if s is not None), *self._free]) == list(range(self.num_seats)), "seats disagree"
        assert None not in seats, "a running sequence has no seat"
        assert 0 <= self.num_reserved <= len(self._free), "more seats are reserved than free"
