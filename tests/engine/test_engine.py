"""The loop at work on tiny networks: penalties, log-probabilities, stops, failures; each against a plain reference."""

import numpy as np
import pytest
import torch

from kvant.config.sampling import SamplingParams
from kvant.errors import ContextLengthError, RequestError
from kvant.types import ResetCache
from tests.engine.tiny import GREEDY, VOCABULARY, bytes_of, drive, engine_of, prompts_of, tiny
from tests.network import Harness

PROMPT = prompts_of(1, 20, 21, seed=1)["r00"]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def one(engine, prompt, sampling, **details):
    return drive(engine, {"x": prompt}, sampling, **details)["x", 0]


def naive(model, prompt: list[int], count: int, edit=lambda logits, tokens: logits) -> list[int]:
    """Greedy decoding without a cache: the whole text through the network for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = Harness(model).logits([("x", tokens, 0)])[-1]
        tokens.append(int(edit(logits.clone(), tokens).argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_recomputing_everything(model):
    assert one(engine_of(model), PROMPT, GREEDY).tokens == naive(model, PROMPT, 24)


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.6},
        {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 0.8},
    ],
)
def test_R16_penalties_count_what_they_should_from_the_first_token_on(model, penalties):
    """Presence and frequency: generated tokens only. Repetition: prompt and generated tokens."""
    presence, frequency = penalties.get("presence_penalty", 0), penalties.get("frequency_penalty", 0)
    repetition = penalties.get("repetition_penalty", 1)

    def edit(logits, tokens):
        for token in set(tokens):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        generated = tokens[len(PROMPT) :]
        for token in set(generated):
            logits[token] -= frequency * generated.count(token) + presence
        return logits

    sampling = SamplingParams(temperature=0, max_tokens=24, **penalties)
    assert one(engine_of(model), PROMPT, sampling).tokens == naive(model, PROMPT, 24, edit)


def test_R16_penalties_survive_preemption_and_a_taken_seat(model):
    sampling = SamplingParams(temperature=0, max_tokens=24, frequency_penalty=0.7, repetition_penalty=1.3)
    expected = one(engine_of(model), PROMPT, sampling).tokens

    def between(engine, step):
        if step in (3, 4, 11) and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])

    others = prompts_of(3, 5, 30, seed=3)
    answers = drive(engine_of(model), {**others, "x": PROMPT}, sampling, between)
    assert answers["x", 0].tokens == expected


def test_R15_a_bias_is_added_and_the_reported_numbers_stay_raw(model):
    def edit(logits, tokens):
        logits[5] += 3.0
        logits[9] -= 100
        return logits

    sampling = SamplingParams(temperature=0, max_tokens=24, logit_bias={5: 3.0, "9": -100}, logprobs=0)
    answer = one(engine_of(model), PROMPT, sampling)
    assert answer.tokens == naive(model, PROMPT, 24, edit)
    expected = Harness(model).logits([("x", PROMPT + answer.tokens, 0)])[len(PROMPT) - 1 :].log_softmax(-1)
    for position, (token, report) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        assert report.logprob == pytest.approx(expected[position, token].item(), abs=1e-4)


@pytest.mark.parametrize("bias", [{"x": 1}, {1.5: 1}, {-1: 1}, {True: 1}, {3: 101}, {3: "1"}, {3: float("nan")}, [3], 7, "abc"])
def test_R15_impossible_biases_are_refused_by_name(bias):
    with pytest.raises(RequestError, match="logit_bias") as error:
        SamplingParams(logit_bias=bias)
    assert error.value.param == "logit_bias"


def test_R15_a_bias_outside_the_vocabulary_is_refused_and_nobody_notices(model):
    engine = engine_of(model)
    with pytest.raises(RequestError, match=f"token {VOCABULARY}"):
        engine.request(PROMPT, SamplingParams(logit_bias={3: 1, VOCABULARY: 1}))
    assert one(engine, PROMPT, GREEDY).tokens == naive(model, PROMPT, 24)


def test_R18_padding_rows_of_the_embedding_are_never_chosen_nor_reported(model):
    engine = engine_of(model)
    engine.runner.vocab_size = 40  # as if the tokenizer knew only the first 40 ids
    sampling = SamplingParams(temperature=1.5, seed=1, max_tokens=60, logprobs=10, prompt_logprobs=10)
    prompt = [token % 40 for token in PROMPT]
    answer = one(engine, prompt, sampling)
    assert max(answer.tokens) < 40
    reports = [*answer.logprobs, *answer.prompt_logprobs[1:]]
    assert all(token < 40 for report in reports for token, _ in report.top)
    greedy = one(engine, prompt, SamplingParams(temperature=0, max_tokens=60, repetition_penalty=1.2))
    assert max(greedy.tokens) < 40


def test_R19_a_request_whose_logits_are_not_finite_fails_alone(model):
    """One token's embedding is NaN: whoever has it in the prompt fails, everybody else goes on unchanged."""
    import copy

    broken = copy.deepcopy(model)
    poisoned = 7
    broken.model.embed_tokens.weight.weight[poisoned] = float("nan")
    broken.lm_head.weight = model.lm_head.weight  # the head of its own is clean
    prompts = {name: [t if t != poisoned else 8 for t in prompt] for name, prompt in prompts_of(5, 5, 40, seed=5).items()}
    expected = drive(engine_of(model), prompts, GREEDY)
    bad = {"bad": [3, poisoned, 5], "worse": [poisoned] * 40}
    answers = drive(engine_of(broken, budget=32), {**prompts, **bad}, GREEDY, arrivals={"bad": 2, "worse": 3})
    for name in bad:
        assert answers[name, 0].finish == "error" and "NaN" in answers[name, 0].error and not answers[name, 0].tokens
    for key, answer in expected.items():
        reached = answers[key].tokens
        stop = next((i for i, token in enumerate(answer.tokens) if token == poisoned), len(answer.tokens))
        assert reached[:stop] == answer.tokens[:stop]


