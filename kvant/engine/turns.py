"""Turns: threads that wait for answers of one engine take its steps in turn, each for all of them.

    thread A   step ......... step ......... has its answer
    thread B   waits ........ waits ........ step ....       whoever waits looks at its own answer after every step

An engine's step must not run twice at once, and must not be torn apart by Ctrl-C, which Python delivers between any two
lines: it would leave blocks, seats or outputs half moved.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """Hands the steps of one engine to the threads that need them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._computing = False

    def step(self, compute: Callable[[], None], satisfied: Callable[[], bool]) -> None:
        """Calls `compute`, unless the caller is `satisfied` by now; waits instead while another thread computes."""
        with unbroken():
            with self._changed:
                if self._computing:
                    self._changed.wait()
                    return
                if satisfied():
                    return
                self._computing = True
            try:
                compute()
            finally:
                with self._changed:
                    self._computing = False
                    self._changed.notify_all()


@contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C inside the block takes effect at its end. Only the main thread gets signals; others just go on."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *signalled: caught.append(signalled))  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[-1])
