"""Chapter 4: paging. Memory in blocks, handed out when needed, shared, copied on write, found again.

python docs/guide/code/chapter4.py [MODEL] [PROMPT]
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

import chapter1
from chapter1 import Array, Row, attention, load

BLOCK = 16  # tokens per block


class OutOfBlocks(Exception):
    """Every block has a holder."""


class BlockPool:
    """Who holds which block. A free block keeps its contents, and its name if it has one, until it is taken."""

    def __init__(self, num_blocks: int):
        self.references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # used from the front
        self.named: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}

    def take(self) -> int:
        if not self.free:
            raise OutOfBlocks
        block, _ = self.free.popitem(last=False)
        if block in self.names:  # the oldest cached prefix has to go
            del self.named[self.names.pop(block)]
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        self.free.pop(block, None)
        self.references[block] += 1

    def release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free[block] = None
            if block not in self.names:  # nothing worth keeping: first to be used again
                self.free.move_to_end(block, last=False)

    def publish(self, block: int, name: bytes) -> None:
        """From now on the block can be found by `name`, unless an equal one was there first."""
        if name not in self.named and block not in self.names:
            self.named[name] = block
            self.names[block] = name


@dataclass(eq=False)
class Sequence(chapter1.Sequence):
    table: list[int] = field(default_factory=list)  # table[i] holds the tokens [i * BLOCK, (i + 1) * BLOCK)
    num_computed: int = 0
    block_names: list[bytes] = field(default_factory=list)  # of its full blocks


class Storage:
    """Keys and values of everybody, by slot. slot = block * BLOCK + offset."""

    def __init__(self, model: chapter1.Model, num_blocks: int):
        config = model.config
        shape = (config.num_hidden_layers, num_blocks * BLOCK, config.num_key_value_heads, config.head_dim)
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)

    def copy(self, source: int, target: int) -> None:
        old, new = (slice(block * BLOCK, (block + 1) * BLOCK) for block in (source, target))
        self.keys[:, new] = self.keys[:, old]
        self.values[:, new] = self.values[:, old]


class PagedMemory:
    """What attention sees of the storage through one sequence's table."""

    def __init__(self, storage: Storage, table: list[int]):
        self.storage = storage
        self.slots = (np.array(table)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)  # slot of each position

    def attend(self, layer: int, q: Array, k: Array, v: Array, positions: Array) -> Array:
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        keys[self.slots[positions]] = k
        values[self.slots[positions]] = v
        seen = self.slots[: positions[-1] + 1]
        return attention(q, keys[seen], values[seen], positions)


class Engine(chapter1.Engine):
    def __init__(self, model: chapter1.Model, ends: frozenset[int] = frozenset(), num_blocks: int = 256):
        super().__init__(model, ends)
        self.num_blocks = num_blocks
        self.storage = Storage(model, num_blocks)
        self.pool = BlockPool(num_blocks)

    def add(self, prompt: list[int], max_tokens: int) -> Sequence:
        if len(prompt) + max_tokens > self.num_blocks * BLOCK:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens are more than {self.num_blocks} blocks hold")
        sequence = Sequence(list(prompt), len(prompt), max_tokens)
        self.waiting.append(sequence)
        return sequence

    def schedule(self) -> list[Row]:
        sequence = self.waiting[0]
        if not sequence.table:
            self.adopt_prefix(sequence)
        self.allocate(sequence, len(sequence.tokens))
        return [Row(sequence, sequence.num_computed, len(sequence.tokens))]

    def allocate(self, sequence: Sequence, stop: int) -> None:
        """Blocks of its own for the tokens [num_computed, stop). Everything or nothing."""
        entry = sequence.num_computed // BLOCK  # where the next token is written
        shared = entry < len(sequence.table) and self.pool.references[sequence.table[entry]] > 1
        num_new = max(0, -(-stop // BLOCK) - len(sequence.table))
        if num_new + shared > len(self.pool.free):
            raise OutOfBlocks
        if shared:  # copy on write: the others keep the old block
            old, new = sequence.table[entry], self.pool.take()
            self.storage.copy(old, new)
            self.pool.release(old)
            sequence.table[entry] = new
        sequence.table += [self.pool.take() for _ in range(num_new)]

    def adopt_prefix(self, sequence: Sequence) -> None:
        """Takes over blocks that hold the beginning of its tokens already; one token at least is computed."""
        while (len(sequence.table) + 1) * BLOCK < len(sequence.tokens):
            block = self.pool.named.get(self.name_of(sequence, len(sequence.table)))
            if block is None:
                break
            self.pool.share(block)
            sequence.table.append(block)
        sequence.num_computed = len(sequence.table) * BLOCK

    def name_of(self, sequence: Sequence, entry: int) -> bytes:
        """A block's name depends on its tokens and, through its parent's name, on all before them."""
        names = sequence.block_names
        while len(names) <= entry:
            parent = names[-1] if names else b""
            tokens = sequence.tokens[len(names) * BLOCK : (len(names) + 1) * BLOCK]
            names.append(sha256(parent + np.array(tokens, "<i8").tobytes()).digest())
        return names[entry]

    def run(self, rows: list[Row]) -> Array:
        last = []
        for sequence, start, stop in rows:
            memory = PagedMemory(self.storage, sequence.table)
            hidden = self.model.forward(sequence.tokens[start:stop], np.arange(start, stop), memory)
            self.computed(sequence, start, stop)
            last.append(hidden[-1])
        return np.stack(last)

    def computed(self, sequence: Sequence, start: int, stop: int) -> None:
        """The blocks that became full can be found from now on."""
        sequence.num_computed = stop
        for entry in range(start // BLOCK, stop // BLOCK):
            self.pool.publish(sequence.table[entry], self.name_of(sequence, entry))

    def fork(self, parent: Sequence, token: int) -> Sequence:
        """A second answer that goes on with another `token`. It shares all blocks of what is computed."""
        child = Sequence(list(parent.tokens), parent.num_prompt, parent.max_tokens)
        child.tokens[parent.num_computed :] = [token]
        child.num_computed = parent.num_computed
        child.table = parent.table[: -(-parent.num_computed // BLOCK)]
        for block in child.table:
            self.pool.share(block)
        self.waiting.append(child)
        return child

    def free(self, sequence: Sequence) -> None:
        """Gives its blocks back, the last first: of a cached prefix the beginning is worth most."""
        for block in reversed(sequence.table):
            self.pool.release(block)
        sequence.table = []
        sequence.num_computed = 0

    def release(self, sequence: Sequence) -> None:
        self.free(sequence)
        super().release(sequence)


def main(name: str = "smollm2-135m", prompt: str = "The capital of France is") -> None:
    model, tokenizer = load(name)
    engine = Engine(model, tokenizer.eos_ids)
    first = engine.add(tokenizer.encode(prompt), max_tokens=12)
    engine.step()
    second = engine.fork(first, tokenizer.encode(" not")[0])
    while engine.has_work():
        engine.step()
    for sequence in (first, second):
        print(prompt + tokenizer.decode(sequence.answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
