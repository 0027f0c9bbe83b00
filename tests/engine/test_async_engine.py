"""AsyncLLM and the process behind it, on random weights and on a real model: what tasks, readers and signals may do to it."""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvant import (
    LLM,
    AsyncLLM,
    ConfigError,
    ContextLengthError,
    GenerationError,
    ModelNotFoundError,
    RequestError,
    SamplingParams,
    TemplateError,
)
from kvant.config.engine import EngineConfig
from kvant.engine.async_engine import EngineTraceback, _spawn
from kvant.engine.process import Failure
from kvant.errors import CapacityError
from kvant.types import Add, Request

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
ROOT = Path(__file__).parent.parent.parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
LONG = SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
PROMPT = "Hello"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return f"dummy:{path}"


@pytest.fixture(scope="module")
def run():
    """Runs coroutines, all on one event loop: an AsyncLLM belongs to the one that started it."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture(scope="module")
def llm(model, run):
    llm = run(AsyncLLM(model, seed=7).start())
    yield llm
    run(llm.close())


async def last(outputs):
    return [output async for output in outputs][-1]


async def until_idle(llm):
    """Asks for one token again and again until the engine computes nothing else: then its step is quick."""
    while llm.engine._answers:
        await asyncio.sleep(0.01)
    await last(llm.generate(PROMPT, SamplingParams(max_tokens=1)))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


# --- what it answers ----------------------------------------------------------------------------------------------------


def test_it_says_what_LLM_says(model, llm, run):
    prompts = ["one", "another", "a third, longer one"]
    params = [SamplingParams(n=2, max_tokens=20, seed=number, logprobs=2, prompt_logprobs=1) for number in range(3)]

    async def together():
        return await asyncio.gather(*(last(llm.generate(*pair)) for pair in zip(prompts, params, strict=True)))

    for expected, got in zip(LLM(model, seed=7).generate(prompts, params), run(together()), strict=True):
        assert [choice.token_ids for choice in got.outputs] == [choice.token_ids for choice in expected.outputs]
        assert [choice.text for choice in got.outputs] == [choice.text for choice in expected.outputs]
        assert got.prompt == expected.prompt and got.finished
        assert len(got.prompt_logprobs) == len(expected.prompt_logprobs)
        assert got.metrics.time_to_first_token > 0 and got.metrics.num_output_tokens == 40


def test_a_stream_joins_to_the_whole(llm, run):
    async def both():
        events = [event async for event in llm.stream(PROMPT, SamplingParams(max_tokens=30, seed=3, n=2))]
        return events, await last(llm.generate(PROMPT, SamplingParams(max_tokens=30, seed=3, n=2)))

    events, whole = run(both())
    for choice in whole.outputs:
        own = [event for event in events if event.index == choice.index]
        assert "".join(event.text for event in own) == choice.text
        assert [token for event in own for token in event.token_ids] == choice.token_ids
        assert own[-1].finish_reason == choice.finish_reason
    assert events[-1].metrics is not None


def test_requests_are_checked_before_they_leave(llm, run):
    for error, prompt, params in [
        (RequestError, "", SHORT),
        (RequestError, [1, "a"], SHORT),
        (RequestError, [256], SHORT),
        (RequestError, ["two", "prompts"], SHORT),
        (ContextLengthError, "x" * 3000, SHORT),
        (ContextLengthError, "x" * 100, LONG),
        (RequestError, "x", SamplingParams(n=100)),
    ]:
        with pytest.raises(error):
            run(last(llm.generate(prompt, params)))
    with pytest.raises(TemplateError):
        run(last(llm.chat([{"role": "user", "content": "hi"}])))
    assert run(last(llm.generate(PROMPT, SHORT))).finished


def test_what_it_knows_before_and_after_the_start(llm):
    assert llm.is_running and llm.max_model_len == 2048 and llm.config.device == "cpu" and llm.reasons
    waiting = AsyncLLM("smollm2-135m")
    assert not waiting.is_running
    with pytest.raises(ConfigError, match="has not started"):
        waiting.tokenizer  # noqa: B018
    with pytest.raises(ConfigError, match="unknown option"):
        AsyncLLM("smollm2-135m", max_model_length=3)


# --- readers ------------------------------------------------------------------------------------------------------------


def test_R33_leaving_early_aborts_the_request(llm, run):
    async def broken_off():
        async for _ in llm.stream(PROMPT, LONG):
            break

    async def cancelled():
        task = asyncio.create_task(last(llm.generate(PROMPT, LONG)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def closed():
        stream = llm.stream(PROMPT, LONG)
        await anext(stream)
        await stream.aclose()

    for leave in (broken_off, cancelled, closed):
        run(leave())
        run(until_idle(llm))
        before = cpu_seconds(llm.engine.process_id)
        run(asyncio.sleep(0.15))
        assert cpu_seconds(llm.engine.process_id) - before <= 0.03  # 2000 tokens would take seconds


def test_a_slow_reader_delays_nobody_and_holds_only_its_own_answer(llm, run):
    async def slow_and_fast():
        slow = llm.stream(PROMPT, LONG.with_changes(max_tokens=300))
        first = await anext(slow)
        started = time.monotonic()
        for _ in range(5):
            await last(llm.generate(PROMPT, SHORT))
        fast_seconds = time.monotonic() - started
        answer = next(iter(llm.engine._answers.values()))
        while not answer.finished:
            await asyncio.sleep(0.01)
        held = len(answer._news)
        rest = [event async for event in slow]
        return first, held, rest, fast_seconds

    first, held, rest, fast_seconds = run(slow_and_fast())
    assert held < 300 and fast_seconds < 5
    assert len(rest) == 1 and len(first.token_ids) + len(rest[0].token_ids) == 300  # all that waited, as one piece


def test_a_caller_who_reads_nothing_stops_the_engine_in_the_pipe(model):
    """Neither side piles anything up: the engine computes on when somebody reads again, and nothing is lost."""
    process = _spawn()
    try:
        process.stdin.write(pickle.dumps(EngineConfig(model=model)))
        process.stdin.flush()
        pickle.load(process.stdout)
        sampling = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=20)
        for number in range(8):
            request = Request(request_id=str(number), prompt_token_ids=(1, 2, 3), sampling=sampling)
            process.stdin.write(pickle.dumps(Add(request)))
        process.stdin.flush()

        def stands_still():
            before = cpu_seconds(process.pid)
            time.sleep(0.3)
            return cpu_seconds(process.pid) == before

        wait_until(stands_still, 15)
        tokens = ends = 0
        while ends < 8:
            for output in pickle.load(process.stdout):
                tokens += len(output.token_ids)
                ends += output.finish_reason is not None
        assert tokens == 8 * 400
    finally:
        process.kill()
        process.communicate()


def test_without_work_it_sleeps(llm, run):
    run(until_idle(llm))
    before = cpu_seconds(llm.engine.process_id)
    time.sleep(0.5)
    assert cpu_seconds(llm.engine.process_id) - before <= 0.01


# --- errors, deaths, ends -----------------------------------------------------------------------------------------------


def test_errors_of_loading_keep_type_and_cause(model, run):
    with pytest.raises(ModelNotFoundError, match="there is no model 'nothing'") as caught:
        run(AsyncLLM("nothing").start())
    assert isinstance(caught.value.__cause__, EngineTraceback) and "resolve_model" in str(caught.value.__cause__)
    with pytest.raises(CapacityError) as capacity:
        run(AsyncLLM(model, kv_cache_memory_bytes=10).start())
    assert capacity.value.param == "kv_cache_memory_bytes"


def test_a_fault_of_the_engine_reaches_everybody_with_its_cause(model, run):
    async def fault():
        async with AsyncLLM(model) as llm:
            tasks = [asyncio.create_task(last(llm.generate(PROMPT, LONG))) for _ in range(3)]
            await asyncio.sleep(0.1)
            llm.engine._send(Add("this is no request"))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(AttributeError) as later:
                await last(llm.generate(PROMPT, SHORT))
            return [*results, later.value]

    errors = run(fault())
    assert len({id(error) for error in errors}) == 4
    for error in errors:
        assert isinstance(error, AttributeError) and "scheduler.py" in str(error.__cause__)


def test_foreign_errors_travel_as_text():
    class Strange(Exception):
        pass

    failure = Failure.of(Strange("odd"))
    assert isinstance(failure.error, GenerationError) and "Strange: odd" in str(failure.error)
    assert isinstance(Failure.of(MemoryError()).error, MemoryError)
    failure = Failure.of(CapacityError("too much", param="threads"))
    assert type(failure.error) is CapacityError and failure.error.param == "threads"
    assert pickle.loads(pickle.dumps(failure)).trace == failure.trace


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_R53_death_of_the_process_is_noticed(model, run, number):
    async def death():
        async with AsyncLLM(model) as llm:
            tasks = [asyncio.create_task(last(llm.generate(PROMPT, LONG))) for _ in range(3)]
            await asyncio.sleep(0.1)
            killed = time.monotonic()
            os.kill(llm.engine.process_id, number)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            seconds = time.monotonic() - killed
            with pytest.raises(GenerationError, match=f"killed by signal {int(number)}"):
                await last(llm.generate(PROMPT, SHORT))
            assert not llm.is_running
            return results, seconds

    results, seconds = run(death())
    assert seconds < 5
    for error in results:
        assert isinstance(error, GenerationError) and f"killed by signal {int(number)}" in str(error)


def test_R53_death_while_a_grandchild_holds_the_pipe(model, run):
    """A program that the engine started may have inherited its output; the pipe then outlives the process."""

    async def death():
        async with AsyncLLM(model) as llm:
            task = asyncio.create_task(last(llm.generate(PROMPT, LONG)))
            await asyncio.sleep(0.1)
            llm.engine._reader.join = lambda timeout: None  # as if the pipe went on
            os.kill(llm.engine.process_id, signal.SIGKILL)
            with pytest.raises(GenerationError):
                await task

    run(death())


def test_closing(model, run):
    async def close():
        llm = await AsyncLLM(model).start()
        pid = llm.engine.process_id
        task = asyncio.create_task(last(llm.generate(PROMPT, LONG)))
        await asyncio.sleep(0.1)
        await llm.close()
        with pytest.raises(GenerationError, match="closed"):
            await task
        with pytest.raises(GenerationError, match="closed"):
            await last(llm.generate(PROMPT, SHORT))
        await llm.close()
        return pid

    assert not is_alive(run(close()))


def test_closing_a_process_that_hangs(model, run, monkeypatch):
    monkeypatch.setattr("kvant.engine.async_engine.LEAVE_SECONDS", 0.3)

    async def close():
        llm = await AsyncLLM(model).start()
        os.kill(llm.engine.process_id, signal.SIGSTOP)
        await llm.close()
        return llm.engine.process_id

    assert not is_alive(run(close()))


def test_cancelling_the_start_leaves_no_process(model, run):
    async def cancel():
        llm = AsyncLLM(model)
        task = asyncio.create_task(llm.start())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def children():
        return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}

    before = children()
    run(cancel())
    wait_until(lambda: children() <= before)


SCRIPT = """
import asyncio, sys
from kvant import AsyncLLM, SamplingParams

