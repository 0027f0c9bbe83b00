import pytest

from kvant.config.sampling import SamplingParams
from kvant.decoding.stopping import GOES_ON, Ending, ending
from kvant.tokenizer.stops import StopMatcher
from kvant.types import FinishReason, Request
from tests.scheduler.harness import LetterMatcher, letters

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def asked(prompt=(1, 2), end=(9,), **sampling) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 5, **sampling}),
        end_token_ids=frozenset(end),
    )


def endings(request: Request, tokens: list[int], max_model_len: int = 100) -> list[Ending]:
    """Each token's verdict, up to the first that ends the sequence."""
    matcher = LetterMatcher(request.sampling.stop) if request.sampling.stop else None
    given = []
    for number, token in enumerate(tokens, len(request.prompt_token_ids) + 1):
        given.append(ending(request, token, number, matcher, max_model_len))
        if given[-1].finish:
            break
    return given


@pytest.mark.parametrize("token", [7, 9])
def test_R09_any_of_the_end_tokens_stops(token):
    assert endings(asked(end=(7, 9)), [3, token, 4]) == [GOES_ON, Ending(STOP)]


def test_ignore_eos_goes_on_but_not_over_stop_token_ids():
    assert endings(asked(ignore_eos=True), [9, 3])[0] == GOES_ON
    assert endings(asked(ignore_eos=True, stop_token_ids=(9,)), [9]) == [Ending(STOP, 9)]


def test_a_stop_token_is_named():
    assert endings(asked(stop_token_ids=(3, 4)), [1, 4]) == [GOES_ON, Ending(STOP, 4)]


def test_a_stop_string_over_several_tokens_is_named():
    assert endings(asked(stop=("bcd",)), [1, 2, 3, 4]) == [GOES_ON, GOES_ON, Ending(STOP, "bcd")]


def test_R10_max_tokens_and_the_contexts_end_say_length():
    assert endings(asked(max_tokens=3), [1, 1, 1, 1]) == [GOES_ON, GOES_ON, Ending(LENGTH)]
    assert endings(asked(max_tokens=None), [1] * 9, max_model_len=6) == [GOES_ON] * 3 + [Ending(LENGTH)]


def test_the_prompt_never_stops_anything():
    assert endings(asked(prompt=(9, 3), stop_token_ids=(3,)), [1]) == [GOES_ON]


@pytest.mark.parametrize("limits", [{"max_tokens": 2}, {"max_tokens": None}])
def test_meaning_goes_before_length(limits):
    """The last token that is allowed may still be the one that ends the text."""
    for wanted, token, sampling in (
        (Ending(STOP), 9, {}),
        (Ending(STOP, 4), 4, {"stop_token_ids": (4,)}),
        (Ending(STOP, "be"), 4, {"stop": ("be",)}),
    ):
        assert endings(asked(**sampling, **limits), [1, token], max_model_len=4) == [GOES_ON, wanted]


def test_an_end_token_goes_before_a_stop_token_and_a_stop_string():
    assert endings(asked(stop_token_ids=(9,), stop=("j",)), [9]) == [Ending(STOP)]
    assert endings(asked(end=(), stop_token_ids=(9,), stop=("j",)), [9]) == [Ending(STOP, 9)]


@pytest.mark.parametrize("min_tokens", range(6))
def test_R08_nothing_stops_before_min_tokens(min_tokens):
    """A stop string completed too early is text; one that is completed in time counts, wherever it began."""
    text = [1, 2, 1, 2, 1, 2]  # "bcbcbc"
    for sampling, wanted in (
        ({"stop": ("bc",)}, "bc"),
        ({"stop_token_ids": (2,)}, 2),
        ({"end": (2,)}, None),
    ):
        given = endings(asked(min_tokens=min_tokens, max_tokens=6, **sampling), text)
        first = next(n for n in range(1, 7) if n >= min_tokens and n % 2 == 0)
        assert len(given) == first and given[-1] == Ending(STOP, wanted)


def test_min_tokens_do_not_hold_back_the_limit():
    assert endings(asked(min_tokens=2, max_tokens=2, stop=("zz",)), [1, 1]) == [GOES_ON, Ending(LENGTH)]


def test_the_tokenizers_matcher_fits_the_seam():
    request = asked(stop=("cd", "x"), min_tokens=3, max_tokens=9)
    matcher = StopMatcher(request.sampling.stop, lambda token: letters([token]).encode())
    given = [ending(request, token, 3 + i, matcher, 100) for i, token in enumerate([2, 3, 2, 3])]
    assert given == [GOES_ON] * 3 + [Ending(STOP, "cd")]
