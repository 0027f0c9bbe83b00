"""show(): pieces at once, a line break at the end, the request cancelled when the reader goes."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from kvant.cli.answer import Answer, Interruption, numbers, show
from kvant.config.sampling import SamplingParams
from kvant.errors import GenerationError
from tests.cli.fake import FakeLLM

PARAMS = SamplingParams(max_tokens=None)


def ask(llm: FakeLLM, params: SamplingParams = PARAMS):
    pieces: list[str] = []
    return show(llm.stream("hi", params), pieces.append), pieces


def test_pieces_and_a_line_break():
    answer, pieces = ask(FakeLLM(replies=["one two three"]))
    assert pieces == ["one ", "two ", "three", "\n"]
    assert (answer.text, answer.finish_reason, answer.stopped) == ("one two three", "stop", False)


def test_no_second_line_break():
    assert ask(FakeLLM(replies=["one\n"]))[1] == ["one\n"]


def test_a_failed_request_is_an_error():
    with pytest.raises(GenerationError, match="logits"):
        ask(FakeLLM(replies=["a b"], error="the logits are not finite"))


def test_a_failing_writer_cancels_the_request():
    llm = FakeLLM(replies=["one two three"])

    def write(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        show(llm.stream("hi", PARAMS), write)
    assert llm.num_closed_early == 1


def test_interrupt_stops_between_two_pieces():
    llm = FakeLLM(replies=["one two three four"], delay=0.05)
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    answer = show(llm.stream("hi", PARAMS), write)
    assert answer.stopped and answer.text == "one two "
    assert pieces[-1] == "\n"
    assert llm.num_closed_early == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_does_not_wait():
    def twice() -> None:
        for _ in range(2):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    threading.Thread(target=twice).start()
    with pytest.raises(KeyboardInterrupt):
        ask(FakeLLM(replies=["one two"], delay=2.0))
    assert time.monotonic() - started < 1.5


def test_interruption_restores_the_handler_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError), Interruption():
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "finish_reason, tokens, changes, expected",
    [
        ("stop", 42, {}, "42 tokens · 31.0 tok/s · first token 0.21 s"),
        ("length", 42, {}, "42 tokens · 31.0 tok/s · first token 0.21 s · cut: the limit of tokens was reached"),
        ("stop", 1, {"decode_tokens_per_second": None}, "1 token · first token 0.21 s"),
        (
            "stop",
            42,
            {"num_cached_tokens": 5},
            "42 tokens · 31.0 tok/s · first token 0.21 s · 5 of 9 prompt tokens were cached",
        ),
    ],
)
def test_numbers(finish_reason, tokens, changes, expected):
    metrics = {
        "num_prompt_tokens": 9,
        "num_cached_tokens": 0,
        "time_to_first_token": 0.21,
        "decode_tokens_per_second": 31.0,
    }
    assert numbers(Answer("text", finish_reason, SimpleNamespace(**{**metrics, **changes}), tokens)) == expected


def test_numbers_of_a_stopped_answer():
    assert numbers(Answer("text", None, None, 3)) == "3 tokens · stopped"
