"""From Outputs to texts, against the plain search in the whole text; with vocabularies that spell spaces in two ways."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.config.sampling import SamplingParams
from kvant.engine.outputs import RequestText, StreamEvent, joined
from kvant.tokenizer.stops import StopMatcher
from kvant.tokenizer.tokenizer import Tokenizer
from kvant.types import FinishReason, Output, Request, TokenLogprobs

WORDS = ["▁", "H", "i", "▁H", "▁Hi", "▁is", "s", "i▁", "▁▁"]
HIDDEN = 2  # </s>


def vocabulary(add_space_prefix: bool) -> Tokenizer:
    """A SentencePiece vocabulary as Llama 2's: the first word of a text gets a space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(number) for number in range(len(WORDS))],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": add_space_prefix,
        }
    )


TOKENIZERS = [vocabulary(True), vocabulary(False)]


def show(tokenizer: Tokenizer, ids: list[int], **sampling) -> tuple[list[str], str | int | None]:
    """What the reader sees, piece by piece, and the stop string that ended it: engine and door together."""
    request = Request(request_id="x", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=99, **sampling))
    text = RequestText(request, None, tokenizer, 0.0)
    shown_bytes = tokenizer.shown_bytes if request.sampling.skip_special_tokens else tokenizer.token_bytes
    matcher = StopMatcher(request.sampling.stop, shown_bytes)
    pieces, stop = [], None
    for number, token in enumerate(ids):
        stop = matcher.push(token)
        finish = FinishReason.STOP if stop else FinishReason.LENGTH if number == len(ids) - 1 else None
        news = Output(request_id="x", token_ids=(token,), finish_reason=finish, stop_reason=stop)
        pieces.append(text.receive(news, 0.0).text)
        if finish:
            break
    assert "".join(pieces) == text.output.outputs[0].text and text.output.finished
    return pieces, stop


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["with a space", "without"])
def test_R01_a_leading_space_of_an_answer_is_part_of_it(tokenizer):
    ids = [tokenizer.token_to_id("▁Hi"), tokenizer.token_to_id("▁is")]
    assert show(tokenizer, ids)[0] == [" Hi", " is"]
    assert "".join(show(tokenizer, ids)[0]) == tokenizer.decode(ids, continues=True)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(TOKENIZERS),
    st.lists(st.sampled_from([HIDDEN, *range(259, 259 + len(WORDS)), 3 + 0xC3, 3 + 0xA9, 3 + 0xF0]), min_size=1, max_size=12),
    st.lists(st.sampled_from([" Hi", "Hi", " H", "i ", "is", " ", "é", "H i", "  "]), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_R07_the_text_ends_where_a_search_in_the_whole_text_finds_a_stop(tokenizer, ids, stops, include, skip):
    pieces, stop = show(tokenizer, ids, stop=stops, include_stop_str_in_output=include, skip_special_tokens=skip)
    whole = tokenizer.decode(ids, continues=True, skip_special_tokens=skip)
    ends = [(whole.find(each) + len(each), -len(each)) for each in stops if each in whole]
    if not ends:
        assert stop is None and "".join(pieces) == whole
        return
    end, length = min(ends)
    assert stop == whole[end + length : end]
    assert "".join(pieces) == whole[: end if include else end + length]


def test_choices_and_their_log_probabilities_are_kept_apart():
    tokenizer, hi = TOKENIZERS[0], TOKENIZERS[0].token_to_id("▁Hi")
    sampling = SamplingParams(n=2, logprobs=1, prompt_logprobs=0)
    text = RequestText(Request(request_id="x", prompt_token_ids=(1, hi), sampling=sampling), "p", tokenizer, 1.0)
    reports = [TokenLogprobs(hi, -2.0, 2, ((260, -0.5),)), TokenLogprobs(260, -0.5, 1, ((260, -0.5),))]
    prompt = (None, TokenLogprobs(hi, -1.0, 1, ()))
    first = Output(
        request_id="x", token_ids=(hi,), logprobs=(reports[0],), score=-2.0, prompt_logprobs=prompt, num_cached_tokens=1
    )
    text.receive(first, 3.0)
    text.receive(replace(first, index=1, token_ids=(260,), logprobs=(reports[1],), score=-0.5, prompt_logprobs=None), 3.5)
    one, two = text.output.outputs
    assert one.logprobs[0][hi] == (-2.0, 2, " Hi") and one.logprobs[0][260].rank == 1 and len(one.logprobs[0]) == 2
    assert len(two.logprobs[0]) == 1 and two.cumulative_logprob == -0.5
    assert text.output.prompt_logprobs == [None, {hi: (-1.0, 1, " Hi")}]
    metrics = text.output.metrics
    assert (metrics.num_output_tokens, metrics.num_cached_tokens, metrics.time_to_first_token) == (2, 1, 2.0)
    assert metrics.decode_tokens_per_second == 2.0


def test_news_that_piled_up_is_one_event_per_choice():
    events = [
        StreamEvent(index=0, text="a", token_ids=(1,)),
        StreamEvent(index=1, text="x", token_ids=(7,), finish_reason="stop"),
        StreamEvent(index=0, text="b", token_ids=(2, 3), finish_reason="length"),
    ]
    one, two = joined(events)
    assert (one.text, one.token_ids, one.finish_reason) == ("ab", (1, 2, 3), "length") and two == events[1]
