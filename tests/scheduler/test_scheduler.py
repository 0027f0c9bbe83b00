"""The scheduler step by step. What only shows over many steps is in tests/test_policy_walk.py."""

import pytest

from kvant.types import (
    TARGET,
    Abort,
    Add,
    Advance,
    Decision,
    Draft,
    Draw,
    FinishReason,
    ResetCache,
    Scheduled,
    Status,
    StepInput,
)
from tests.scheduler.harness import Loop, digests, group, lone_run, next_token, prompt_score, request


def starts(schedule) -> dict[str, tuple[int, int]]:
    return {row.sequence.request.request_id: (row.start, row.num_tokens) for row in schedule.rows}


# --- tokens, budget and seats -------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_wants_something_at_its_end_only():
    loop = Loop(tokens=4)
    asked = request("r", range(10))
    schedules = [loop.step(Add(asked)), loop.step(), loop.step(), loop.step()]
    assert [starts(s)["r"] for s in schedules] == [(0, 4), (4, 4), (8, 2), (10, 1)]
    assert [s.rows[0].want for s in schedules] == [None, None, Draw(1, 0), Draw(1, 0)]
    loop.drain()
    loop.assert_lone(asked)


def test_running_sequences_come_before_waiting_ones():
    loop = Loop(tokens=6)
    first, second = request("a", range(4)), request("b", range(10, 20))
    loop.step(Add(first))
    assert starts(loop.step(Add(second))) == {"a": (4, 1), "b": (0, 5)}
    assert starts(loop.step()) == {"a": (5, 1), "b": (5, 5)}


def test_a_step_without_work_is_empty():
    loop = Loop()
    assert loop.step().rows == () and not loop.scheduler.has_work()


def test_seats_limit_how_many_run_and_are_reported_when_freed():
    loop = Loop(seqs=2)
    requests = [request(f"r{i}", [i, 1, 2], sampling={"max_tokens": 1 + i}) for i in range(4)]
    first = loop.step(*map(Add, requests))
    assert [(row.sequence.seat, row.newly_seated) for row in first.rows] == [(None, True), (1, True)]  # r0 is over
    second = loop.step()
    assert second.freed_seats == (0,)
    assert [(row.sequence.request.request_id, row.newly_seated) for row in second.rows] == [("r1", False), ("r2", True)]
    loop.drain()
    for asked in requests:
        loop.assert_lone(asked)


def test_the_head_of_the_queue_is_not_overtaken():
    """A request of three choices waits for three seats; the one behind it would fit, but waits as well."""
    loop = Loop(seqs=3)
    wide = request("wide", [1, 2], sampling={"n": 3})
    loop.step(Add(request("first", [3], sampling={"max_tokens": 4})))
    schedule = loop.step(Add(wide), Add(request("behind", [4])))
    assert list(starts(schedule)) == ["first"]
    loop.drain()
    order = [row.sequence.request.request_id for s in loop.schedules for row in s.rows if row.newly_seated]
    assert order.index("wide") < order.index("behind")


def test_admission_waits_for_the_blocks_of_the_whole_prompt():
    """Five free blocks for a prompt of six: chunks of it would fit, but would only be thrown away again."""
    loop = Loop(num_blocks=(9,), tokens=8)
    loop.step(Add(request("a", range(12), sampling={"max_tokens": 20})))
    loop.step()
    assert list(starts(loop.step(Add(request("b", range(50, 74)))))) == ["a"]


def test_a_table_is_new_to_the_device_from_the_entry_that_changed():
    loop = Loop()
    rows: list[Scheduled] = [loop.step(Add(request("r", range(7)))).rows[0]]
    rows += [loop.step().rows[0] for _ in range(3)]
    assert [row.table_from for row in rows] == [(0,), (2,), (2,), (3,)]


# --- choices ------------------------------------------------------------------------------------------------------------


