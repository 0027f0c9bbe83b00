"""Chapter 5: continuous batching. Tokens are scheduled, not phases: prompts and answers share every step.

python docs/guide/code/chapter5.py [MODEL] [PROMPT] ...
"""

import sys
from dataclasses import dataclass

import numpy as np

import chapter1
import chapter4
from chapter1 import Array, Row, load
from chapter4 import OutOfBlocks, PagedMemory, Sequence


class BatchMemory:
    """Many sequences in one forward pass: everything but attention never notices."""

    def __init__(self, storage: chapter4.Storage, rows: list[Row]):
        self.memories = [PagedMemory(storage, row.sequence.table) for row in rows]
        self.borders = np.cumsum([row.stop - row.start for row in rows])[:-1]

    def attend(self, layer: int, q: Array, k: Array, v: Array, positions: Array) -> Array:
        parts = zip(self.memories, *(np.split(array, self.borders) for array in (q, k, v, positions)), strict=True)
        return np.concatenate([memory.attend(layer, *part) for memory, *part in parts])


@dataclass(frozen=True)
class Limits:
    num_seqs: int = 16  # sequences under way at a time
    step_tokens: int = 128  # tokens computed in one step


class Engine(chapter4.Engine):
    def __init__(
        self,
        model: chapter1.Model,
        ends: frozenset[int] = frozenset(),
        num_blocks: int = 256,
        limits: Limits = Limits(),
    ):
        super().__init__(model, ends, num_blocks)
        self.limits = limits
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Row]:
        """Gives everybody the tokens they lack, while the step's budget lasts: first who runs, then who waits."""
        rows: list[Row] = []
        budget = self.limits.step_tokens
        preempted = self.num_preemptions
        for sequence in list(self.running):
            if budget > 0 and sequence in self.running:  # it may have lost its place to one before it
                budget -= self.give(sequence, budget, rows)
        while self.waiting and budget > 0 and len(self.running) < self.limits.num_seqs:
            if self.num_preemptions > preempted or not self.fits(self.waiting[0]):
                break  # what became free belongs to those who lacked it
            sequence = self.waiting.pop(0)
            self.running.append(sequence)
            if not sequence.table:
                self.adopt_prefix(sequence)
            budget -= self.give(sequence, budget, rows)
        return rows

    def give(self, sequence: Sequence, budget: int, rows: list[Row]) -> int:
        """Up to `budget` of its uncomputed tokens become a row. Returns how many."""
        start = sequence.num_computed
        stop = min(len(sequence.tokens), start + budget)  # a long prompt comes in chunks
        while True:
            try:
                self.allocate(sequence, stop)
            except OutOfBlocks:
                victim = self.running[-1]  # the one admitted last has least to lose
                self.preempt(victim)
                if victim is sequence:
                    return 0
            else:
                rows.append(Row(sequence, start, stop))
                return stop - start

    def fits(self, sequence: Sequence) -> bool:
        """Whether all its known tokens find blocks beside what is held now."""
        return -(-len(sequence.tokens) // chapter4.BLOCK) <= len(self.pool.free) + len(sequence.table)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue with its tokens, without its blocks: they are computed anew later."""
        self.free(sequence)
        self.running.remove(sequence)
        self.waiting.insert(0, sequence)
        self.num_preemptions += 1

    def fork(self, parent: Sequence, token: int) -> Sequence:
        """A child runs at once: who waits must not hold blocks that nobody could take from it."""
        child = super().fork(parent, token)
        self.waiting.remove(child)
        self.running.append(child)
        return child

    def run(self, rows: list[Row]) -> Array:
        """One forward pass for all rows together."""
        ids = [token for sequence, start, stop in rows for token in sequence.tokens[start:stop]]
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in rows])
        hidden = self.model.forward(ids, positions, BatchMemory(self.storage, rows))
        for row in rows:
            self.computed(*row)
        return hidden[np.cumsum([stop - start for _, start, stop in rows]) - 1]

    def select(self, rows: list[Row], hidden: Array) -> list[tuple[Sequence, int]]:
        """Only who has all known tokens computed draws a next one: the chunks of a prompt say nothing yet."""
        drawing = [at for at, row in enumerate(rows) if row.stop == len(row.sequence.tokens)]
        return super().select([rows[at] for at in drawing], hidden[drawing]) if drawing else []

    def release(self, sequence: Sequence) -> None:
        self.free(sequence)
        self.running.remove(sequence)


def main(name: str = "smollm2-135m", *prompts: str) -> None:
    prompts = prompts or ("The capital of France is", "Water boils at", "Once upon a time")
    model, tokenizer = load(name)
    engine = Engine(model, tokenizer.eos_ids)
    answers = engine.generate([tokenizer.encode(prompt) for prompt in prompts], max_tokens=12)
    for prompt, answer in zip(prompts, answers, strict=True):
        print(prompt + tokenizer.decode(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
