from kvant.decoding.ancestral import NOT_FINITE
from kvant.decoding.stopping import DecodeContext
from kvant.decoding.strategy import decode, want
from kvant.types import (
    Advance,
    Draw,
    FinishReason,
    Schedule,
    Scheduled,
    Selected,
    Selection,
    Sequence,
    Status,
    TokenLogprobs,
)
from tests.scheduler.harness import LetterMatcher, request

CONTEXT = DecodeContext(max_model_len=50, new_matcher=lambda sampling: LetterMatcher(sampling.stop))


def running(prompt=(1, 2), output=(), index=0, **details) -> Sequence:
    asked = request("r", prompt, **details)
    return Sequence(request=asked, index=index, tokens=[*prompt, *output], status=Status.RUNNING)


def advances(*pairs: tuple[Sequence, Selected], chunk: bool = False) -> tuple[Advance, ...]:
    rows = tuple(Scheduled(sequence=s, start=0, num_tokens=1, want=None if chunk else want(s)) for s, _ in pairs)
    return decode(Schedule(rows=rows), Selection(rows=tuple(selected for _, selected in pairs)), CONTEXT).advances


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, ())


def test_an_ordinary_row_wants_one_draw_of_its_own_choice():
    assert want(running()) == Draw(1, 0)
    assert want(running(output=(5,), index=2, sampling={"n": 3})) == Draw(1, 2)


def test_the_row_behind_the_prompt_draws_for_all_choices():
    assert want(running(sampling={"n": 3})) == Draw(3, 0)
    assert want(running(output=(5,), sampling={"n": 3})) == Draw(1, 0)


def test_a_drawn_token_is_appended_with_its_log_probability():
    sequence = running()
    (advance,) = advances((sequence, Selected(token_ids=(7,), logprobs=(score(7),), chosen_logprobs=(-0.5,))))
    assert advance == Advance(sequence=sequence, tokens=(7,), logprobs=(score(7),), logprob_delta=-0.5)
    assert sequence.tokens == [1, 2]  # appending is the scheduler's


def test_choices_fork_before_their_parent_goes_on():
    sequence = running(sampling={"n": 3, "logprobs": 0})
    selected = Selected(
        token_ids=(7, 8, 9),
        logprobs=(score(7), score(8), score(9)),
        chosen_logprobs=(-1.0, -2.0, -3.0),
        prompt_logprobs=(score(2),),
    )
    first, second, parent = advances((sequence, selected))
    assert [a.fork_of for a in (first, second, parent)] == [sequence, sequence, None]
    assert [a.sequence.index for a in (first, second, parent)] == [1, 2, 0]
    assert [a.tokens for a in (first, second, parent)] == [(8,), (9,), (7,)]
    assert [a.logprob_delta for a in (first, second, parent)] == [-2.0, -3.0, -1.0]
    assert [a.prompt_logprobs for a in (first, second, parent)] == [(), (), (score(2),)]
    assert first.sequence.tokens == [1, 2] and first.sequence.tokens is not sequence.tokens


def test_each_choice_ends_by_itself():
    sequence = running(end=True, sampling={"n": 3, "stop": ("b",)})
    advance = {a.sequence.index: a for a in advances((sequence, Selected(token_ids=(5, 0, 1))))}
    assert [advance[i].finish for i in range(3)] == [None, FinishReason.STOP, FinishReason.STOP]
    assert [advance[i].stop_reason for i in range(3)] == [None, None, "b"]


def test_a_stop_strings_tail_belongs_to_its_choice():
    """Choice 0 says "x", choice 1 says "a": only choice 1 is one letter from "ab"."""
    sequence = running(sampling={"n": 2, "stop": ("ab",)})
    fork, parent = (a.sequence for a in advances((sequence, Selected(token_ids=(23, 0)))))
    for choice in (fork, parent):
        choice.tokens.append(0)
        choice.status = Status.RUNNING
    given = advances((fork, Selected(token_ids=(1,))), (parent, Selected(token_ids=(1,))))
    assert [(a.finish, a.stop_reason) for a in given] == [(FinishReason.STOP, "ab"), (None, None)]


def test_requests_without_stop_strings_keep_no_state():
    sequence = running()
    advances((sequence, Selected(token_ids=(7,))))
    assert sequence.state is None


def test_a_chunk_of_a_prompt_only_hands_on_its_scores():
    sequence = running()
    assert advances((sequence, Selected()), chunk=True) == ()
    given = advances((sequence, Selected(prompt_logprobs=(score(2),))), chunk=True)
    assert given == (Advance(sequence=sequence, prompt_logprobs=(score(2),)),)


def test_R19_a_row_that_is_not_finite_ends_its_own_sequence_only():
    bad, good = running(), running()
    given = advances((bad, Selected(token_ids=(7,), finite=False)), (good, Selected(token_ids=(7,))))
    assert given[0] == Advance(sequence=bad, finish=FinishReason.ERROR, error=NOT_FINITE)
    assert given[1] == Advance(sequence=good, tokens=(7,))


def test_R19_before_the_fork_all_choices_of_the_request_fail():
    sequence = running(sampling={"n": 3})
    given = advances((sequence, Selected(finite=False)))
    assert [(a.sequence.index, a.finish) for a in given] == [(i, FinishReason.ERROR) for i in (1, 2, 0)]