def test_choices_fork_at_the_first_token_and_share_the_prompt():
    loop = Loop()
    asked = request("r", range(6), sampling={"n": 3})
    assert loop.step(Add(asked)).rows[0].want == Draw(3, 0)
    assert [s.index for s in loop.scheduler.running] == [0, 1, 2]
    tables = [s.tables[0] for s in loop.scheduler.running]
    assert tables[0] == tables[1] == tables[2]
    schedule = loop.step()
    assert [row.newly_seated for row in schedule.rows] == [False, True, True]
    assert [(row.start, row.num_tokens) for row in schedule.rows] == [(6, 1)] * 3
    assert len(schedule.kv_copies[0]) == 2  # the last of three writes in place
    loop.drain()
    loop.assert_lone(asked)
    assert len({tuple(loop.answers["r", i].tokens) for i in range(3)}) == 3
    again = request("again", range(6), sampling={"n": 3})
    loop.run(again)
    assert [loop.answers["again", i].last.num_cached_tokens for i in range(3)] == [4, 4, 4]


def test_a_request_keeps_seats_for_its_choices():
    loop = Loop(seqs=4, tokens=4)
    wide, other = request("wide", range(12), sampling={"n": 3}), request("other", [1], sampling={"n": 2})
    loop.step(Add(wide), Add(other))
    for _ in range(3):
        assert "other" not in starts(loop.step())
    loop.drain()
    loop.assert_lone(wide)
    loop.assert_lone(other)


def test_choices_that_end_with_their_first_token_need_no_seat():
    loop = Loop(seqs=3)
    asked = request("r", range(5), sampling={"n": 3, "max_tokens": 1})
    loop.run(asked)
    loop.assert_lone(asked)
    assert loop.scheduler._seats.num_free == 3


def test_siblings_stay_neighbours_in_order_of_admission():
    loop = Loop(tokens=64)
    loop.step(Add(request("a", range(5), sampling={"n": 3})), Add(request("b", range(9))))
    order = [(s.request.request_id, s.index) for s in loop.scheduler.running]
    assert order == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]


def test_more_choices_than_seats_are_refused_at_once():
    loop = Loop(seqs=2)
    asked, other = request("r", [1], sampling={"n": 3}), request("other", [1])
    loop.run(asked, other)
    assert [loop.answers["r", i].finish for i in range(3)] == [FinishReason.ERROR] * 3
    assert "max_num_seqs" in loop.answers["r", 0].last.error
    loop.assert_lone(other)


# --- the prefix cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_R26_a_prompt_entirely_in_the_cache_answers_as_when_cold(length):
    loop = Loop()
    cold, warm = request("cold", range(length)), request("warm", range(length))
    loop.run(cold)
    computed = loop.network.num_computed
    loop.run(warm)
    loop.assert_lone(cold)
    loop.assert_lone(warm)
    hit = (length - 1) // 4 * 4
    assert loop.answers["warm", 0].last.num_cached_tokens == hit
    assert loop.network.num_computed - computed == computed - hit


def test_answers_are_cached_for_the_next_turn():
    loop = Loop()
    first = request("a", range(5), sampling={"max_tokens": 9})
    loop.run(first)
    following = request("b", [*range(5), *loop.answers["a", 0].tokens, 3])
    loop.run(following)
    assert loop.answers["b", 0].last.num_cached_tokens == 12  # the 14th token was never computed
    loop.assert_lone(following)


def test_reset_forgets_cached_prefixes():
    loop = Loop()
    loop.run(request("a", range(9)))
    loop.step(ResetCache())
    loop.run(request("b", range(9)))
    assert loop.answers["b", 0].last.num_cached_tokens == 0


def test_R28_R30_requests_of_other_tenants_and_adapters_compute_for_themselves():
    loop = Loop()
    variants = [{}, {"cache_salt": "a"}, {"adapter": "x", "adapter_version": 1}, {"adapter": "x", "adapter_version": 2}]
    for number, details in enumerate(variants):
        for name in (f"{number}", f"{number} again"):
            asked = request(name, range(9), **details)
            loop.run(asked)
            loop.assert_lone(asked)
        assert loop.answers[f"{number}", 0].last.num_cached_tokens == 0
        assert loop.answers[f"{number} again", 0].last.num_cached_tokens == 8


# --- preemption ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_R31_preemption_at_any_length_changes_nothing(caching, window):
    """Every choice of every request, sent back once after each possible step."""
    requests = [
        request("a", range(7), end=True, sampling={"n": 2, "prompt_logprobs": 0}, seed=3),
        request("b", range(5), sampling={"stop": ("q",), "max_tokens": 20}, seed=5),
    ]
    groups = (group(block_size=4), group(window, block_size=2, name="second"))

    def fresh() -> Loop:
        loop = Loop(groups, caching=caching, tokens=5)
        loop.step(*map(Add, requests))
        return loop

    calm = fresh()
    calm.drain()
    for when in range(len(calm.schedules)):
        loop = fresh()
        for _ in range(when):
            loop.step()
        for sequence in list(loop.scheduler.running):
            loop.scheduler.preempt(sequence)
            loop.scheduler.check()
        loop.drain()
        for asked in requests:
            loop.assert_lone(asked)
        assert loop.answers["a", 0].prompt_logprobs == calm.answers["a", 0].prompt_logprobs


