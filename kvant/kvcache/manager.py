"""KVCacheManager: block tables for sequences, over one block pool per layer group.

The scheduler asks before it runs anything, and takes a sequence through these calls:

    find_prefix ─▶ can_admit ─▶ adopt ─▶ allocate ─▶ [network] ─▶ cache_full_blocks ─▶ ... allocate ... ─▶ free
                                            │                        └▶ fork: a child shares the parent's blocks
                                            └▶ BlockCopy: the block written next is shared, so the writer gets its own copy

    table of a sliding group, W = 20, B = 8, next query at 45 (sees 26 ... 45):

        entry      0     1     2     3     4     5
                 NULL  NULL  NULL   b4    b9    b2            expired blocks leave NULL behind; positions keep their entry
        position  0-7  8-15  16-23 24-31 32-39 40-47

Invariants (`check`): a block has as many references as tables and pending copies name it; a block that a sequence is
about to write is its own; `allocate` does everything or nothing, over all groups. Copies run before the forward pass:
their sources stay referenced until `release_copies`, and no block is source and target of one step.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from kvant.config.model import CacheGroup
from kvant.kvcache.block_pool import BlockPool
from kvant.kvcache.prefix_cache import PrefixCache, PrefixHit
from kvant.kvcache.window import blocks_for_one_sequence, first_entry, num_entries
from kvant.types import NULL_BLOCK, TARGET, BlockCopy, Sequence


class PoolUsage(NamedTuple):
    """Blocks of one layer group: all that can be held, those free, and those that carry a cached prefix (held or free)."""

    name: str
    total: int
    free: int
    cached: int


class _Plan(NamedTuple):
    """What an allocation changes in one table: entries [expired, first) go, entry `copied` is replaced, `num_grow` join."""

    expired: int
    first: int
    copied: int | None
    num_grow: int

    @property
    def num_taken(self) -> int:
        return self.num_grow + (self.copied is not None)


class _Holding:
    """Until when a sequence's tables need no attention, so that an ordinary decode step costs two comparisons."""

    __slots__ = ("cached_below", "limit", "unchanged")

    def __init__(self) -> None:
        self.limit = 0  # slots below this position are allocated, and those from num_computed on its own
        self.unchanged: tuple[int, ...] = ()  # what `allocate` answers while nothing changes
        self.cached_below = 0  # with this many computed tokens another block is full


