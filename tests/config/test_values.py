"""What people pass for numbers: plain ones, numpy's, and everything that is none."""

import dataclasses
import math

import numpy as np
import pytest

from kvant.config.engine import EngineConfig
from kvant.config.sampling import SamplingParams
from kvant.errors import ConfigError, RequestError

HUGE = 10**5000  # Python refuses to print it


@pytest.mark.parametrize("name", ["n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "top_k"])
def test_numpys_whole_numbers_become_plain_ones(name):
    value = getattr(SamplingParams(max_tokens=9, **({name: np.int64(3)} if name != "max_tokens" else {})), name)
    assert type(value) is int
    for wrong in (True, 3.0, "3", np.bool_(True), math.nan, HUGE, -HUGE, [3], object()):
        with pytest.raises(RequestError, match=name) as error:
            SamplingParams(**{name: wrong})
        assert error.value.param == name and len(str(error.value)) < 200


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_numpys_numbers_become_plain_ones(name):
    assert type(getattr(SamplingParams(**{name: np.float32(0.5)}), name)) is float
    for wrong in (True, None, "0.5", math.nan, math.inf, -math.inf, HUGE, 1j, np.array([0.5, 0.5])):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: wrong})


def test_R14_a_seed_is_any_64_bit_integer_and_nothing_else():
    for seed in (-(2**63), -1, 0, 2**63 - 1, np.int64(-5)):
        assert SamplingParams(seed=seed).seed == seed
    for wrong in (2**63, -(2**63) - 1, 1.0, "1", True):
        with pytest.raises(RequestError, match="seed"):
            SamplingParams(seed=wrong)


def test_stops_are_any_list_of_the_right_things():
    assert SamplingParams(stop=None).stop == () and SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    for wrong in (5, b"a", {"a": 1}, [""], [None], ["\ud800"], [b"a"], object(), ["a"] * 65, "a" * 1025):
        with pytest.raises(RequestError, match="stop"):
            SamplingParams(stop=wrong)
    for wrong in (5, "12", [1.0], [True], [-1], {1: 2}, [HUGE]):
        with pytest.raises(RequestError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=wrong)


@pytest.mark.parametrize(
    "name",
    ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "threads", "seed"],
)
def test_options_of_the_engine_are_whole_numbers_within_reason(name):
    assert type(getattr(EngineConfig(**{name: np.int64(16)}), name)) is int
    for wrong in (16.0, "16", True, HUGE, [16]):
        with pytest.raises(ConfigError, match=name) as error:
            EngineConfig(**{name: wrong})
        assert error.value.param == name
    optional = {f.name for f in dataclasses.fields(EngineConfig) if f.default is None}
    if name not in optional:
        with pytest.raises(ConfigError, match=name):
            EngineConfig(**{name: None})


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 100_000},
        {"max_num_seqs": 10**9},
        {"max_num_batched_tokens": 2**62},
        {"block_size": 24},
        {"gpu_memory_utilization": "x"},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": True},
        {"gpu_memory_utilization": math.nan},
        {"enable_prefix_caching": "no"},
        {"dtype": None},
        {"device": "gpu"},
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_opened(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)