def test_R31_a_pool_that_is_too_small_for_all_serves_all():
    """Six requests that need 4 blocks each in a pool of 7: the latest are preempted over and over, nothing is lost."""
    loop = Loop(num_blocks=(8,), length=40)
    requests = [request(f"r{i}", [i, *range(3)], sampling={"max_tokens": 12}, seed=i) for i in range(6)]
    loop.run(*requests)
    assert loop.scheduler.num_preemptions > 0
    for asked in requests:
        loop.assert_lone(asked)


def test_the_latest_admitted_is_preempted_and_comes_back_first():
    loop = Loop(num_blocks=(7,), length=40)
    requests = [request(f"r{i}", [i, 1, 2, 3], sampling={"max_tokens": 16}) for i in range(4)]
    loop.step(*map(Add, requests[:3]))
    while not (schedule := loop.step(*map(Add, requests[3:]))).preempted:
        requests = requests[:3]
    assert [s.request.request_id for s in schedule.preempted] == ["r2"]
    assert loop.scheduler.waiting.peek().request.request_id == "r2"
    preempted = loop.sequence("r2")
    assert preempted.num_computed == {TARGET: 0} and preempted.status is Status.WAITING and preempted.seat is None
    assert len(preempted.tokens) > 4 and preempted.num_preemptions == 1


def test_a_sequence_with_pending_tokens_is_never_preempted():
    loop = Loop(num_blocks=(5,), length=40)
    loop.step(Add(request("a", range(4))), Add(request("b", range(10, 14))), Add(request("c", range(20, 24))))
    loop.sequence("c").num_pending = 1  # drawn, but not collected
    loop.sequence("c").num_computed[TARGET] += 1
    with pytest.raises(ValueError, match="pending"):
        loop.scheduler.preempt(loop.sequence("c"))
    schedule = loop.scheduler.schedule(StepInput())
    assert [s.request.request_id for s in schedule.preempted] == ["b"]
    assert [row.sequence.request.request_id for row in schedule.rows] == ["a", "c"]


def test_a_preempted_fork_comes_back_by_itself():
    loop = Loop(seqs=3)
    asked = request("r", range(6), sampling={"n": 3})
    loop.step(Add(asked))
    loop.step()
    loop.scheduler.preempt(loop.sequence("r", 1))
    schedule = loop.step()
    assert [row.sequence.index for row in schedule.rows] == [0, 2, 1]
    loop.drain()
    loop.assert_lone(asked)


def test_every_sequence_that_fits_alone_gets_through():
    """The smallest pool for each: every other request has to leave for it."""
    loop = Loop(num_blocks=(6,), length=20, tokens=3, seqs=4)
    requests = [request(f"r{i}", range(i, i + 12), sampling={"max_tokens": 8, "n": 2}, seed=i) for i in range(5)]
    loop.run(*requests)
    for asked in requests:
        loop.assert_lone(asked)


# --- what cannot run ----------------------------------------------------------------------------------------------------


def test_R32_a_prompt_that_never_fits_ends_at_once_and_blocks_nobody():
    loop = Loop(num_blocks=(5,), length=64)
    running, large, behind = request("a", range(4)), request("large", range(17)), request("b", range(3))
    loop.step(Add(running))
    loop.step(Add(large), Add(behind))
    refused = loop.answers["large", 0]
    assert refused.finish is FinishReason.ERROR and "17 tokens" in refused.last.error and "at most 16" in refused.last.error
    loop.drain()
    loop.assert_lone(running)
    loop.assert_lone(behind)