def test_R20_logprobs_are_of_the_unmodified_distribution(model):
    plain = SamplingParams(temperature=0, max_tokens=8, logprobs=4)
    shaped = SamplingParams(temperature=0.3, top_p=0.5, top_k=3, seed=2, max_tokens=8, logprobs=4, presence_penalty=1.0)
    for sampling in (plain, shaped):
        answer = one(engine_of(model), PROMPT, sampling)
        logits = Harness(model).logits([("x", PROMPT + answer.tokens, 0)])
        expected = logits[len(PROMPT) - 1 :].log_softmax(-1)
        for position, (token, report) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            assert report.token_id == token and len(report.top) == 4
            assert report.logprob == pytest.approx(expected[position, token].item(), abs=1e-4)
            assert [value for _, value in report.top] == pytest.approx(expected[position].topk(4).values.tolist(), abs=1e-4)


def test_R20_zero_alternatives_still_report_the_chosen_token(model):
    answer = one(engine_of(model), PROMPT, SamplingParams(temperature=0, max_tokens=3, logprobs=0))
    assert [(report.token_id, report.top) for report in answer.logprobs] == [(token, ()) for token in answer.tokens]


def test_R07_R08_a_stop_string_across_tokens_ends_the_text_once_it_counts(model):
    free = one(engine_of(model), PROMPT, GREEDY).tokens
    text = b"".join(bytes_of(token) for token in free)
    middle = len(bytes_of(free[0])) + len(bytes_of(free[1])) - 2
    stop = text[middle : middle + 4].decode()  # begins inside the second token and ends in the third
    answer = one(engine_of(model), PROMPT, SamplingParams(temperature=0, max_tokens=24, stop=stop))
    assert (answer.finish, answer.stop_reason) == ("stop", stop)
    first = len(answer.tokens)
    assert first <= 4
    later = one(engine_of(model), PROMPT, SamplingParams(temperature=0, max_tokens=24, stop=stop, min_tokens=first + 1))
    assert len(later.tokens) > first


