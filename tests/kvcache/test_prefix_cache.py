from hashlib import sha256
from itertools import combinations

import pytest

from kvant.kvcache.block_pool import BlockPool
from kvant.kvcache.prefix_cache import PrefixCache, block_key, media_extras, request_extras
from kvant.types import NULL_BLOCK, MediaSpan, Sequence
from tests.scheduler.harness import group, request


def sequence(prompt, **details) -> Sequence:
    return Sequence(request=request("r", prompt, **details), index=0, tokens=list(prompt))


def test_R27_keys_are_sha256_and_no_two_messages_are_alike():
    """Moving a byte from one part to the next must change the key: the parts are length-prefixed."""
    keys = [
        block_key(b"", [1, 2]),
        block_key(b"", [1, 2], [b""]),
        block_key(b"", [1, 2], [b"", b""]),
        block_key(b"", [1], [b"\x02" + bytes(7)]),
        block_key(b"", [], [b"ab", b"c"]),
        block_key(b"", [], [b"a", b"bc"]),
        block_key(b"", [], [b"abc"]),
        block_key(b"abc", []),
        block_key(b"", [258]),
        block_key(b"", [2, 1]),
        block_key(b"", [1 << 32]),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == sha256().digest_size for key in keys)


def test_a_key_depends_on_everything_before_it():
    parent, other = block_key(b"", [1]), block_key(b"", [2])
    assert block_key(parent, [3]) != block_key(other, [3])
    assert block_key(parent, [3]) == block_key(parent, (3,))


def extras(**details):
    version, name = details.pop("weights", ""), details.pop("group", "full")
    return request_extras(request("r", [1], **details), version, name)


def test_R28_R30_salt_adapter_version_weights_and_group_all_separate():
    variants = [
        extras(),
        extras(cache_salt="a"),
        extras(adapter="a"),
        extras(adapter="a", adapter_version=1),
        extras(adapter="a", adapter_version=2),
        extras(cache_salt="a", adapter="a"),
        extras(weights="a"),
        extras(group="a"),
    ]
    for one, other in combinations(variants, 2):
        assert block_key(b"", [], one) != block_key(b"", [], other)


def test_a_salt_of_broken_unicode_is_only_bytes():
    assert extras(cache_salt="\ud800") != extras(cache_salt="?")


def test_R29_media_enter_the_blocks_they_lie_in_by_digest_and_place():
    asked = request("r", range(40), media=(MediaSpan(6, 8, b"cat"),))
    assert media_extras(asked, 0, 4) == ()
    first, second, third = (media_extras(asked, start, start + 4) for start in (4, 8, 12))
    assert len({first, second, third}) == 3 and all(part[0] == b"cat" for part in (first, second, third))
    assert media_extras(asked, 14, 18) == ()
    dog = request("r", range(40), media=(MediaSpan(6, 8, b"dog"),))
    assert media_extras(dog, 4, 8) != first


