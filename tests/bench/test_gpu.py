"""On a GPU: the memory plan holds, the profile's kernels make a step, and a trace's kernels lie inside their steps."""

import gc
import json

import pytest
import torch

from kvant import LLM, SamplingParams
from kvant.bench.profile import decode_step, profile
from kvant.bench.target import open_target
from kvant.bench.workload import uniform
from kvant.config.engine import EngineConfig
from kvant.config.hardware import detect
from kvant.engine.create import plan
from kvant.engine.trace import KERNELS, LOOP, STEPS

pytestmark = pytest.mark.gpu

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    gc.collect()
    torch.cuda.empty_cache()
    return f"dummy:{tmp_path}"


def test_no_step_needs_more_than_the_plan(model):
    """Whole prompts up to the step's budget, and the most sequences with every filter in use and every score asked for."""
    options = dict(model=model, max_num_seqs=64, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False)
    _, resolved = plan(EngineConfig(**options), detect())
    allowed = sum(part.num_bytes for part in resolved.memory if part.name != "context")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    llm = LLM(**options)
    prompts = [list(prompt) for prompt in uniform(64, 1000, 1, 32_000).prompts]
    filters = dict(temperature=0.8, top_k=100, top_p=0.9, min_p=0.01)
    llm.generate(prompts, SamplingParams(**filters, max_tokens=4, ignore_eos=True, detokenize=False))
    llm.generate(prompts[:4], SamplingParams(**filters, max_tokens=2, logprobs=5, prompt_logprobs=5, detokenize=False))
    peak = torch.cuda.max_memory_allocated() - before
    sizes = {part.name: part.num_bytes for part in resolved.memory}
    assert sizes["weights"] + sizes["KV blocks"] <= peak <= allowed, f"{peak:,} of {allowed:,}: {sizes}"


def test_kernels_make_a_step(model):
    target = open_target(EngineConfig(model=model, enable_prefix_caching=False), lambda _: None)
    work = uniform(8, 100, 8, 32_000)
    step = decode_step(target, work)
    assert 0 < step.busy <= 1.05 * step.seconds
    rows = profile(target, work, lambda _: None)
    parts = {row.scenario: row for row in rows}
    assert 0 < parts["all of products"].fraction < 1.2 and 0 < parts["all of attention"].fraction < 1.2


def test_a_traces_kernels_lie_inside_their_steps(model, tmp_path):
    file = tmp_path / "trace.json"
    llm = LLM(model, trace=str(file))
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False))  # compiles
    llm.generate([list(range(100))], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False))
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == LOOP]
    steps = [event for event in spans if event["tid"] == STEPS]
    kernels = [event for event in spans if event["tid"] == KERNELS]
    assert len(steps) == 24 and len(kernels) > 24 * 4 * 4
    slack = 50  # us, between the two clocks
    inside = sum(
        any(step["ts"] - slack <= k["ts"] and k["ts"] + k["dur"] <= step["ts"] + step["dur"] + slack for step in steps)
        for k in kernels
    )
    assert inside > 0.98 * len(kernels), f"{inside} of {len(kernels)}"
