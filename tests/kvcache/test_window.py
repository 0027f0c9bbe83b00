import pytest

from kvant.kvcache.window import blocks_for_one_sequence, first_entry, first_visible
from tests.scheduler.harness import group


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 9, 16])
def test_R47_a_query_sees_min_of_position_plus_one_and_window_keys(window):
    for position in range(40):
        assert position - first_visible(group(window), position) + 1 == min(position + 1, window)


def test_a_full_group_sees_everything():
    assert first_visible(group(None), 1000) == 0
    assert blocks_for_one_sequence(group(None, block_size=8), 17) == 3


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 9, 16])
@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
def test_blocks_for_one_sequence_is_the_largest_number_held(window, chunk):
    """Against counting: a sequence computed in chunks from every alignment."""
    kv = group(window, block_size=4)
    length = 60
    counts = [(min(start + chunk, length) - 1) // 4 - first_entry(kv, start) + 1 for start in range(length - chunk)]
    assert blocks_for_one_sequence(kv, length, chunk) == max(counts)