class Case:
    """Pools of given groups, a cache over them, and one recorded prompt."""

    def __init__(self, *groups, prompt=range(100, 140)):
        self.groups = groups
        self.pools = tuple(BlockPool(50, g.name) for g in groups)
        self.cache = PrefixCache(groups, self.pools)
        self.first = sequence(prompt)
        self.first.tables = [
            [pool.take() for _ in range(len(prompt) // g.block_size)] for g, pool in zip(groups, self.pools, strict=True)
        ]
        self.cache.record(self.first, len(prompt))

    def evict(self, g, *entries):
        for entry in entries:
            self.pools[g]._forget(self.first.tables[g][entry])

    def find(self, prompt, limit=None):
        other = sequence(prompt)
        return self.cache.find(other, len(other.tokens) if limit is None else limit)


def test_a_hit_is_the_longest_run_of_whole_blocks():
    case = Case(group(block_size=4))
    hit = case.find([*range(100, 110), 7, 8, 9])
    assert hit.num_tokens == 8 and hit.blocks == (case.first.tables[0][:2],)
    assert case.find([1, *range(101, 140)]).num_tokens == 0


def test_only_blocks_full_of_computed_tokens_are_recorded():
    pool = BlockPool(9, "full")
    cache = PrefixCache((group(block_size=4),), (pool,))
    first = sequence(range(12))
    first.tables = [[pool.take() for _ in range(3)]]
    cache.record(first, 7)
    assert pool.num_cached == 1
    cache.record(first, 12)
    assert pool.num_cached == 3


def test_a_full_group_stops_at_its_first_gap():
    case = Case(group(block_size=4))
    case.evict(0, 3)
    assert case.find(range(100, 140)).num_tokens == 12


@pytest.mark.parametrize(("window", "needed"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_sliding_group_needs_only_what_the_next_query_sees(window, needed):
    """A query at L sees [L - W + 1, L): with blocks of 4, W - 1 earlier tokens lie in ceil((W - 1) / 4) blocks."""
    case = Case(group(window, block_size=4))
    case.evict(0, *range(10 - needed))
    hit = case.find(range(100, 140))
    assert hit.num_tokens == 40
    assert hit.blocks[0] == [NULL_BLOCK] * (10 - needed) + case.first.tables[0][10 - needed :]
    if needed:
        case.evict(0, 10 - needed)
        assert case.find(range(100, 140)).num_tokens < 40


def test_groups_agree_on_one_length():
    """The full group ends at 24; the sliding one lacks the block before 24, so 20 it is: or 16, where sizes differ."""
    case = Case(group(block_size=4), group(5, block_size=4))
    case.evict(0, 6)
    case.evict(1, 5)
    assert case.find(range(100, 140)).num_tokens == 20
    mixed = Case(group(block_size=4), group(5, block_size=8))
    mixed.evict(0, 6)
    mixed.evict(1, 2)
    hit = mixed.find(range(100, 140))
    assert hit.num_tokens == 16
    assert [len(blocks) for blocks in hit.blocks] == [4, 2]


def test_find_agrees_with_trying_every_length():
    """Brute force over lengths and windows, on cached sets with random gaps."""
    import random

    rng = random.Random(1)
    for _ in range(300):
        groups = [
            group(rng.choice([None, 1, 2, 5, 9, 30]), rng.choice([2, 4, 8]), str(i)) for i in range(rng.choice([1, 2, 3]))
        ]
        case = Case(*groups)
        for g, kv in enumerate(groups):
            case.evict(g, *(e for e in range(40 // kv.block_size) if rng.random() < 0.25))
        limit = rng.randrange(1, 41)
        assert case.find(range(100, 140), limit).num_tokens == longest(case, limit)


def longest(case, limit):
    for length in range(limit, 0, -1):
        if all(
            length % kv.block_size == 0
            and all(
                case.pools[g].key(case.first.tables[g][position // kv.block_size]) is not None
                for position in range(0 if kv.window is None else max(0, length - kv.window + 1), length)
            )
            for g, kv in enumerate(case.groups)
        ):
            return length
    return 0


def test_a_chain_is_hashed_once(monkeypatch):
    """A sequence that grows hashes its new blocks only; a fork hashes nothing of its parent's again."""
    import kvant.kvcache.prefix_cache as module

    calls = []
    monkeypatch.setattr(module, "block_key", lambda *args: calls.append(args) or block_key(*args))
    pool = BlockPool(30, "full")
    cache = PrefixCache((group(block_size=4),), (pool,))
    first = sequence(range(40))
    first.tables = [[pool.take() for _ in range(11)]]
    for num_tokens in range(41):
        cache.record(first, num_tokens)
        cache.find(first, 39)
    assert len(calls) == 11  # the root and ten blocks
    child = sequence(range(40))
    cache.fork(first, child)
    cache.record(first, 40)
    assert cache.find(child, 40).num_tokens == 40 and len(calls) == 11
