"""The prefix cache: which blocks already hold the keys and values of a prompt's beginning.

A block is named by a hash over everything its contents depend on: the block before it, its own tokens, and extras that
change keys and values without changing tokens.

    root ──▶ key(block 0) ──▶ key(block 1) ──▶ ...      block_key(parent, tokens, extras) = SHA-256
     │          tokens [0, B)    tokens [B, 2B)         + digest and offset of media inside the block
     └ tenant salt, adapter and its version, weights version, layer group

SHA-256 because prompts are the users' own: with a weak hash one user could craft a prompt that is answered from another's
blocks. Every part is length-prefixed, so different parts never make the same message. Only blocks full of computed tokens
have a name. A sequence's chain of keys grows with it and is never hashed again.

A hit of L tokens must be served by every layer group at once: a full group needs all blocks of [0, L), a group with
window W only what the query at position L sees, the blocks that hold [L - W + 1, L).
"""

import struct
from collections.abc import Iterable
from hashlib import sha256
from math import lcm
from typing import NamedTuple

from kvant.config.model import CacheGroup
from kvant.kvcache.block_pool import BlockPool
from kvant.kvcache.window import first_entry
from kvant.types import NULL_BLOCK, Request, Sequence


def block_key(parent: bytes, tokens: Iterable[int], extras: Iterable[bytes] = ()) -> bytes:
    """The name of a block: 32 bytes that depend on the prefix before it, its tokens, and the extras."""
    ids = list(tokens)
    parts = (parent, struct.pack(f"<{len(ids)}q", *ids), *extras)
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def request_extras(request: Request, weights_version: str, group: str) -> tuple[bytes, ...]:
    """What all blocks of a request depend on besides tokens. It names the root of the chain, and so enters every key."""
    return (
        request.cache_salt.encode("utf-8", "surrogatepass"),
        request.adapter.encode("utf-8", "surrogatepass"),
        str(request.adapter_version).encode(),
        weights_version.encode("utf-8", "surrogatepass"),
        group.encode("utf-8", "surrogatepass"),
    )


def media_extras(request: Request, start: int, stop: int) -> tuple[bytes, ...]:
    """Which media lie inside tokens [start, stop), and which part of them: placeholders look all alike."""
    extras: list[bytes] = []
    for span in request.media:
        if span.offset < stop and span.offset + span.length > start:
            extras += (span.digest, struct.pack("<qq", span.offset - start, span.length))
    return tuple(extras)


class PrefixHit(NamedTuple):
    """`num_tokens` need not be computed. `blocks[g]` are the table entries for them, null where no query looks any more."""

    num_tokens: int
    blocks: tuple[list[int], ...]


class _Chain:
    """A sequence's keys per layer group, the root first; `num_recorded[g]` of its blocks were offered to the pool."""

    __slots__ = ("keys", "num_recorded")

    def __init__(self, keys: list[list[bytes]], num_recorded: list[int]):
        self.keys = keys
        self.num_recorded = num_recorded


class PrefixCache:
    """Finds and records prefixes in the pools of all layer groups. `weights_version` names the weights in use."""

    def __init__(self, groups: tuple[CacheGroup, ...], pools: tuple[BlockPool, ...], weights_version: str = ""):
        self.groups = groups
        self.pools = pools
        self.weights_version = weights_version
        self._unit = lcm(*(group.block_size for group in groups))  # prefix lengths that are whole blocks in every group
        self._full_first = sorted(range(len(groups)), key=lambda g: groups[g].window is not None)
        self._chains: dict[Sequence, _Chain] = {}

    def find(self, sequence: Sequence, limit: int) -> PrefixHit:
        """The longest prefix of at most `limit` tokens that every group can serve."""
        bound = limit // self._unit * self._unit
        found: list[list[int]] = [[] for _ in self.groups]
        for g in self._full_first:
            found[g] = self._lookup(sequence, g, bound)
            if self.groups[g].window is None:  # a full group ends at its first gap
                bound = len(found[g]) * self.groups[g].block_size // self._unit * self._unit
        runs = [_runs(blocks) for blocks in found]
        while not all(self._serves(g, runs[g], bound) for g in range(len(self.groups))):
            bound -= self._unit
        return PrefixHit(bound, tuple(self._entries(g, found[g], bound) for g in range(len(self.groups))))

    def record(self, sequence: Sequence, num_tokens: int) -> None:
        """Offers every block that lies within the first `num_tokens` tokens, all of them computed."""
        chain = self._chain(sequence)
        for g, group in enumerate(self.groups):
            last = num_tokens // group.block_size
            for index in range(chain.num_recorded[g], last):
                key = self._key(sequence, chain, g, index)
                block = sequence.tables[g][index]
                if block != NULL_BLOCK:
                    self.pools[g].publish(block, key)
            chain.num_recorded[g] = max(last, chain.num_recorded[g])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child begins with the same tokens, so with the same keys."""
        chain = self._chain(parent)
        self._chains[child] = _Chain([list(keys) for keys in chain.keys], list(chain.num_recorded))

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over, or gave up its blocks; its cached blocks stay."""
        self._chains.pop(sequence, None)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless chains belong to `sequences`, all that live, and name the blocks in their tables."""
        living = set(sequences)
        assert self._chains.keys() <= living, "a chain of keys outlived its sequence"
        for sequence in living:
            for g, table in enumerate(sequence.tables):
                for index, block in enumerate(table):
                    key = self.pools[g].key(block)
                    assert key is None or key == self._key(sequence, self._chain(sequence), g, index), "a wrong key"

    def _lookup(self, sequence: Sequence, g: int, bound: int) -> list[int]:
        """The cached blocks of [0, bound): up to the first gap in a full group, with null for gaps in a sliding one."""
        chain, pool, group = self._chain(sequence), self.pools[g], self.groups[g]
        blocks: list[int] = []
        for index in range(bound // group.block_size):
            block = pool.lookup(self._key(sequence, chain, g, index))
            if block is None and group.window is None:
                break
            blocks.append(NULL_BLOCK if block is None else block)
        return blocks

    def _serves(self, g: int, runs: list[int], length: int) -> bool:
        """Whether the blocks just before `length` that its query sees are all there."""
        size = self.groups[g].block_size
        return runs[length // size] >= length // size - first_entry(self.groups[g], length)

    def _entries(self, g: int, found: list[int], length: int) -> list[int]:
        """The table of a hit: the query at `length` is the first to read it."""
        last = length // self.groups[g].block_size
        first = min(last, first_entry(self.groups[g], length))
        return [NULL_BLOCK] * first + found[first:last]

    def _chain(self, sequence: Sequence) -> _Chain:
        chain = self._chains.get(sequence)
        if chain is None:
            roots = [block_key(b"", (), request_extras(sequence.request, self.weights_version, g.name)) for g in self.groups]
            chain = self._chains[sequence] = _Chain([[root] for root in roots], [0] * len(roots))
        return chain

    def _key(self, sequence: Sequence, chain: _Chain, g: int, index: int) -> bytes:
        """The key of block `index`, extending the chain up to it."""
        keys, size = chain.keys[g], self.groups[g].block_size
        while len(keys) <= index + 1:
            start = (len(keys) - 1) * size
            extras = media_extras(sequence.request, start, start + size) if sequence.request.media else ()
            keys.append(block_key(keys[-1], sequence.tokens[start : start + size], extras))
        return keys[index + 1]


def _runs(blocks: list[int]) -> list[int]:
    """runs[i]: how many blocks in a row end just before entry i."""
    runs = [0]
    for block in blocks:
        runs.append(0 if block == NULL_BLOCK else runs[-1] + 1)
    return runs