def test_R09_any_of_the_models_end_tokens_ends_it(model):
    free = one(engine_of(model), PROMPT, GREEDY).tokens
    for position in (2, 5):
        end = free[position]
        answer = one(engine_of(model, end=(end, 999)), PROMPT, GREEDY)
        assert answer.finish == "stop" and answer.tokens == free[: free.index(end) + 1]
        ignoring = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        assert one(engine_of(model, end=(end,)), PROMPT, ignoring).tokens == free
        asked = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[end])
        assert one(engine_of(model), PROMPT, asked).stop_reason == end


def test_R08_no_end_token_is_drawn_before_min_tokens(model):
    free = one(engine_of(model), PROMPT, GREEDY).tokens
    end = free[1]
    answer = one(engine_of(model, end=(end,)), PROMPT, SamplingParams(temperature=0, max_tokens=24, min_tokens=10))
    assert end not in answer.tokens[:10] and len(answer.tokens) >= 10


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=1, max_tokens=24)])
def test_R08_end_tokens_beyond_the_vocabulary_forbid_nothing(model, sampling):
    engine = engine_of(model, end=(VOCABULARY, 10**6))
    beyond = sampling.with_changes(min_tokens=5, stop_token_ids=[VOCABULARY - 1])
    engine.runner.vocab_size = VOCABULARY - 8  # what a model's file names may lie beyond what its tokenizer knows
    assert len(one(engine, PROMPT, beyond).tokens) == 24


def test_R11_the_context_is_a_limit_that_may_be_reached_exactly(model):
    engine = engine_of(model, max_model_len=40)
    exact = SamplingParams(temperature=0, max_tokens=20)
    assert len(one(engine, PROMPT, exact).tokens) == 20
    with pytest.raises(ContextLengthError, match=r"20 tokens and max_tokens is 21.*context of 40.*lower max_tokens to 20"):
        engine.request(PROMPT, SamplingParams(max_tokens=21))
    with pytest.raises(ContextLengthError, match="the prompt has 40 tokens"):
        engine.request(PROMPT * 2, SamplingParams(max_tokens=None))
    open_end = one(engine, PROMPT, SamplingParams(temperature=0, max_tokens=None))
    assert (len(open_end.tokens), open_end.finish) == (20, "length")


def test_R12_an_empty_prompt_is_refused_and_nobody_notices(model):
    engine = engine_of(model)
    with pytest.raises(RequestError, match="empty"):
        engine.request([], GREEDY)
    assert one(engine, PROMPT, GREEDY).finish == "length"


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**9])
def test_prompt_ids_outside_the_vocabulary_are_refused(model, token):
    with pytest.raises(RequestError, match=f"found {token}"):
        engine_of(model).request([1, token], GREEDY)


def test_more_choices_than_seats_are_refused(model):
    with pytest.raises(RequestError, match="max_num_seqs"):
        engine_of(model, max_num_seqs=3).request(PROMPT, SamplingParams(n=4))


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-30}, {"top_p": 0}, {"temperature": 0, "top_k": 5}]
)
def test_R17_extremes_are_greedy(model, sampling):
    assert one(engine_of(model), PROMPT, SamplingParams(max_tokens=24, **sampling)).tokens == naive(model, PROMPT, 24)


def test_R13_a_seed_repeats_in_any_company(model):
    sampling = SamplingParams(n=3, temperature=1.2, seed=-(2**63), max_tokens=12)
    alone = drive(engine_of(model), {"x": PROMPT}, sampling)
    crowd = drive(engine_of(model, budget=64), {**prompts_of(9, 4, 50, seed=8), "x": PROMPT}, sampling)
    for index in range(3):
        assert alone["x", index].tokens == crowd["x", index].tokens