async def main():
    async with AsyncLLM({model!r}) as llm:
        print(llm.engine.process_id, flush=True)
        async for event in llm.stream("Hello", SamplingParams(max_tokens={tokens}, ignore_eos=True)):
            pass
        print(sorted({{"torch", "triton", "transformers", "multiprocessing"}} & set(sys.modules)), flush=True)

asyncio.run(main())  # and no `if __name__ == "__main__"`
"""


def script(model: str, tokens: int, tmp_path: Path) -> "subprocess.Popen[str]":
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(model=model, tokens=tokens))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, process_group=0
    )


def test_the_callers_process_stays_without_torch(model, tmp_path):
    process = script(model, 3, tmp_path)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and err == ""
    assert out.splitlines()[1] == "[]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_engine_ends_with_its_caller(model, tmp_path, number):
    process = script(model, 2000, tmp_path)
    pid = int(process.stdout.readline())
    time.sleep(0.1)
    os.killpg(process.pid, number)  # as Ctrl-C in a terminal does
    _, err = process.communicate(timeout=10)
    assert process.returncode != 0 and err.count("Traceback") <= 2 and "kvant/engine/process.py" not in err
    wait_until(lambda: not is_alive(pid))


# --- a real model -------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_real_chat(run):
    async def ask():
        async with AsyncLLM("smollm2-135m", max_model_len=512, enable_prefix_caching=False) as llm:
            chat = [{"role": "user", "content": "What is the capital of France?"}]
            params = SamplingParams(temperature=0, max_tokens=30)
            pieces = [event.text async for event in llm.stream(chat, params)]
            return pieces, await last(llm.chat(chat, params)), llm.count_tokens(chat)

    pieces, output, tokens = run(ask())
    assert "".join(pieces) == output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop" and output.metrics.num_prompt_tokens == tokens
