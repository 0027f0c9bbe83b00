"""Traces: valid at every moment, events that nest, sums that match, decisions with their reasons, and nothing where none is
asked for."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from kvant import LLM, SamplingParams
from kvant.engine.trace import KERNELS, LOOP, SEQUENCES, STEPS, VERBS, Trace, TracedScheduler
from kvant.errors import ConfigError
from tests.tiny_folder import LLAMA

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return f"dummy:{tmp_path}"


@pytest.fixture(params=["auto", "float32"], ids=["native", "torch"])
def options(request, tmp_path):
    return dict(trace=str(tmp_path / "trace.json"), device="cpu", threads=1, dtype=request.param)


def read(options):
    with open(options["trace"]) as file:
        return json.load(file)["traceEvents"]


def spans(events, process, lane=None):
    return [e for e in events if e["ph"] == "X" and e["pid"] == process and lane in (None, e["tid"])]


def end(event):
    return event["ts"] + event["dur"]


def test_events_nest_and_sums_match(model, options):
    LLM(model, **options).generate([[1, 2, 3], [4] * 40], GREEDY)
    events = read(options)
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        lane.sort(key=lambda e: e["ts"])
        for before, after in pairwise(lane):
            assert end(before) <= after["ts"] + 1e-3, "two events of a lane overlap"
    steps, verbs = spans(events, LOOP, STEPS), spans(events, LOOP, VERBS)
    assert len(steps) == 6 and sum(step["args"]["drawn"] for step in steps) == 12
    assert [step["args"]["tokens"] for step in steps] == [43, 2, 2, 2, 2, 2]
    for step in steps:
        inside = [v for v in verbs if step["ts"] <= v["ts"] and end(v) <= end(step) + 1e-3]
        assert [v["name"] for v in inside] == ["schedule", "prepare", "run", "select", "arrive", "decode", "commit"]
        assert 0.8 * step["dur"] < sum(v["dur"] for v in inside) <= step["dur"] + 1e-3
    assert steps[-1]["args"]["ended"] == {"request-0": "length", "request-1": "length"}


def test_kernels_lie_inside_their_runs(model, options):
    LLM(model, **options).generate([[1, 2, 3]], GREEDY)
    events = read(options)
    kernels, runs = spans(events, LOOP, KERNELS), [v for v in spans(events, LOOP, VERBS) if v["name"] == "run"]
    if options["dtype"] == "float32":
        assert kernels == [], "torch on a CPU tells nothing"
        return
    names = {kernel["name"] for kernel in kernels}
    assert {"q_proj + k_proj + v_proj", "attention", "gate_proj + up_proj", "down_proj", "head"} <= names
    for run in runs:
        inside = [k for k in kernels if run["ts"] <= k["ts"] + 1e-3 and end(k) <= end(run) + 1e-3]
        assert len(inside) == len(kernels) / len(runs)
        assert sum(k["dur"] for k in inside) <= run["dur"] + 1e-3


def test_rows_say_who_computed_what(model, options):
    LLM(model, **options, max_num_batched_tokens=16).generate([list(range(1, 41))], GREEDY)
    rows = sorted(spans(read(options), SEQUENCES), key=lambda e: e["ts"])
    assert [row["name"].partition(", ")[2] for row in rows] == [
        "[0, 16)", "[16, 32)", "[32, 40)", "token 41", "token 42", "token 43", "token 44", "token 45",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "limits, reason",
    [
        ({"max_num_seqs": 2}, "no free seat (max_num_seqs)"),
        ({"max_num_batched_tokens": 20}, "the step's tokens are spent (max_num_batched_tokens)"),
        ({"kv_cache_memory_bytes": 4 * 16 * 2 * 2 * 16 * 2 * 2, "max_model_len": 48}, "not enough free blocks"),
    ],
)
def test_who_waits_and_why(model, options, limits, reason):
    if "kv_cache_memory_bytes" in limits:
        itemsize = 2 if options["dtype"] == "auto" else 4
        limits = {**limits, "kv_cache_memory_bytes": limits["kv_cache_memory_bytes"] * itemsize // 2}
    prompts = [[number] * 20 for number in range(1, 5)]
    LLM(model, **options, **limits, enable_prefix_caching=False).generate(prompts, GREEDY)
    events = read(options)
    assert f"the queue waits: {reason}" in {e["name"] for e in events if e["ph"] == "i"}
    waited = [step for step in spans(events, LOOP, STEPS) if step["args"]["why_waiting"] == reason]
    assert waited and all(step["args"]["waiting"] > 0 for step in waited)


def test_preemptions_are_moments(model, options):
    itemsize = 2 if options["dtype"] == "auto" else 4
    memory = 6 * 16 * 2 * 2 * 2 * 16 * itemsize
    llm = LLM(model, **options, kv_cache_memory_bytes=memory, max_model_len=80, enable_prefix_caching=False)
    llm.generate([[1] * 30, [2] * 30], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False))
    events = read(options)
    assert "preempted: request-1" in {e["name"] for e in events if e["ph"] == "i"}
    assert any(step["args"]["preempted"] == ["request-1"] for step in spans(events, LOOP, STEPS))


def test_the_file_is_whole_at_every_moment_and_grows(model, options, monkeypatch):
    monkeypatch.setattr("kvant.engine.trace.FLUSH_STEPS", 2)
    llm = LLM(model, **options)
    assert spans(read(options), LOOP) == []
    seen = []
    for _ in llm.stream([1, 2, 3], GREEDY):
        seen.append(len(spans(read(options), LOOP, STEPS)))
    assert seen == sorted(seen) and 0 < seen[2] < 6
    llm.generate([[5]], GREEDY)
    assert len(spans(read(options), LOOP, STEPS)) == 12


def test_the_same_tokens_with_and_without(model, options):
    prompts = [[1, 2, 3], [4] * 40, [7]]
    plain = {name: value for name, value in options.items() if name != "trace"}
    with_trace, without = (
        [o.outputs[0].token_ids for o in LLM(model, **each).generate(prompts, GREEDY)] for each in (options, plain)
    )
    assert with_trace == without


def test_without_a_trace_nothing_is_wrapped(model):
    engine = LLM(model, device="cpu", threads=1).engine
    assert not isinstance(engine.scheduler, TracedScheduler)
    assert type(engine.runner).__module__ == "kvant.runner.native_runner"


def test_a_step_that_fails_leaves_a_whole_file(model, options, monkeypatch):
    llm = LLM(model, **options)
    monkeypatch.setattr(llm.engine.runner._inner, "select", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[1, 2]], GREEDY)
    monkeypatch.undo()
    llm.generate([[1, 2]], GREEDY)
    events = read(options)
    assert any(e["name"].startswith("a step failed") for e in events)
    assert len(spans(events, LOOP, STEPS)) >= 6


@pytest.mark.parametrize("name", ["/nowhere/trace.json", ""])
def test_a_file_that_cannot_be_written_is_named_before_anything_is_loaded(model, name):
    with pytest.raises(ConfigError, match="trace") as caught:
        LLM("dummy:/no/such/model", trace=name)
    assert caught.value.param == "trace"


def test_a_trace_of_nothing_is_a_trace(tmp_path):
    Trace(str(tmp_path / "t.json"))
    assert {e["ph"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {"M"}
