"""How KV memory is divided between the layer groups of a model. Numbers only.

A sequence of `length` tokens needs, in blocks of B tokens:

    full group      ceil(length / B)
    sliding group   the same, but at most ceil((window + step_tokens) / B) + 1: blocks that fell out of the window are
                    given back, so only the window, the chunk being computed and one half-used block exist together

The division: every group gets what one sequence of the longest context needs. Beyond that all groups grow together, so
that many short sequences, which need as many blocks in a sliding group as in a full one, find room in each; a group
stops at what `max_num_seqs` of the longest sequences could use. Block 0 of every group is the null block.

    blocks  ▲        full  ______________   stops at max_num_seqs x its need (never, with `spend_all`)
            │             /
            │  full _____/
            │           / _______ sliding   stops at max_num_seqs x its need
            │  sliding_/_/
            └──────────────────────────▶ memory
"""

from dataclasses import dataclass, replace

from kvant.config.model import CacheGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """The block pools of a model: what a block costs, and once divided, how many each group has (null block included)."""

    groups: tuple[CacheGroup, ...]
    itemsize: int  # bytes of one stored number
    step_tokens: int  # the most tokens computed in one step
    num_blocks: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self._bytes(self.num_blocks)

    def need(self, length: int) -> tuple[int, ...]:
        """Blocks per group that one sequence of `length` tokens takes at most, at any moment."""
        return tuple(self._need(group, length) for group in self.groups)

    def bytes_of(self, length: int) -> int:
        """Bytes that pools for one sequence of `length` tokens take, null blocks included."""
        return self._bytes(tuple(1 + blocks for blocks in self.need(length)))

    def num_sequences(self, length: int) -> int:
        """How many sequences of `length` tokens the divided pools hold at once."""
        return min((blocks - 1) // need for blocks, need in zip(self.num_blocks, self.need(length), strict=True))

    def _need(self, group: CacheGroup, length: int) -> int:
        blocks = -(-length // group.block_size)
        if group.window is None:
            return blocks
        return min(blocks, -(-(group.window + self.step_tokens) // group.block_size) + 1)

    def _bytes(self, num_blocks: tuple[int, ...]) -> int:
        return sum(n * g.block_bytes(self.itemsize) for n, g in zip(num_blocks, self.groups, strict=True))


def longest_context(plan: KVPlan, budget: int, wanted: int) -> int:
    """The longest sequence, up to `wanted` tokens, whose blocks fit into `budget` bytes; 0 where not even one token does."""
    low, high = 0, wanted  # bytes_of grows with length: low always fits (or is 0), everything above high does not
    while low < high:
        middle = (low + high + 1) // 2
        if plan.bytes_of(middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def divide(plan: KVPlan, budget: int, length: int, max_num_seqs: int, *, spend_all: bool) -> KVPlan:
    """`plan` with as many blocks per group as `budget` bytes hold; one sequence of `length` must fit (`longest_context`).

    `spend_all`: what is left when every group has all it could use goes to the groups without a window (to all, where
    every group has one), where it keeps more prefixes.
    """
    least = plan.need(length)
    most = [blocks * max_num_seqs for blocks in least]
    if spend_all:
        windowed = all(group.window is not None for group in plan.groups)
        for index, group in enumerate(plan.groups):
            if windowed or group.window is None:
                most[index] = budget  # bytes: more than there can be blocks

    def pools(level: int) -> tuple[int, ...]:
        return tuple(1 + max(low, min(level, high)) for low, high in zip(least, most, strict=True))

    low, high = 0, max(most)
    while low < high:
        middle = (low + high + 1) // 2
        if replace(plan, num_blocks=pools(middle)).num_bytes <= budget:
            low = middle
        else:
            high = middle - 1
    return replace(plan, num_blocks=pools(low))


def show_bytes(number: int) -> str:
    """12.3 GiB, 45.6 MiB, 789 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
