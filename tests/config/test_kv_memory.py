"""The division of KV memory: what must hold for every budget, and the cases with numbers one can follow on paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.config.kv_memory import KVPlan, divide, longest_context, show_bytes
from kvant.config.model import CacheGroup


def group(window: int | None = None, layers: int = 1, block_size: int = 16) -> CacheGroup:
    return CacheGroup(name="g", layers=tuple(range(layers)), window=window, num_kv_heads=1, head_dim=2, block_size=block_size)


def plan(*groups: CacheGroup, step_tokens: int = 32, itemsize: int = 1) -> KVPlan:
    return KVPlan(groups=groups, itemsize=itemsize, step_tokens=step_tokens)


@pytest.mark.parametrize(
    "window, length, blocks",
    [
        (None, 1, 1),
        (None, 16, 1),
        (None, 17, 2),
        (None, 1000, 63),
        (64, 16, 1),  # shorter than the window: as in a full group
        (64, 96, 6),
        (64, 112, 7),  # ceil((64 + 32) / 16) + 1
        (64, 100_000, 7),
        (50, 100_000, 7),  # ceil(82 / 16) + 1
    ],
)
def test_need_of_one_sequence(window, length, blocks):
    assert plan(group(window)).need(length) == (blocks,)


def test_a_sliding_sequence_never_holds_more_blocks_than_planned():
    """Walks a sequence through every chunk size: the blocks between the oldest visible position and the chunk's end."""
    for window in (1, 5, 16, 50, 64):
        for step in (1, 7, 32):
            [most] = plan(group(window), step_tokens=step).need(10_000)
            for start in range(400):
                first = max(0, start - window + 1) // 16
                last = (start + step - 1) // 16
                assert last - first + 1 <= most


def test_longest_context_by_hand():
    one = plan(group())  # a block: 2 x 16 tokens x 1 head x 2 numbers = 64 bytes
    assert one.bytes_of(16) == 128  # and the null block
    assert longest_context(one, 128, 1000) == 16
    assert longest_context(one, 191, 1000) == 16
    assert longest_context(one, 192, 1000) == 32
    assert longest_context(one, 127, 1000) == 0
    assert longest_context(one, 10**9, 1000) == 1000


def test_short_sequences_find_room_in_the_sliding_group_too():
    both = plan(group(None), group(64, layers=5))
    divided = divide(both, 64 * 6 * 1001, 4096, max_num_seqs=500, spend_all=False)
    assert divided.num_blocks == (1001, 1001)  # grown together: 1000 short blocks in each
    sliding_stops = divide(both, 10**9, 4096, max_num_seqs=10, spend_all=False)
    assert sliding_stops.num_blocks == (1 + 10 * 256, 1 + 10 * 7)


def test_the_longest_context_comes_first():
    both = plan(group(None), group(64, layers=5))
    budget = both.bytes_of(4096)
    assert divide(both, budget, 4096, max_num_seqs=64, spend_all=False).num_blocks == (257, 8)


def test_spend_all_leaves_less_than_a_block():
    both = plan(group(None), group(64, layers=5))
    divided = divide(both, 10**6, 128, max_num_seqs=2, spend_all=True)
    assert divided.num_blocks[1] == 1 + 2 * 7
    assert 0 <= 10**6 - divided.num_bytes < 64
    only_sliding = divide(plan(group(64)), 10**6, 128, max_num_seqs=2, spend_all=True)
    assert 0 <= 10**6 - only_sliding.num_bytes < 64


@given(
    windows=st.lists(st.sampled_from([None, 8, 64, 500]), min_size=1, max_size=3),
    block_size=st.sampled_from([8, 16, 64]),
    step_tokens=st.sampled_from([1, 7, 512]),
    budget=st.integers(1, 10**6),
    wanted=st.integers(1, 5000),
    max_num_seqs=st.integers(1, 20),
    spend_all=st.booleans(),
)
def test_every_division(windows, block_size, step_tokens, budget, wanted, max_num_seqs, spend_all):
    groups = [group(window, layers=index + 1, block_size=block_size) for index, window in enumerate(windows)]
    undivided = plan(*groups, step_tokens=step_tokens)
    length = longest_context(undivided, budget, wanted)
    assert length == wanted or undivided.bytes_of(length + 1) > budget
    if length == 0:
        return
    divided = divide(undivided, budget, length, max_num_seqs, spend_all=spend_all)
    assert divided.num_bytes <= budget
    for blocks, need in zip(divided.num_blocks, undivided.need(length), strict=True):
        assert blocks >= 1 + need
        assert spend_all or blocks <= 1 + need * max_num_seqs


def test_show_bytes():
    assert [show_bytes(n) for n in (5, 2048, 3 << 20, 5 << 29)] == ["5 bytes", "2.0 KiB", "3.0 MiB", "2.5 GiB"]
