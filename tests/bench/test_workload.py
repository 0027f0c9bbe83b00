"""Workloads: the published counts, and requests that ask for exactly what the workload says."""

import pytest

from kvant.bench.workload import nano, uniform
from kvant.errors import ConfigError
from kvant.planning.work import Job


def test_nano_has_the_published_counts():
    work = nano(151_936)
    assert (len(work.prompts), work.num_prompt_tokens, work.num_output_tokens) == (256, 142_827, 133_966)
    assert max(map(len, work.prompts)) == max(work.output_lens) == 1024
    assert min(map(len, work.prompts)) >= 100 and max(map(max, work.prompts)) <= 10_000
    assert {params.temperature for params in work.params()} == {0.6}


def test_nano_needs_its_vocabulary():
    with pytest.raises(ConfigError, match="10000"):
        nano(10_000)


def test_uniform_is_reproducible_and_its_prompts_differ():
    work = uniform(3, 50, 7, 100)
    assert work == uniform(3, 50, 7, 100) != uniform(3, 50, 7, 100, seed=1)
    assert len(set(work.prompts)) == 3 and max(map(max, work.prompts)) < 100
    assert work.jobs == [Job(50, 7)] * 3 and work.with_output_len(2).jobs == [Job(50, 2)] * 3


def test_requests_ask_for_their_length_and_no_text():
    for params, length in zip(nano(20_000).params(), nano(20_000).output_lens, strict=True):
        assert (params.max_tokens, params.ignore_eos, params.detokenize) == (length, True, False)
