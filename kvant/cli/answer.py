"""One answer on the screen: piece by piece, stoppable, with its numbers at the end."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from kvant.errors import GenerationError

if TYPE_CHECKING:
    from kvant.engine.outputs import RequestMetrics, StreamEvent


class Answer(NamedTuple):
    """What was shown. `finish_reason` is None where the user stopped it."""

    text: str
    finish_reason: str | None
    metrics: "RequestMetrics | None"
    num_tokens: int

    @property
    def stopped(self) -> bool:
        return self.finish_reason is None


class Interruption:
    """Ctrl-C inside this block sets a flag that is looked at between two pieces: an engine's step is never torn apart.

    The second Ctrl-C is a KeyboardInterrupt at once, for whoever does not want to wait.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interruption":
        self._before = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def show(events: "Iterator[StreamEvent]", write: Callable[[str], None]) -> Answer:
    """Writes an answer as it comes and ends it with a line break. Raises `GenerationError` where the request failed."""
    pieces: list[str] = []
    num_tokens, last = 0, None
    with Interruption() as interruption, closing(events), _whole_lines(pieces, write):  # type: ignore[type-var]
        for event in events:  # closing them cancels the request
            if event.text:
                pieces.append(event.text)
                write(event.text)
            num_tokens, last = num_tokens + len(event.token_ids), event
            if event.finish_reason or interruption.requested:
                break
    if last is not None and last.finish_reason == "error":
        raise GenerationError(last.error or "the request failed")
    return Answer("".join(pieces), last.finish_reason if last else None, last.metrics if last else None, num_tokens)


@contextmanager
def _whole_lines(pieces: list[str], write: Callable[[str], None]) -> Iterator[None]:
    """Whatever ends an answer, what comes next begins on a line of its own."""
    try:
        yield
    finally:
        if pieces and not pieces[-1].endswith("\n"):
            with suppress(OSError):  # the reader went away, the disk is full: that is told already
                write("\n")


def numbers(answer: Answer) -> str:
    """42 tokens · 31.0 tok/s · first token 0.21 s"""
    metrics = answer.metrics
    parts = [f"{answer.num_tokens} token" + ("" if answer.num_tokens == 1 else "s")]
    if metrics is not None:
        if metrics.decode_tokens_per_second:
            parts.append(f"{metrics.decode_tokens_per_second:.1f} tok/s")
        if metrics.time_to_first_token is not None:
            parts.append(f"first token {metrics.time_to_first_token:.2f} s")
        if metrics.num_cached_tokens:
            parts.append(f"{metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens were cached")
    if answer.finish_reason == "length":
        parts.append("cut: the limit of tokens was reached")
    elif answer.stopped:
        parts.append("stopped")
    return " · ".join(parts)
