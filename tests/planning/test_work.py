"""Floors: by hand for small cases, by brute force for windows, and against published arithmetic for whole workloads."""

import itertools
import random

import pytest

from kvant.config.model import ModelConfig
from kvant.planning.work import Attention, Ceilings, Job, Matrices, Row, Work, floor_seconds, network, steps

MACHINE = Ceilings(bandwidth=4.3e12, compute=790e12)


def shape(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab):
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
        }
    )
    values = layers * hidden * ((2 * heads + 2 * kv_heads) * head_dim + 3 * intermediate)
    return network(config, Matrices(values, 2 * values), Matrices(hidden * vocab, 2 * hidden * vocab), 2)


QWEN3_06B = shape(28, 1024, 3072, 16, 8, 128, 151936)
LLAMA_1B = shape(16, 2048, 8192, 32, 8, 64, 128256)
LLAMA_8B = shape(32, 4096, 14336, 32, 8, 128, 128256)


def nano():
    """nano-vllm's generator, written once more: lengths of 256 prompts and answers."""
    source = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(source.randint(100, 1024))
        for _ in range(prompts[-1]):
            source.randint(0, 10000)
    return [Job(prompt, source.randint(100, 1024)) for prompt in prompts]


def test_a_step_by_hand():
    step = QWEN3_06B.step([Row(0, 3), Row(9, 1)], 2)
    assert step["linears"] == Work(2 * 440_401_920, 2 * 440_401_920 * 4)
    assert step["head"] == Work(2 * 1024 * 151936, 2 * 1024 * 151936 * 2)
    pairs, positions = 6 + 10, 3 + 3 + 10 + 1
    assert step["attention"] == Work(28 * 2 * 8 * 128 * 2 * positions, 28 * 4 * 16 * 128 * pairs)


def test_no_logits_no_head():
    assert "head" not in QWEN3_06B.step([Row(0, 3)], 0)


@pytest.mark.parametrize("window, start, count", list(itertools.product([None, 1, 3, 8, 100], [0, 1, 7, 8, 20], [1, 2, 9])))
def test_windows_by_brute_force(window, start, count):
    seen = [set(range(max(0, p + 1 - (window or p + 1)), p + 1)) for p in range(start, start + count)]
    work = Attention(1, window, 1, 1).work([Row(start, count)])
    assert work.operations == sum(map(len, seen))
    assert work.num_bytes == len(set().union(*seen)) + count


def test_the_larger_of_both_bounds():
    slow_memory, slow_math = Ceilings(1, 1e9), Ceilings(1e9, 1)
    assert Work(6, 8).seconds(slow_memory) == 6 and Work(6, 8).bound(slow_memory) == "bytes"
    assert Work(6, 8).seconds(slow_math) == 8 and Work(6, 8).bound(slow_math) == "operations"


def test_an_ideal_schedule():
    assert list(steps([Job(5, 2), Job(3, 1), Job(4, 2)], 2)) == [
        [Row(0, 5), Row(0, 3)],
        [Row(5, 1), Row(0, 4)],
        [Row(4, 1)],
    ]


@pytest.mark.parametrize(
    "model, milliseconds", [(QWEN3_06B, 0.277), (LLAMA_1B, 0.575), (LLAMA_8B, 3.491)], ids=["0.6b", "1b", "8b"]
)
def test_one_stream_is_the_weights_over_the_bandwidth(model, milliseconds):
    assert 1e3 * model.seconds([Row(0, 1)], 1, MACHINE) == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.parametrize("model, seconds", [(QWEN3_06B, 3.70), (LLAMA_1B, 1.92), (LLAMA_8B, 10.09)], ids=["0.6b", "1b", "8b"])
def test_the_nano_workload(model, seconds):
    """The same sums made by somebody else, who took 600 TFLOP/s for attention in prompts."""
    jobs = nano()
    assert sum(job.num_prompt for job in jobs) == 142_827 and sum(job.num_output for job in jobs) == 133_966
    assert floor_seconds(model, jobs, 256, MACHINE) == pytest.approx(seconds, rel=0.015)
