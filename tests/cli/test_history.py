"""fit(): the oldest turns go, the system prompt and the question stay."""

import pytest

from kvant.cli.history import ROOM_FOR_ANSWER, conversation, fit
from kvant.errors import ContextLengthError


def count(messages):
    return sum(1 + len(message["content"].split()) for message in messages)


def turns(number: int, words: int) -> list[dict[str, str]]:
    """`number` questions, all but the last one answered; each message takes `words` + 1 tokens."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"m{i} " + "x " * (words - 1)} for i in range(2 * number - 1)]


@pytest.mark.parametrize(
    "number, words, context, answer, dropped",
    [
        (1, 9, 100, 10, 0),
        (5, 9, 100, 10, 0),  # 90 tokens and room for 10: fits exactly
        (5, 9, 99, 10, 1),
        (6, 9, 100, 10, 1),
        (6, 9, 100, 11, 2),
        (50, 9, 100, 10, 45),
        (6, 9, 100, 90, 3),  # at most half of the context is kept free
        (6, 9, 100, None, 3),
        (60, 9, 2000, None, 0),
        (80, 9, 2000, None, 6),  # 1590 and 512 are 102 too many
    ],
)
def test_fit(number, words, context, answer, dropped):
    before = turns(number, words)
    fitted = fit("", before, count, context, answer)
    assert fitted.num_dropped == dropped
    assert fitted.turns == before[2 * dropped :]
    assert fitted.turns[0]["role"] == "user"
    room = min(answer or ROOM_FOR_ANSWER, context // 2)
    assert fitted.num_tokens + room <= context
    assert dropped == 0 or count(before[2 * (dropped - 1) :]) + room > context


def test_the_system_prompt_is_never_dropped():
    fitted = fit("be kind " * 10, turns(20, 9), count, 100, 10)
    assert fitted.num_tokens == count(conversation("be kind " * 10, fitted.turns)) <= 90
    assert fitted.num_dropped > fit("", turns(20, 9), count, 100, 10).num_dropped


def test_a_long_question_may_use_the_room_of_the_answer():
    assert fit("", turns(3, 80), count, 100, 50).num_tokens == 81


@pytest.mark.parametrize("words", [99, 100, 1000])
def test_R11_a_question_longer_than_the_context_is_refused(words):
    with pytest.raises(ContextLengthError, match=f"{words + 1} tokens and the context holds 100"):
        fit("", turns(3, words), count, 100, 10)
