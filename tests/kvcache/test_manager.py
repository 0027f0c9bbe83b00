import pytest

from kvant.kvcache.manager import KVCacheManager
from kvant.types import NULL_BLOCK, TARGET, BlockCopy, Sequence
from tests.scheduler.harness import group, request


def sequence(prompt, **details) -> Sequence:
    return Sequence(request=request("r", prompt, **details), index=0, tokens=list(prompt))


def manager(*groups, blocks=9, caching=True) -> KVCacheManager:
    groups = groups or (group(block_size=4),)
    return KVCacheManager(groups, (blocks,) * len(groups), caching)


def admit(kv: KVCacheManager, prompt, num_new=None, **details) -> Sequence:
    """A sequence with all of its prompt computed and cached."""
    new = sequence(prompt, **details)
    hit = kv.find_prefix(new)
    kv.adopt(new, hit)
    new.num_computed[TARGET] = hit.num_tokens
    compute(kv, new, len(new.tokens) - hit.num_tokens if num_new is None else num_new)
    return new


def compute(kv: KVCacheManager, running: Sequence, num_new: int):
    changed = kv.allocate(running, num_new)
    assert changed is not None
    running.num_computed[TARGET] += num_new
    kv.cache_full_blocks(running)
    return changed


def free_blocks(kv: KVCacheManager) -> tuple[int, ...]:
    return tuple(usage.free for usage in kv.usage())


def test_allocation_reports_the_first_changed_entry():
    kv = manager()
    running = admit(kv, range(6))
    assert len(running.tables[0]) == 2
    assert kv.allocate(running, 2) == (2,)  # fits into the block that is there
    assert kv.allocate(running, 3) == (2,) and len(running.tables[0]) == 3
    assert kv.allocate(running, 3) == (3,)  # nothing left to do
    kv.check([running])


def test_lookahead_takes_slots_beyond_the_new_tokens():
    kv = manager()
    running = admit(kv, range(4))
    kv.allocate(running, 1, lookahead=4)
    assert len(running.tables[0]) == 3


def test_allocation_is_all_or_nothing_over_groups():
    """The second group lacks a block: the first must not have taken one either."""
    kv = KVCacheManager((group(block_size=4), group(3, block_size=4)), (9, 3), False)
    running = sequence(range(30))
    kv.adopt(running, kv.find_prefix(running))
    assert kv.allocate(running, 12) is None
    assert running.tables == [[], []] and free_blocks(kv) == (8, 2)
    assert kv.room(running) == 8
    assert kv.allocate(running, 8) == (0, 0)


def test_a_window_leaves_null_behind_and_keeps_entries_in_place():
    kv = manager(group(6, block_size=4))
    running = admit(kv, range(20))
    before = list(running.tables[0])
    compute(kv, running, 1)  # the query at 20 sees 15 ... 20
    assert running.tables[0] == [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, before[3], before[4], running.tables[0][5]]
    assert free_blocks(kv) == (5,)
    kv.check([running])


def test_blocks_that_expire_pay_for_new_ones():
    """A sliding group of three blocks carries a sequence of any length."""
    kv = KVCacheManager((group(5, block_size=4),), (3,), True)
    assert kv.max_tokens_one_sequence(10_000) == 10_000
    running = sequence(range(100))
    kv.adopt(running, kv.find_prefix(running))
    while running.num_new():
        room = kv.room(running)
        assert room > 0
        compute(kv, running, min(room, running.num_new()))
        kv.check([running])


@pytest.mark.parametrize("blocks", range(2, 12))
@pytest.mark.parametrize("window", [None, 1, 5, 6, 9])
def test_max_tokens_one_sequence_is_reached_and_not_passed(window, blocks):
    """Against running a sequence alone, token by token, until the pool refuses."""
    kv = KVCacheManager((group(window, block_size=4),), (blocks,), False)
    longest = kv.max_tokens_one_sequence(60)
    running = sequence(range(60))
    kv.adopt(running, kv.find_prefix(running))
    for _ in range(60):
        if kv.allocate(running, 1) is None:
            break
        running.num_computed[TARGET] += 1
    assert running.num_computed[TARGET] == longest
    assert kv.fits_alone(longest) and (longest == 60 or not kv.fits_alone(longest + 1))


def test_room_is_exactly_what_allocate_grants():
    kv = manager(group(block_size=4), group(5, block_size=2), blocks=8)
    running, other = admit(kv, range(7)), admit(kv, range(50, 55))
    room = kv.room(running)
    assert kv.allocate(running, room + 1) is None
    assert kv.allocate(running, room) is not None
    kv.check([running, other])


def test_R26_a_prompt_that_is_all_cached_still_computes_its_last_token():
    kv = manager()
    admit(kv, range(8))
    again = sequence(range(8))
    assert kv.find_prefix(again).num_tokens == 4
    longer = sequence(range(9))
    assert kv.find_prefix(longer).num_tokens == 8


