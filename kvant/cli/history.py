"""What of a conversation still fits into the context: the oldest turns go first, the system prompt never.

system │ user assistant │ user assistant │ user            a turn is a question with its answer
         ╰── dropped ──╯                   ╰ the question at hand, always kept
"""

from collections.abc import Callable
from typing import NamedTuple

from kvant.config.sampling import SamplingParams
from kvant.errors import ContextLengthError

Message = dict[str, str]

ROOM_FOR_ANSWER = 512  # tokens kept free for an answer without a limit of its own, where the context is long enough


class Fitted(NamedTuple):
    """The turns that stay, how many went, and the tokens of what stays."""

    turns: list[Message]
    num_dropped: int
    num_tokens: int


def fit(
    system: str, turns: list[Message], count_tokens: Callable[[list[Message]], int], context: int, answer: int | None
) -> Fitted:
    """Drops turns from the front of `turns` until the prompt leaves room for `answer` tokens (None: for a usual one).

    Raises `ContextLengthError` where the last question alone does not fit.
    """
    room = min(answer or ROOM_FOR_ANSWER, context // 2)
    dropped = 0
    while True:
        kept = turns[2 * dropped :]
        tokens = count_tokens(conversation(system, kept))
        if tokens + room <= context or len(kept) <= 1:
            break
        dropped += 1
    if tokens >= context:
        raise ContextLengthError(
            f"this message takes {tokens} tokens and the context holds {context}; shorten it, or raise max_model_len"
        )
    return Fitted(kept, dropped, tokens)


def within(sampling: SamplingParams, num_tokens: int, context: int) -> SamplingParams:
    """`sampling` with max_tokens cut to what a prompt of `num_tokens` leaves of the context."""
    room = max(1, context - num_tokens)
    if sampling.max_tokens is None or sampling.max_tokens <= room:
        return sampling
    return sampling.with_changes(max_tokens=room, min_tokens=min(sampling.min_tokens, room))


def conversation(system: str, turns: list[Message]) -> list[Message]:
    """The messages that go to the model."""
    return ([{"role": "system", "content": system}] if system else []) + turns
