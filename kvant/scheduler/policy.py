"""Who comes first: the order of waiting, and whom memory pressure sends back to it. First come, first served.

    running   [ admitted first ... admitted last ]  ──preempt──▶  front [ preempted ... | new arrivals ] back
                                         victim ▲                            ▲ admitted next

The victim is always the one admitted last, so preempted sequences come back in the order in which they were admitted, and
nobody who came later overtakes them. The head of the queue is never overtaken: it waits for its seats and blocks, and
everybody behind waits with it.
"""

from collections import OrderedDict
from collections.abc import Iterator

from kvant.types import Sequence


class WaitingQueue:
    """Sequences that are not on the device, in the order in which they will be. Every operation is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[Sequence, None] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        """A new arrival: behind everybody."""
        self._order[sequence] = None

    def push_front(self, sequence: Sequence) -> None:
        """A preempted sequence: before everybody."""
        self._order[sequence] = None
        self._order.move_to_end(sequence, last=False)

    def peek(self) -> Sequence:
        return next(iter(self._order))

    def pop(self) -> Sequence:
        return self._order.popitem(last=False)[0]

    def remove(self, sequence: Sequence) -> None:
        del self._order[sequence]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)


def victim(running: list[Sequence], first: int) -> Sequence | None:
    """Whom to preempt among running[first:], those not yet in this step's schedule: the one admitted last.

    A sequence with pending tokens is spared: those exist on the device only.
    """
    for index in range(len(running) - 1, first - 1, -1):
        if running[index].num_pending == 0:
            return running[index]
    return None
