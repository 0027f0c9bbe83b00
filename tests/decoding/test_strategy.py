import pytest

from kvant.decoding.stopping import DecodeContext
from kvant.decoding.strategy import STRATEGIES, decode, strategy_of, width
from kvant.errors import RequestError
from kvant.types import Draw, FinishReason, Schedule, Scheduled, Selected, Selection, Sequence, Status
from tests.scheduler.harness import LetterMatcher, Loop, request

CONTEXT = DecodeContext(max_model_len=50, new_matcher=lambda sampling: LetterMatcher(sampling.stop))


def test_a_request_takes_a_seat_per_choice():
    assert width(request("r", [1], sampling={"n": 4})) == 4


def test_an_unknown_strategy_is_refused_by_name():
    with pytest.raises(RequestError, match=r"'oracle'.*ancestral"):
        strategy_of(request("r", [1], strategy="oracle"))


def test_rows_of_finished_sequences_are_dropped():
    sequence = Sequence(request=request("r", [1]), index=0, tokens=[1], status=Status.FINISHED)
    row = Scheduled(sequence=sequence, start=0, num_tokens=1, want=Draw(1, 0))
    assert decode(Schedule(rows=(row,)), Selection(rows=(Selected(token_ids=(3,)),)), CONTEXT).advances == ()


def test_a_selection_must_answer_every_row():
    with pytest.raises(ValueError):
        decode(Schedule(rows=()), Selection(rows=(Selected(),)), CONTEXT)


def test_every_strategy_answers_the_seam():
    for strategy in STRATEGIES.values():
        asked = request("r", [1, 2])
        assert strategy.width(asked) >= 1
        strategy.want(Sequence(request=asked, index=0, tokens=[1, 2]))
        assert strategy.advance([], CONTEXT) == []


def test_R19_in_the_loop_the_others_finish_unchanged(monkeypatch):
    """Logits of one request turn to NaN in its third step; the other's answer is that of a lone run."""
    loop = Loop()
    bad, good = request("bad", range(5), sampling={"n": 2}), request("good", range(5))
    run = loop.network.run

    def broken(schedule):
        rows = run(schedule).rows
        if schedule.step < 3:
            return Selection(rows=rows)
        pairs = zip(schedule.rows, rows, strict=True)
        return Selection(
            rows=tuple(Selected(finite=False) if row.sequence.request is bad else selected for row, selected in pairs)
        )

    monkeypatch.setattr(loop.network, "run", broken)
    loop.run(bad, good)
    loop.assert_lone(good)
    for index in range(2):
        answer = loop.answers["bad", index]
        assert answer.finish is FinishReason.ERROR and "NaN" in answer.last.error and len(answer.tokens) == 2
