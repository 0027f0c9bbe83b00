"""The floor: the least time that a step of a model can take on a machine, from its bytes and operations alone.

    linears     bytes: every matrix once           operations: 2 x values x tokens
    head        bytes: its matrix once             operations: 2 x values x rows with logits
    attention   bytes: keys and values seen, and   operations: 4 x (query, key) pairs x N x H, per layer
                those written

    floor = sum over the three of max(bytes / bandwidth, operations / compute)

Three sums, since the products of one layer cannot overlap the attention of the same layer (a sequential roofline; Williams
et al., 2009). Norms, rotary, activations in between and the embedding's rows are left out: a floor may be too low, never too
high. Numbers only: how fast the machine is, is measured elsewhere (`bench/ceilings.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvant.config.model import ModelConfig


class Ceilings(NamedTuple):
    """What a machine reaches at best: bytes moved and operations done per second."""

    bandwidth: float
    compute: float


class Work(NamedTuple):
    """One part of a step."""

    num_bytes: float
    operations: float

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.bandwidth, self.operations / ceilings.compute)

    def bound(self, ceilings: Ceilings) -> str:
        """Which of the two is the limit."""
        by_bytes = self.num_bytes / ceilings.bandwidth >= self.operations / ceilings.compute
        return "bytes" if by_bytes else "operations"


class Matrices(NamedTuple):
    """Matrices that multiply: how many values, and in how many bytes they are held."""

    values: int
    num_bytes: int


class Row(NamedTuple):
    """A sequence's share of a step: `num_tokens` new tokens after `start` known ones."""

    start: int
    num_tokens: int


class Attention(NamedTuple):
    """Layers that see alike."""

    num_layers: int
    window: int | None
    kv_bytes: int  # keys and values of one position in one layer
    operations: int  # per (query, key) pair in one layer

    def work(self, rows: Iterable[Row]) -> Work:
        num_bytes = operations = 0
        for start, count in rows:
            end = start + count
            seen = end if self.window is None else min(end, self.window + count - 1)
            num_bytes += seen + count  # read; the new ones were written before
            operations += _pairs(end, self.window) - _pairs(start, self.window)
        return Work(self.num_layers * self.kv_bytes * num_bytes, self.num_layers * self.operations * operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What of a model counts for its floor."""

    linears: Matrices
    head: Matrices
    attentions: tuple[Attention, ...]

    def step(self, rows: Sequence[Row], num_logits: int) -> dict[str, Work]:
        """The parts of a step over `rows`, of which `num_logits` positions meet the head."""
        tokens = sum(row.num_tokens for row in rows)
        attended = [attention.work(rows) for attention in self.attentions]
        parts = {
            "linears": Work(self.linears.num_bytes, 2 * self.linears.values * tokens),
            "attention": Work(sum(w.num_bytes for w in attended), sum(w.operations for w in attended)),
        }
        if num_logits:
            parts["head"] = Work(self.head.num_bytes, 2 * self.head.values * num_logits)
        return parts

    def seconds(self, rows: Sequence[Row], num_logits: int, ceilings: Ceilings) -> float:
        """The floor of such a step."""
        return sum(part.seconds(ceilings) for part in self.step(rows, num_logits).values())


def network(config: ModelConfig, linears: Matrices, head: Matrices, kv_itemsize: int) -> Network:
    """The network of `config`, whose matrices are held as said, with keys and values of `kv_itemsize` bytes each."""
    return Network(
        linears=linears,
        head=head,
        attentions=tuple(
            Attention(
                num_layers=len(group.layers),
                window=group.window,
                kv_bytes=2 * group.num_kv_heads * group.head_dim * kv_itemsize,
                operations=4 * config.num_attention_heads * group.head_dim,
            )
            for group in config.cache_groups()
        ),
    )


class Job(NamedTuple):
    """A request by its lengths."""

    num_prompt: int
    num_output: int


def steps(jobs: Sequence[Job], max_num_seqs: int) -> Iterator[list[Row]]:
    """The steps of an ideal schedule: whole prompts at once, then a token each, always as many sequences as may run."""
    waiting = list(reversed(jobs))
    running: list[tuple[int, Job]] = []  # tokens drawn so far
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append((0, waiting.pop()))
        yield [Row(job.num_prompt + drawn - 1, 1) if drawn else Row(0, job.num_prompt) for drawn, job in running]
        running = [(drawn + 1, job) for drawn, job in running if drawn + 1 < job.num_output]


def floor_seconds(network: Network, jobs: Sequence[Job], max_num_seqs: int, ceilings: Ceilings) -> float:
    """The least time for all of `jobs`: a step's prompts and its single tokens are counted as steps of their own.

    (Together they would share the reading of the weights, at most one reading per step with prompts in it.)
    """
    total = 0.0
    for rows in steps(jobs, max_num_seqs):
        for some in ([row for row in rows if row.start], [row for row in rows if not row.start]):
            if some:
                total += network.seconds(some, len(some), ceilings)
    return total


def _pairs(length: int, window: int | None) -> int:
    """How many (query, key) pairs positions 0 ... length - 1 make: position p sees min(p + 1, window) keys."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