@pytest.mark.parametrize("window", [None, 9])
def test_R32_a_sequence_that_outgrows_the_pool_ends_with_an_error_and_all_it_said(window):
    loop = Loop((group(block_size=4), group(window, name="second")), (5, 9), length=64)
    large, other = request("large", range(10), sampling={"max_tokens": 30}), request("other", range(9))
    loop.run(large, other)
    answer = loop.answers["large", 0]
    assert answer.finish is FinishReason.ERROR and "kv_cache_memory_bytes" in answer.last.error
    assert answer.tokens == lone_run(large, 0, 64).tokens[:7]  # 16 slots; the 17th token is known but never computed
    loop.assert_lone(other)


def test_R11_a_prompt_of_one_less_than_the_context_fits_exactly():
    loop = Loop(length=16)
    exact, over = request("exact", range(15)), request("over", range(16))
    loop.run(exact, over)
    assert loop.answers["exact", 0].finish is FinishReason.LENGTH and len(loop.answers["exact", 0].tokens) == 1
    assert loop.answers["over", 0].finish is FinishReason.ERROR
    assert "16" in loop.answers["over", 0].last.error and "max_model_len" in loop.answers["over", 0].last.error


def test_R10_without_a_limit_generation_goes_on_to_the_end_of_the_context():
    loop = Loop(length=30)
    asked = request("r", range(5), sampling={"max_tokens": None})
    loop.run(asked)
    assert len(loop.answers["r", 0].tokens) == 25 and loop.answers["r", 0].finish is FinishReason.LENGTH
    loop.assert_lone(asked)


def test_R12_an_empty_prompt_is_refused_and_others_go_on():
    loop = Loop()
    empty, other = request("empty", []), request("other", [1])
    loop.run(empty, other)
    assert loop.answers["empty", 0].finish is FinishReason.ERROR and "empty" in loop.answers["empty", 0].last.error
    loop.assert_lone(other)


def test_an_id_in_use_is_refused_before_anything_changes():
    loop = Loop()
    loop.step(Add(request("r", [1])))
    with pytest.raises(ValueError, match="'r'"):
        loop.step(Add(request("r", [2])))
    loop.drain()


# --- leaving ------------------------------------------------------------------------------------------------------------


def test_R33_an_abort_ends_all_choices_and_frees_everything():
    loop = Loop()
    loop.step(Add(request("r", range(6), sampling={"n": 3})), Add(request("other", range(9))))
    loop.step()
    loop.step(Abort("r"))
    assert [loop.answers["r", i].finish for i in range(3)] == [FinishReason.ABORT] * 3
    assert loop.scheduler.num_running == 1
    loop.drain()


def test_an_abort_before_the_fork_tells_every_choice():
    loop = Loop(tokens=2)
    loop.step(Add(request("r", range(6), sampling={"n": 3})))
    loop.step(Abort("r"))
    assert [loop.answers["r", i].finish for i in range(3)] == [FinishReason.ABORT] * 3
    assert loop.scheduler._seats.num_free == 8
    assert not loop.scheduler.has_work()


def test_a_waiting_request_can_be_aborted_and_unknown_ids_are_ignored():
    loop = Loop(seqs=1)
    loop.step(Add(request("a", [1])), Add(request("b", [2])))
    loop.step(Abort("b"), Abort("never seen"))
    assert loop.answers["b", 0].finish is FinishReason.ABORT
    loop.drain()


def test_the_row_of_a_sequence_aborted_while_the_step_ran_is_dropped():
    loop = Loop()
    asked = request("r", range(6), sampling={"n": 2})
    schedule = loop.scheduler.schedule(StepInput(messages=(Add(asked),)))
    row = schedule.rows[0]
    loop.scheduler.abort("r")
    advances = (Advance(sequence=row.sequence, tokens=(5,)),)
    outputs = loop.scheduler.commit(schedule, Decision(advances=advances))
    assert [(o.index, o.finish_reason, o.token_ids) for o in outputs] == [
        (0, FinishReason.ABORT, ()),
        (1, FinishReason.ABORT, ()),
    ]
    loop.scheduler.check()
    assert not loop.scheduler.has_work()


def test_drops_leave_without_a_word():
    loop = Loop()
    loop.step(Add(request("r", range(6), sampling={"n": 2})))
    schedule = loop.scheduler.schedule(StepInput())
    assert loop.scheduler.commit(schedule, Decision(advances=(), drops=(loop.sequence("r", 1),))) == []
    loop.scheduler.check()
    assert [s.index for s in loop.scheduler.running] == [0]


