"""LLM as its users treat it: prompts of every shape, streams left at any point, threads, Ctrl-C. Tiny networks."""

import signal
import threading
import time

import numpy as np
import pytest

from kvant import LLM, ConfigError, KvantError, ModelNotFoundError, RequestError, SamplingParams, TemplateError
from tests.tiny_folder import LLAMA, write_folder

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SMALL = {"kv_cache_memory_bytes": 4 << 20, "threads": 1}
RECOMMENDED = {"generation_config": {"do_sample": True, "temperature": 0.9, "top_k": 20, "eos_token_id": [261, 263]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny"), **RECOMMENDED)


@pytest.fixture(scope="module", params=["auto", "float32"])
def llm(request, folder):
    # On its own executor deterministically: other rows in a batch would be other kernels. In fp32 near-ties are rare enough.
    return LLM(str(folder), dtype=request.param, deterministic=request.param == "auto", **SMALL, seed=1)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        while engine.has_work():
            from kvant.types import StepInput

            engine.step(StepInput(messages=engine.inbox.receive()))
        engine.scheduler.check()
        assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
        llm = request.getfixturevalue("llm")
        assert not llm._texts and not llm._streams


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# --- what may be given ----------------------------------------------------------------------------------------------------


def test_every_shape_of_a_prompt(llm):
    ids = llm.tokenizer.encode("hello")
    expected = ids_of(llm.generate("hello", GREEDY))
    one = [ids, tuple(ids), np.array(ids), [np.int64(i) for i in ids], {"prompt": "hello"}, {"prompt_token_ids": np.array(ids)}]
    for prompt in one:
        assert ids_of(llm.generate(prompt, GREEDY)) == expected
        assert [t for event in llm.stream(prompt, GREEDY) for t in event.token_ids] == expected[0]
    for several in (
        ["hello", "hello"],
        ("hello", ids),
        np.array([ids, ids]),
        (p for p in ("hello", ids)),
        [ids, {"prompt": "hello"}],
    ):
        assert ids_of(llm.generate(several, GREEDY)) == expected * 2
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    "wrong",
    [
        None, 5, 1.5, b"hello", bytearray(b"hello"), object(), [None], [1, None], [1.0], [True], ["a", 1], [[1, "a"]], [[[1]]],
        [b"a"], {}, {"text": "a"}, {"prompt": 5}, {"prompt": {"prompt": "a"}}, {"prompt_token_ids": "abc"}, [[]], [-1],
        [10**30], "\ud800", [272],
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(llm, wrong):
    with pytest.raises(RequestError):
        llm.generate(wrong, GREEDY)
    with pytest.raises(RequestError):
        llm.stream(wrong, GREEDY)


@pytest.mark.parametrize(
    "wrong", [None, "hi", {"role": "user", "content": "x"}, 5, [], [[]], ["a"], [{"content": "x"}], [{"role": 5}]]
)
def test_what_is_no_conversation_is_refused(llm, wrong):
    with pytest.raises(RequestError):  # TemplateError among them
        llm.chat(wrong, GREEDY)
    with pytest.raises(TemplateError):
        llm.stream([{"role": 5}], GREEDY)


def test_conversations_of_every_shape(llm):
    turn = {"role": "user", "content": "hi"}
    expected = ids_of(llm.chat([turn], GREEDY))
    assert ids_of(llm.chat((turn,), GREEDY)) == ids_of(llm.chat(iter([turn]), GREEDY)) == expected
    assert ids_of(llm.chat([[turn], (turn,)], GREEDY)) == expected * 2
    assert llm.count_tokens(iter([turn])) == llm.count_tokens([turn])


@pytest.mark.parametrize("wrong", [{"temperature": 0}, "greedy", 3, ["x"], [None], [{}]])
def test_what_are_no_sampling_params_is_refused(llm, wrong):
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a"], wrong)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.stream("a", wrong)


def test_without_parameters_the_models_own_count(folder):
    llm = LLM(str(folder), seed=5, **SMALL)  # the seed of its first request too
    assert llm.default_sampling == {"temperature": 0.9, "top_k": 20}
    drawn = llm.generate("hello")[0].outputs[0]
    same = llm.generate("hello", SamplingParams(temperature=0.9, top_k=20, seed=5))[0].outputs[0]
    assert drawn == same and len(drawn.token_ids) <= 16


def test_R10_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(folder):
    llm = LLM(str(folder), max_model_len=64, **SMALL)
    llm.engine.admission = type(llm.engine.admission)(
        max_model_len=64, max_num_seqs=64, embedding_rows=272, vocab_size=256
    )  # no end tokens
    (output,) = llm.chat([{"role": "user", "content": "hi"}])
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
    assert output.outputs[0].finish_reason == "length"


def test_unknown_options_are_named(folder):
    with pytest.raises(ConfigError, match=r"unknown option 'max_model_length'; known are .*max_model_len"):
        LLM(str(folder), max_model_length=5)


def test_recommendations_that_cannot_be_are_left_out_with_a_notice(tmp_path):
    llm = LLM(str(write_folder(tmp_path, generation_config={"temperature": -3, "top_k": 5})), **SMALL)
    assert llm.default_sampling == {} and any("temperature must be between" in notice for notice in llm.notices)
    assert llm.generate("hello")[0].outputs[0].finish_reason
    llm = LLM(str(write_folder(tmp_path, generation_config={"do_sample": False, "temperature": 0.7})), **SMALL)
    assert llm.default_sampling == {"temperature": 0.0}


def test_R06_a_folder_without_a_tokenizer_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer.json; convert tokenizer.model"):
        LLM(str(folder))


def test_R48_an_fp16_run_that_overflows_ends_with_an_error_and_not_with_words(tmp_path):
    """Weights as published in bf16, activations far beyond 65,504: fp16 says so, bf16 and the default dtype answer."""
    folder = str(write_folder(tmp_path, {**LLAMA, "torch_dtype": "bfloat16"}, spread=2000.0))
    for dtype, error in (("float16", True), ("bfloat16", False), ("auto", False)):
        llm = LLM(folder, dtype=dtype, **SMALL)
        for output in llm.generate(["hello", "other"], GREEDY.with_changes(n=2)):
            for choice in output.outputs:
                assert (choice.finish_reason == "error") is error, dtype
                assert not error or ("NaN" in choice.error and choice.text == "" and choice.token_ids == [])
        assert not error or any("float16 may overflow" in notice for notice in llm.notices)


# --- who leaves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
@pytest.mark.parametrize("leave", ["close", "throw", "forget"])
def test_a_stream_may_be_left_at_any_point(llm, taken, leave):
    other = llm.stream("another", GREEDY)
    expected = ids_of(llm.generate("another", GREEDY))[0]
    got = list(next(other).token_ids)
    stream = llm.stream("x" * 40, SamplingParams(temperature=1.0, n=3, max_tokens=100))
    for _ in range(taken):
        next(stream)
    if leave == "close":
        stream.close()
    elif leave == "throw":
        with pytest.raises(KeyError):
            stream.throw(KeyError())
    else:
        del stream
    got += [token for event in other for token in event.token_ids]
    assert got == expected


def test_control_c_in_a_step_ends_the_call_and_nothing_else(llm):
    """At every step of a call, between two lines of the engine's own code."""
    expected = ids_of(llm.generate(["abc", "other"], GREEDY))
    whole, step = llm.engine.runner.run, [0]

    def interrupted(prepared):
        step[0] += 1
        if step[0] == when:
            signal.raise_signal(signal.SIGINT)
        return whole(prepared)

    llm.engine.runner.run = interrupted
    try:
        for when in range(1, 8):
            step[0] = 0
            other = llm.stream("other", GREEDY)
            with pytest.raises(KeyboardInterrupt):
                got = list(next(other).token_ids) if when > 1 else []
                llm.generate(["abc", "def"], GREEDY)
            got += [token for event in other for token in event.token_ids]
            assert got == expected[1], when
            assert ids_of(llm.generate("abc", GREEDY)) == expected[:1]
    finally:
        del llm.engine.runner.run


def test_a_fault_in_a_step_reaches_one_caller_and_the_others_go_on(llm):
    expected = ids_of(llm.generate("other", GREEDY))[0]
    other = llm.stream("other", GREEDY)
    got = list(next(other).token_ids)
    whole = llm.engine.runner.run
    llm.engine.runner.run = lambda prepared: (_ for _ in ()).throw(MemoryError())
    try:
        with pytest.raises(MemoryError):
            llm.generate("abc", GREEDY)
    finally:
        llm.engine.runner.run = whole
    got += [token for event in other for token in event.token_ids]
    assert got == expected


# --- at once --------------------------------------------------------------------------------------------------------------


def test_R13_threads_that_ask_at_once_each_get_their_own_answer(llm):
    prompts = [f"prompt number {number} " * (1 + number % 4) for number in range(8)]
    params = [SamplingParams(temperature=1.0, seed=number, max_tokens=10 + number, n=1 + number % 2) for number in range(8)]
    expected = [[c.token_ids for c in llm.generate(p, s)[0].outputs] for p, s in zip(prompts, params, strict=True)]
    results, errors = {}, []

    def ask(number):
        try:
            if number % 2:
                choices = {}
                for event in llm.stream(prompts[number], params[number]):
                    choices.setdefault(event.index, []).extend(event.token_ids)
                results[number] = [choices[index] for index in sorted(choices)]
            else:
                results[number] = [c.token_ids for c in llm.generate(prompts[number], params[number])[0].outputs]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and [results[number] for number in range(8)] == expected


def test_a_short_answer_does_not_wait_for_a_long_one_in_another_thread(llm):
    ended = {}

    def ask(name, count):
        llm.generate(name, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0))
        ended[name] = time.monotonic()

    threads = [threading.Thread(target=ask, args=pair) for pair in (("long", 400), ("short", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended["short"] < ended["long"]


def test_two_models_in_one_process_do_not_mix(folder, tmp_path):
    from tests.tiny_folder import GEMMA

    one = LLM(str(folder), **SMALL)
    two = LLM(str(write_folder(tmp_path, GEMMA)), **SMALL)
    alone = [ids_of(llm.generate("hello", GREEDY))[0] for llm in (one, two)]
    streams, got = [llm.stream("hello", GREEDY) for llm in (one, two)], [[], []]
    for _ in range(40):
        for number, stream in enumerate(streams):
            event = next(stream, None)
            got[number] += event.token_ids if event else ()
    assert got == alone and alone[0] != alone[1]


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 1}, {"block_size": 128}, {"block_size": 8}]
)
def test_extreme_options_change_no_text(folder, options):
    prompts = ["hello world " * 3, "abc", "hello world " * 3 + "x"]
    plain = LLM(str(folder), dtype="float32", **SMALL)
    extreme = LLM(str(folder), dtype="float32", **SMALL, **options)
    expected = ids_of(plain.generate(prompts, GREEDY))
    for _ in range(2):
        assert ids_of(extreme.generate(prompts, GREEDY)) == expected
    with pytest.raises(KvantError, match="n is 65"):
        plain.generate("a", SamplingParams(n=65))
