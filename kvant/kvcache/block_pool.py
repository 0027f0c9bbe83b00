"""BlockPool: the KV blocks of one layer group: who holds them, which are free, which still carry a cached prefix.

    take() ◀── free: [ plain ... plain | cached, oldest ... cached, newest ] ◀── release() of the last reference
                     front: used first                          back: used last

A free block that carries a key keeps its contents, and `share` can bring it back to life, until `take` needs it: the free
list is the LRU list of the prefix cache. Block 0 is the null block: padding is written there, nobody holds it.

Invariants (`check`): a block is free exactly when nobody refers to it; keys and blocks are one to one.
Every operation is O(1).
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvant.errors import CapacityError
from kvant.types import NULL_BLOCK


class BlockPool:
    """`num_blocks` blocks, the null block among them; `name` is the layer group's, for messages."""

    def __init__(self, num_blocks: int, name: str):
        if num_blocks < 2:
            raise CapacityError(
                f"the KV cache of layer group {name!r} has {num_blocks} blocks, but needs at least 2 (one is the null block): "
                "raise kv_cache_memory_bytes"
            )
        self.name = name
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def capacity(self) -> int:
        """Blocks that can be held at the same time: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that carry a key, held or free."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """How many holders `block` has; 0 for a free one."""
        return self._references[block]

    def key(self, block: int) -> bytes | None:
        """The prefix that `block` is cached under, if any."""
        return self._keys[block]

    def lookup(self, key: bytes) -> int | None:
        """The block cached under `key`. It may be free: `share` it before anything is taken."""
        return self._cached.get(key)

    def take(self) -> int:
        """A block of one's own, its old contents forgotten. The caller has looked at `num_free` before."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a held block, or the first of a free cached one."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less. The last one's release frees the block; what is cached in it is reused last."""
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        self._free[block] = None
        if self._keys[block] is None:
            self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """Caches `block` under `key`, unless an equal block was there first."""
        if key in self._cached or self._keys[block] is not None:
            return
        self._cached[key] = block
        self._keys[block] = key

    def forget_free(self) -> None:
        """Forgets every cached prefix that nobody holds."""
        for block in self._free:
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None

    def check(self, holders: Mapping[int, int]) -> None:
        """Raises AssertionError unless the books agree with `holders`: block -> number of references that exist."""
        assert NULL_BLOCK not in self._free and self._references[NULL_BLOCK] == 0, f"{self.name}: the null block was handed out"
        assert NULL_BLOCK not in holders, f"{self.name}: somebody holds the null block"
        for block in range(1, self.num_blocks):
            references = self._references[block]
            assert references == holders.get(block, 0), (
                f"{self.name}: block {block} counts {references} references, {holders.get(block, 0)} exist"
            )
            assert (references == 0) == (block in self._free), f"{self.name}: block {block} is both held and free, or neither"
        assert {block: key for key, block in self._cached.items()} == {
            block: key for block, key in enumerate(self._keys) if key is not None
        }, f"{self.name}: keys and blocks disagree"