def test_R19_blocks_of_a_failed_row_are_not_shared():
    loop = Loop()
    schedule = loop.scheduler.schedule(StepInput(messages=(Add(request("r", range(9))),)))
    failed = Advance(sequence=schedule.rows[0].sequence, finish=FinishReason.ERROR, error="NaN")
    (output,) = loop.scheduler.commit(schedule, Decision(advances=(failed,)))
    assert output.finish_reason is FinishReason.ERROR and output.error == "NaN"
    assert loop.manager.usage()[0].cached == 0
    loop.scheduler.check()


# --- log-probabilities and drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 64])
def test_R21_prompt_log_probabilities_come_once_in_chunks_and_on_a_warm_cache(tokens):
    loop = Loop(tokens=tokens)
    prompt = tuple(range(11))
    chain = digests(request("r", prompt), list(prompt))
    expected = (None, *(prompt_score(prompt, chain, position) for position in range(1, 11)))
    for name in ("cold", "warm"):
        asked = request(name, prompt, sampling={"prompt_logprobs": 0})
        loop.run(asked)
        loop.assert_lone(asked)
        assert loop.answers[name, 0].prompt_logprobs == expected
    plain = request("plain", prompt)
    loop.run(plain)
    assert loop.answers["plain", 0].prompt_logprobs is None and loop.answers["plain", 0].last.num_cached_tokens == 8


def test_scores_are_asked_for_only_where_they_are_missing():
    loop = Loop(tokens=4, caching=False)
    loop.step(Add(request("r", range(10), sampling={"prompt_logprobs": 0})))
    loop.step()
    loop.scheduler.preempt(loop.sequence("r"))
    schedules = [loop.step() for _ in range(4)]
    assert [s.rows[0].score_prompt for s in schedules] == [False, False, True, False]


def test_log_probabilities_add_up():
    loop = Loop()
    loop.run(request("r", [1, 2], sampling={"max_tokens": 5}))
    assert loop.answers["r", 0].last.score == -5.0


@pytest.mark.parametrize("tokens", [2, 4, 64])
@pytest.mark.parametrize("window", [None, 3])
def test_rejected_drafts_are_taken_back(tokens, window):
    """Drafts of three, right for the first `right` of them: the same tokens as without drafts, in fewer steps."""
    loop = Loop((group(block_size=4), group(window, block_size=2, name="second")), tokens=tokens, length=60)
    asked = request("r", range(6), sampling={"max_tokens": 40})
    expected = lone_run(asked, 0, 60).tokens
    loop.step(Add(asked))
    while loop.scheduler.running and loop.scheduler.running[0].num_new() > 1:
        loop.step()
    for right in range(100):
        if not loop.scheduler.running:
            break
        running = loop.scheduler.running[0]
        done = running.num_output_tokens
        guesses = [t if i < right % 4 else (t + 1) % 23 for i, t in enumerate(expected[done : done + 3])]
        running.drafts = [Draft(token, i - 1) for i, token in enumerate(guesses)]
        schedule = loop.scheduler.schedule(StepInput())
        loop.network.run(schedule)
        loop.receive(loop.scheduler.commit(schedule, verify(schedule.rows[0], asked)))
        loop.scheduler.check()
    assert loop.answers["r", 0].tokens == expected
    assert right < 40 or tokens == 2
    loop.drain()


def verify(row: Scheduled, asked) -> Decision:
    """Greedy verification: the drafts that the network would have drawn, and one token more."""
    tokens = list(row.sequence.tokens)
    accepted = []
    for guess in [*(draft.token for draft in row.drafts), None]:
        token = next_token(asked, 0, digests(asked, tokens)[-1])
        accepted.append(token)
        tokens.append(token)
        if token != guess:
            break
    left = asked.sampling.max_tokens - row.sequence.num_output_tokens
    finish = FinishReason.LENGTH if len(accepted) >= left else None
    return Decision(advances=(Advance(sequence=row.sequence, tokens=tuple(accepted[:left]), finish=finish),))


def test_drafts_never_reach_beyond_the_context():
    loop = Loop(length=10)
    loop.step(Add(request("r", range(8), sampling={"max_tokens": None})))
    loop.scheduler.running[0].drafts = [Draft(1, i - 1) for i in range(5)]
    (row,) = loop.scheduler.schedule(StepInput()).rows
    assert (row.start, row.num_tokens, len(row.drafts)) == (8, 2, 1)