def test_a_fork_shares_everything_and_copies_what_it_writes():
    kv = manager()
    parent = admit(kv, range(6))
    child = sequence(range(6))
    child.num_computed[TARGET] = 6
    kv.fork(parent, child)
    assert child.tables == parent.tables and child.tables[0] is not parent.tables[0]
    kv.check([parent, child])
    source = parent.tables[0][1]
    assert compute(kv, parent, 1) == (1,)  # the copied entry is news for the device
    assert kv.copies() == ((BlockCopy(source, parent.tables[0][1]),),)
    assert child.tables[0][1] == source
    kv.check([parent, child])
    # The copy reads before anybody writes, so the last holder keeps the source and needs no copy.
    assert compute(kv, child, 1) == (2,)
    assert len(kv.copies()[0]) == 1 and child.tables[0][1] == source
    kv.check([parent, child])
    kv.release_copies()
    assert kv.copies() == ((),)
    kv.check([parent, child])


def test_the_source_of_a_copy_is_not_reused_before_the_copy_ran():
    kv = manager(blocks=5)
    parent = admit(kv, range(6))
    child = sequence(range(6))
    child.num_computed[TARGET] = 6
    kv.fork(parent, child)
    source = parent.tables[0][1]
    compute(kv, parent, 1)
    kv.free(child)
    assert kv.pools[0].references(source) == 1
    kv.check([parent])
    kv.release_copies()
    assert kv.pools[0].references(source) == 0


def test_a_fork_does_not_share_slots_allocated_ahead():
    kv = manager()
    parent = admit(kv, range(4))
    kv.allocate(parent, 1, lookahead=4)
    child = sequence(range(4))
    child.num_computed[TARGET] = 4
    kv.fork(parent, child)
    assert len(child.tables[0]) == 1
    kv.allocate(parent, 1)
    kv.allocate(child, 1)
    assert kv.copies() == ((),) and not set(parent.tables[0][1:]) & set(child.tables[0][1:])


def test_copy_on_write_needs_a_block_like_anything_else():
    kv = manager(blocks=3)
    parent = admit(kv, range(6))
    child = sequence(range(6))
    child.num_computed[TARGET] = 6
    kv.fork(parent, child)
    assert kv.allocate(parent, 1) is None and kv.room(parent) == 0 and kv.copies() == ((),)
    kv.free(child)
    assert kv.allocate(parent, 1) == (2,) and kv.copies() == ((),)


def test_drafts_are_not_cached_before_they_are_tokens():
    kv = manager()
    running = admit(kv, range(6))
    compute(kv, running, 2)  # two drafts fill the block, but only 6 tokens are known
    assert kv.usage()[0].cached == 1
    running.tokens += [8, 9]
    kv.cache_full_blocks(running)
    assert kv.usage()[0].cached == 2


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    kv = manager(blocks=5)
    kv.free(admit(kv, range(16)))
    admit(kv, range(100, 104))
    assert kv.find_prefix(sequence(range(16))).num_tokens == 12


def test_prompt_log_probabilities_read_no_prefix_before_they_are_gathered():
    kv = manager()
    admit(kv, range(20))
    scored = sequence(range(20), sampling={"prompt_logprobs": 0})
    scored.prompt_logprobs = [None]
    assert kv.find_prefix(scored).num_tokens == 0
    scored.prompt_logprobs = [None] * 10  # preempted on the way: rows up to 8 are known
    assert kv.find_prefix(scored).num_tokens == 8
    scored.prompt_logprobs = [None] * 20
    assert kv.find_prefix(scored).num_tokens == 16


def test_without_prefix_caching_nothing_is_found_or_kept():
    kv = manager(caching=False)
    running = admit(kv, range(8))
    assert kv.find_prefix(sequence(range(9))).num_tokens == 0
    assert kv.usage()[0].cached == 0
    kv.free(running)
    kv.check([])


def test_reset_forgets_what_nobody_holds():
    kv = manager()
    held = admit(kv, range(4))
    kv.free(admit(kv, range(100, 108)))
    kv.reset_prefix_cache()
    forgotten, kept = sequence(range(100, 109)), sequence(range(9))
    assert kv.find_prefix(forgotten).num_tokens == 0
    assert kv.find_prefix(kept).num_tokens == 4
    kv.check([held, forgotten, kept])


@pytest.mark.parametrize("different", [{"cache_salt": "b"}, {"adapter": "lora"}])
def test_R28_R30_other_tenants_and_adapters_share_nothing(different):
    kv = manager()
    admit(kv, range(8), cache_salt="a")
    assert kv.find_prefix(sequence(range(9), cache_salt="a")).num_tokens == 8
    assert kv.find_prefix(sequence(range(9), **({"cache_salt": "a"} | different))).num_tokens == 0


def test_R30_a_reloaded_adapter_starts_anew():
    kv = manager()
    admit(kv, range(8), adapter="lora", adapter_version=1)
    assert kv.find_prefix(sequence(range(9), adapter="lora", adapter_version=1)).num_tokens == 8
    assert kv.find_prefix(sequence(range(9), adapter="lora", adapter_version=2)).num_tokens == 0


def test_blocks_needed_counts_revived_blocks():
    kv = manager(blocks=5)
    kv.free(admit(kv, range(8)))
    again = sequence(range(18))
    hit = kv.find_prefix(again)
    assert hit.num_tokens == 8
    assert kv.blocks_needed(18, hit, chunk=18) == (5,)  # two come back to life, three are new
    assert not kv.can_admit(again, hit, 18)


def test_check_notices_a_table_that_lies():
    kv = manager()
    running = admit(kv, range(8))
    running.tables[0][0] = running.tables[0][1]
    with pytest.raises(AssertionError):
        kv.check([running])
