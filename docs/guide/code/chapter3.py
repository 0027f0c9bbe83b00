"""Chapter 3: a KV cache. A token's keys and values are computed once and kept.

python docs/guide/code/chapter3.py [MODEL] [PROMPT]
"""

import sys
from dataclasses import dataclass

import numpy as np

import chapter1
from chapter1 import Array, Row, attention, load


class Cache:
    """Keys and values of one sequence, in one piece: room for `capacity` tokens in every layer."""

    def __init__(self, model: chapter1.Model, capacity: int):
        config = model.config
        shape = (config.num_hidden_layers, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)

    def attend(self, layer: int, q: Array, k: Array, v: Array, positions: Array) -> Array:
        """First the new keys and values are written, then the queries look at all there are."""
        start, stop = positions[0], positions[-1] + 1
        self.keys[layer, start:stop] = k
        self.values[layer, start:stop] = v
        return attention(q, self.keys[layer, :stop], self.values[layer, :stop], positions)


@dataclass(eq=False)
class Sequence(chapter1.Sequence):
    cache: Cache | None = None
    num_computed: int = 0  # tokens whose keys and values are in the cache


class Engine(chapter1.Engine):
    def __init__(self, model: chapter1.Model, ends: frozenset[int] = frozenset(), max_len: int = 1024):
        super().__init__(model, ends)
        self.max_len = max_len

    def add(self, prompt: list[int], max_tokens: int) -> Sequence:
        if len(prompt) + max_tokens > self.max_len:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens are more than the {self.max_len} there is room for")
        sequence = Sequence(list(prompt), len(prompt), max_tokens)
        self.waiting.append(sequence)
        return sequence

    def schedule(self) -> list[Row]:
        """All tokens that are known and not computed: the whole prompt at first, then one at a time."""
        sequence = self.waiting[0]
        return [Row(sequence, sequence.num_computed, len(sequence.tokens))]

    def run(self, rows: list[Row]) -> Array:
        last = []
        for sequence, start, stop in rows:
            if sequence.cache is None:
                sequence.cache = Cache(self.model, self.max_len)
            hidden = self.model.forward(sequence.tokens[start:stop], np.arange(start, stop), sequence.cache)
            sequence.num_computed = stop
            last.append(hidden[-1])
        return np.stack(last)

    def release(self, sequence: Sequence) -> None:
        sequence.cache = None
        super().release(sequence)


def main(name: str = "smollm2-135m", prompt: str = "The capital of France is") -> None:
    model, tokenizer = load(name)
    engine = Engine(model, tokenizer.eos_ids)
    (answer,) = engine.generate([tokenizer.encode(prompt)], max_tokens=12)
    print(prompt + tokenizer.decode(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
