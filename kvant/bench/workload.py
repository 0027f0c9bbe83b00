"""Workloads: prompts and lengths of answers. Ids are random, so that nothing is found in a prefix cache by accident.

uniform   `num` prompts of `input_len` ids, `output_len` tokens each
nano      the public protocol of nano-vllm's bench.py: 256 requests, prompts and answers of 100 to 1,024 tokens
"""

import random
from dataclasses import dataclass, replace

from kvant.config.sampling import SamplingParams
from kvant.errors import ConfigError
from kvant.planning.work import Job

NANO_VOCABULARY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of ids, and how many tokens each answer has."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]
    temperature: float = 0.0

    @property
    def jobs(self) -> list[Job]:
        """The lengths, for floors."""
        return [Job(len(prompt), length) for prompt, length in zip(self.prompts, self.output_lens, strict=True)]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def params(self) -> list[SamplingParams]:
        """Sampling of every request: exactly its number of tokens, and no text."""
        plain = SamplingParams(temperature=self.temperature, ignore_eos=True, detokenize=False, max_tokens=1, seed=0)
        return [plain.with_changes(max_tokens=length, seed=number) for number, length in enumerate(self.output_lens)]

    def shortened(self, divisor: int) -> "Workload":
        """The same with answers of a fraction of their lengths: meets the same batch sizes, for warming up."""
        return replace(self, output_lens=tuple(max(1, length // divisor) for length in self.output_lens))

    def with_output_len(self, length: int) -> "Workload":
        return replace(self, output_lens=(length,) * len(self.prompts))


def uniform(num: int, input_len: int, output_len: int, vocab_size: int, seed: int = 0) -> Workload:
    """`num` prompts of `input_len` random ids below `vocab_size`."""
    source = random.Random(seed)
    prompts = tuple(tuple(source.randrange(vocab_size) for _ in range(input_len)) for _ in range(num))
    return Workload(name=f"{num} x {input_len}+{output_len}", prompts=prompts, output_lens=(output_len,) * num)


def nano(vocab_size: int) -> Workload:
    """The protocol in the order of its draws: per prompt its length, then its ids; then all lengths of answers.

    142,827 prompt tokens and 133,966 output tokens; temperature 0.6. Throughput counts output tokens only.
    """
    if vocab_size <= NANO_VOCABULARY:
        raise ConfigError(f"the nano workload has ids up to {NANO_VOCABULARY}; this model knows {vocab_size}")
    source = random.Random(0)
    prompts = tuple(tuple(source.randint(0, NANO_VOCABULARY) for _ in range(source.randint(100, 1024))) for _ in range(256))
    lengths = tuple(source.randint(100, 1024) for _ in range(256))
    return Workload(name="nano", prompts=prompts, output_lens=lengths, temperature=0.6)
