"""What a query sees, in positions and in blocks. The one place that knows how a window meets a block table.

positions  ... [  expired  |<------- W ------->]        the query stands at the end of its window and sees itself
blocks     ... | NULL | NULL |  b7  |  b8  | b9 |       a block goes when its last position is out of sight
"""

from kvant.config.model import CacheGroup


def first_visible(group: CacheGroup, position: int) -> int:
    """The first position that a query at `position` sees: min(position + 1, W) keys, itself included."""
    return 0 if group.window is None else max(0, position - group.window + 1)


def first_entry(group: CacheGroup, position: int) -> int:
    """The first block-table entry that a query at `position`, or any later one, reads."""
    return first_visible(group, position) // group.block_size


def num_entries(group: CacheGroup, num_tokens: int) -> int:
    """Block-table entries that hold `num_tokens` tokens."""
    return -(-num_tokens // group.block_size)


def blocks_for_one_sequence(group: CacheGroup, num_tokens: int, chunk: int = 1) -> int:
    """The most blocks that a sequence of `num_tokens` tokens holds at a time, when computed `chunk` tokens a step.

    The window of the chunk's first query and the chunk, W + chunk - 1 positions, lie across at most
    ceil((W + chunk - 2) / B) + 1 blocks. With chunk = 1 this is what the sequence cannot do without.
    """
    entries = num_entries(group, num_tokens)
    if group.window is None:
        return entries
    return min(entries, num_entries(group, group.window + chunk - 2) + 1)