class KVCacheManager:
    """Block tables over the pools of all layer groups; `num_blocks[g]` counts the null block too."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: tuple[int, ...],
        enable_prefix_caching: bool = True,
        weights_version: str = "",
    ):
        self.groups = groups
        self.pools = tuple(BlockPool(count, group.name) for group, count in zip(groups, num_blocks, strict=True))
        self.num_prefix_queries = 0  # tokens of admitted sequences, and how many of them were found in the cache
        self.num_prefix_hits = 0
        self._prefixes = PrefixCache(groups, self.pools, weights_version) if enable_prefix_caching else None
        self._holdings: dict[Sequence, _Holding] = {}
        self._copies: list[list[BlockCopy]] = [[] for _ in groups]
        self._sources: list[Counter[int]] = [Counter() for _ in groups]

    # --- questions ------------------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> PrefixHit:
        """The longest cached prefix that leaves at least one token to compute: its logits are what everybody waits for.

        A sequence that still gathers prompt log-probabilities has to compute the rows it lacks, so reads no further.
        """
        limit = len(sequence.tokens) - 1
        if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.num_prompt_tokens:
            limit = max(0, min(limit, len(sequence.prompt_logprobs) - 1))
        if self._prefixes is None or limit == 0:
            return PrefixHit(0, tuple([] for _ in self.groups))
        return self._prefixes.find(sequence, limit)

    def blocks_needed(self, num_tokens: int, hit: PrefixHit, chunk: int) -> tuple[int, ...]:
        """Free blocks per group that `num_tokens` tokens take after `hit`, computed `chunk` a step; revived ones count too."""
        return tuple(self._blocks_needed(g, num_tokens, hit.blocks[g], chunk) for g in range(len(self.groups)))

    def can_admit(self, sequence: Sequence, hit: PrefixHit, chunk: int) -> bool:
        """Whether all tokens known of `sequence` fit beside what is held now, computed `chunk` a step."""
        needed = self.blocks_needed(len(sequence.tokens), hit, chunk)
        return all(count <= pool.num_free for count, pool in zip(needed, self.pools, strict=True))

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits into the empty pools."""
        return all(
            blocks_for_one_sequence(group, num_tokens) <= pool.capacity
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def max_tokens_one_sequence(self, limit: int) -> int:
        """The longest context, up to `limit`, that one sequence may reach with these pools."""
        for group, pool in zip(self.groups, self.pools, strict=True):
            if blocks_for_one_sequence(group, limit) > pool.capacity:
                limit = pool.capacity * group.block_size
        return limit

    def room(self, sequence: Sequence) -> int:
        """How many tokens `allocate` could grant to a running sequence now; 0 if none."""
        start = sequence.num_computed[TARGET]
        room = sys.maxsize
        for g, group in enumerate(self.groups):
            plan = self._plan(sequence, g, start, start)
            entries = len(sequence.tables[g]) + self._num_available(sequence, g, plan) - plan.num_taken
            room = min(room, entries * group.block_size - start)
        return max(0, room)

    def usage(self) -> tuple[PoolUsage, ...]:
        return tuple(PoolUsage(pool.name, pool.capacity, pool.num_free, pool.num_cached) for pool in self.pools)

    # --- the life of a sequence's blocks ----------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence, hit: PrefixHit) -> None:
        """A sequence without blocks becomes a holder, of the blocks of `hit` to begin with. `num_computed` is the caller's."""
        for pool, blocks in zip(self.pools, hit.blocks, strict=True):
            for block in blocks:
                if block != NULL_BLOCK:
                    pool.share(block)
        sequence.tables = [list(blocks) for blocks in hit.blocks]
        self._holdings[sequence] = _Holding()
        if self._prefixes is not None:
            self.num_prefix_queries += len(sequence.tokens)
            self.num_prefix_hits += hit.num_tokens

    def allocate(self, sequence: Sequence, num_new: int, lookahead: int = 0) -> tuple[int, ...] | None:
        """Slots for `num_new` tokens after the computed ones, and `lookahead` more.

        Returns, per group, the first table entry that changed (the table's length where none did). Returns None, with
        nothing changed, where the free blocks of any group do not suffice.
        """
        start = sequence.num_computed[TARGET]
        stop = start + num_new + lookahead
        holding = self._holdings[sequence]
        if stop <= holding.limit:
            return holding.unchanged
        plans = [self._plan(sequence, g, start, stop) for g in range(len(self.groups))]
        if any(plan.num_taken > self._num_available(sequence, g, plan) for g, plan in enumerate(plans)):
            return None
        changed = tuple(self._apply(sequence, g, plan) for g, plan in enumerate(plans))
        holding.limit = min(len(table) * group.block_size for table, group in zip(sequence.tables, self.groups, strict=True))
        holding.unchanged = tuple(len(table) for table in sequence.tables)
        return changed

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Makes the full blocks of computed tokens findable. To be called when their keys and values are really there."""
        if self._prefixes is None:
            return
        holding = self._holdings[sequence]
        # Drafts are computed but may be rejected: only what stands in `tokens` has a name.
        num_tokens = min(sequence.num_computed[TARGET], len(sequence.tokens))
        if num_tokens < holding.cached_below:
            return
        self._prefixes.record(sequence, num_tokens)
        holding.cached_below = min((num_tokens // group.block_size + 1) * group.block_size for group in self.groups)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the blocks of its first `num_computed` tokens. Whoever writes into a shared block copies it."""
        child.tables = []
        for group, pool, table in zip(self.groups, self.pools, parent.tables, strict=True):
            shared = table[: num_entries(group, child.num_computed[TARGET])]
            for block in shared:
                if block != NULL_BLOCK:
                    pool.share(block)
            child.tables.append(shared)
        self._holdings[child] = _Holding()
        self._holdings[parent].limit = 0  # its last block is no longer its own
        if self._prefixes is not None:
            self._prefixes.fork(parent, child)

    def free(self, sequence: Sequence) -> None:
        """Gives everything back, the end first, so that the beginning of a prefix is what the cache keeps longest."""
        for pool, table in zip(self.pools, sequence.tables, strict=False):  # a waiting sequence has no tables
            for block in reversed(table):
                if block != NULL_BLOCK:
                    pool.release(block)
        sequence.tables = []
        self._holdings.pop(sequence, None)
        if self._prefixes is not None:
            self._prefixes.forget(sequence)

    def copies(self) -> tuple[tuple[BlockCopy, ...], ...]:
        """Per group, the copies that have to run before this step's forward pass."""
        return tuple(tuple(copies) for copies in self._copies)

    def release_copies(self) -> None:
        """The step with the last copies was launched: their sources may go."""
        for pool, copies, sources in zip(self.pools, self._copies, self._sources, strict=True):
            for copy in copies:
                pool.release(copy.source)
            copies.clear()
            sources.clear()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix that nobody holds."""
        for pool in self.pools:
            pool.forget_free()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the books agree with `sequences`: all that live, running or waiting."""
        living = list(sequences)
        assert {s for s in living if s.tables} == self._holdings.keys(), "holders and tables disagree"
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            holders = Counter(copy.source for copy in self._copies[g])
            assert holders == self._sources[g], f"{group.name}: sources of copies are miscounted"
            assert not holders.keys() & {copy.target for copy in self._copies[g]}, f"{group.name}: a source is a target"
            for sequence in self._holdings:
                table = sequence.tables[g]
                _check_table(group, sequence, table)
                holders.update(block for block in table if block != NULL_BLOCK)
            pool.check(holders)
        if self._prefixes is not None:
            self._prefixes.check(living)

    # --- how -------------------------------------------------------------------------------------------------------------

    def _blocks_needed(self, g: int, num_tokens: int, hit: list[int], chunk: int) -> int:
        group, pool = self.groups[g], self.pools[g]
        held = [block for block in hit if block != NULL_BLOCK]
        revived = sum(pool.references(block) == 0 for block in held)
        grow = num_entries(group, num_tokens) - len(hit)
        if group.window is not None:  # blocks go as the window moves on
            grow = min(grow, blocks_for_one_sequence(group, num_tokens, chunk) - len(held))
        return grow + revived

    def _plan(self, sequence: Sequence, g: int, start: int, stop: int) -> _Plan:
        """What has to change in table `g` so that tokens [start, stop) can be written, the query at `start` being next."""
        group, table = self.groups[g], sequence.tables[g]
        first = expired = min(first_entry(group, start), len(table))
        while expired > 0 and table[expired - 1] != NULL_BLOCK:  # what is null was dropped before
            expired -= 1
        entry = start // group.block_size
        copied = entry if entry < len(table) and self._is_shared(g, table[entry]) else None
        return _Plan(expired, first, copied, max(0, num_entries(group, stop) - len(table)))

    def _is_shared(self, g: int, block: int) -> bool:
        """Whether another sequence holds `block`. A pending copy reads before anybody writes, so does not count."""
        return self.pools[g].references(block) - self._sources[g][block] > 1

    def _num_available(self, sequence: Sequence, g: int, plan: _Plan) -> int:
        """Free blocks, and those that become free because the plan drops them."""
        pool, table = self.pools[g], sequence.tables[g]
        dropped = sum(pool.references(block) == 1 for block in table[plan.expired : plan.first])
        return pool.num_free + dropped

    def _apply(self, sequence: Sequence, g: int, plan: _Plan) -> int:
        """Changes table `g`; returns the first entry that a later query reads and that changed."""
        pool, table = self.pools[g], sequence.tables[g]
        for entry in range(plan.expired, plan.first):
            pool.release(table[entry])
            table[entry] = NULL_BLOCK
        changed = len(table)
        if plan.copied is not None:
            changed = plan.copied
            copy = BlockCopy(table[changed], pool.take())
            self._copies[g].append(copy)  # the sequence's reference to the source passes to the copy
            self._sources[g][copy.source] += 1
            table[changed] = copy.target
        table.extend(pool.take() for _ in range(plan.num_grow))
        return changed


def _check_table(group: CacheGroup, sequence: Sequence, table: list[int]) -> None:
    num_computed = sequence.num_computed[TARGET]
    first = min(first_entry(group, num_computed), len(table))
    assert len(table) * group.block_size >= num_computed, f"{group.name}: computed tokens without a block"
    assert NULL_BLOCK not in table[first:], f"{group.name}: a block went that is still visible"
    blocks = [block for block in table if block != NULL_BLOCK]
    assert len(blocks) == len(set(blocks)), f"{group.name}: a table names a block twice"
    assert table[: len(table) - len(blocks)].count(NULL_BLOCK) == len(table) - len(blocks), f"{group.name}: null behind a block"