def test_R28_salts_keep_prefixes_apart_and_a_reset_forgets_them(model):
    engine = engine_of(model)
    prompt = prompts_of(1, 50, 51)["r00"]

    def cached(salt):
        engine.add(
            engine.request(prompt, SamplingParams(max_tokens=2), cache_salt=salt, request_id=f"{salt}{next(engine._numbers)}")
        )
        outputs = []
        from kvant.types import StepInput

        while engine.has_work():
            outputs += engine.step(StepInput(messages=engine.inbox.receive()))
        return outputs[-1].num_cached_tokens

    assert (cached("a"), cached("a"), cached("b"), cached("b"), cached("a")) == (0, 48, 0, 48, 48)
    engine.inbox.put(ResetCache())
    assert cached("a") == 0


def test_R32_a_request_that_can_never_fit_ends_at_once_and_the_queue_goes_on(model):
    """The context allows it, the memory does not: 7 blocks of 16 tokens."""
    engine = engine_of(model, num_blocks=8, max_model_len=200)
    long = prompts_of(1, 150, 151, seed=2)["r00"]
    answers = drive(engine, {"a": PROMPT, "b": long, "c": PROMPT}, GREEDY)
    assert answers["b", 0].finish == "error" and "kv_cache_memory_bytes" in answers["b", 0].error
    assert answers["a", 0].tokens == answers["c", 0].tokens == naive(model, PROMPT, 24)


def test_unseeded_requests_differ_and_a_seeded_engine_repeats_them(model):
    sampling = SamplingParams(temperature=1.3, max_tokens=12)
    prompts = {f"p{i}": PROMPT for i in range(3)}
    runs = [drive(engine_of(model, seed=5), prompts, sampling) for _ in range(2)]
    texts = [[tuple(run[f"p{i}", 0].tokens) for i in range(3)] for run in runs]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


def test_many_rows_of_prompt_logprobs_are_computed_in_parts(model, monkeypatch):
    from kvant.runner import runner

    prompt = prompts_of(1, 90, 91)["r00"]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    whole = one(engine_of(model), prompt, sampling).prompt_logprobs
    monkeypatch.setattr(runner, "SCORE_ROWS", 13)
    parts = one(engine_of(model), prompt, sampling).prompt_logprobs
    assert np.allclose([r.logprob for r in whole[1:]], [r.logprob for r in parts[1:]], atol=1e-5)


def test_everything_is_freed_at_the_end(model):
    engine = engine_of(model)
    drive(engine, prompts_of(7, 3, 60), SamplingParams(n=2, seed=1, max_tokens=9))
    assert not engine.scheduler.running and not engine.has_work()
    assert all(usage.free == usage.total for usage in engine.scheduler.manager.usage())
    assert torch.isfinite(engine.runner.storage.keys[0][0]).all()


@pytest.mark.parametrize("verb", ["prepare", "run", "select"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_that_fails_loses_no_request(model, verb, error):
    """Every third step breaks off, in one of the runner's verbs: texts, choices and log-probabilities are as without."""
    prompts = prompts_of(5, 20, 60, seed=31)
    sampling = SamplingParams(n=2, temperature=0.8, seed=4, max_tokens=12, logprobs=1, prompt_logprobs=1, stop="7,")
    calm = drive(engine_of(model, budget=40), prompts, sampling)
    engine = engine_of(model, budget=40)
    whole, calls = getattr(engine.runner, verb), []

    def failing(*arguments):
        calls.append(verb)
        if len(calls) % 3 == 0:
            raise error
        return whole(*arguments)

    setattr(engine.runner, verb, failing)
    answers = drive(engine, prompts, sampling, survives=error)
    assert len(calls) > 12
    for key, answer in answers.items():
        assert (answer.tokens, answer.finish, answer.stop_reason) == (
            calm[key].tokens,
            calm[key].finish,
            calm[key].stop_reason,
        )
        assert [x.logprob for x in answer.logprobs] == pytest.approx([x.logprob for x in calm[key].logprobs], abs=1e-4)
        if key[1] == 0:
            assert len(answer.prompt_logprobs) == len(prompts[key[0]])
