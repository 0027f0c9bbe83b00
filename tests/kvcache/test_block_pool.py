import random

import pytest

from kvant.errors import CapacityError
from kvant.kvcache.block_pool import BlockPool
from kvant.types import NULL_BLOCK


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4, "full")
    assert pool.capacity == 3
    assert NULL_BLOCK not in {pool.take() for _ in range(pool.num_free)}
    assert pool.num_free == 0


def test_a_pool_needs_a_block_besides_the_null_block():
    with pytest.raises(CapacityError, match="kv_cache_memory_bytes"):
        BlockPool(1, "full")


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3, "full")
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert (pool.references(block), pool.num_free) == (1, 1)
    pool.release(block)
    assert (pool.references(block), pool.num_free) == (0, 2)


def test_cached_blocks_are_reused_last_and_oldest_first():
    pool = BlockPool(6, "full")
    blocks = [pool.take() for _ in range(5)]
    pool.publish(blocks[1], b"old")
    pool.publish(blocks[0], b"new")
    for block in (blocks[1], blocks[3], blocks[0], blocks[2], blocks[4]):
        pool.release(block)
    taken = [pool.take() for _ in range(5)]
    assert set(taken[:3]) == {blocks[2], blocks[3], blocks[4]}
    assert taken[3:] == [blocks[1], blocks[0]]
    assert pool.num_cached == 0 and pool.lookup(b"old") is None


def test_a_shared_free_block_comes_back_to_life():
    pool = BlockPool(3, "full")
    block = pool.take()
    pool.publish(block, b"key")
    pool.release(block)
    assert pool.lookup(b"key") == block
    pool.share(block)
    assert (pool.references(block), pool.num_free) == (1, 1)
    assert pool.take() != block


def test_using_a_cached_block_makes_it_young_again():
    pool = BlockPool(3, "full")
    first, second = pool.take(), pool.take()
    for block, key in ((first, b"1"), (second, b"2")):
        pool.publish(block, key)
        pool.release(block)
    pool.share(first)
    pool.release(first)
    assert pool.take() == second


def test_of_two_equal_blocks_the_first_is_kept():
    pool = BlockPool(3, "full")
    first, second = pool.take(), pool.take()
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.lookup(b"key") == first and pool.key(second) is None
    pool.check({first: 1, second: 1})


def test_forgetting_spares_what_is_held():
    pool = BlockPool(3, "full")
    held, free = pool.take(), pool.take()
    pool.publish(held, b"held")
    pool.publish(free, b"free")
    pool.release(free)
    pool.forget_free()
    assert pool.lookup(b"held") == held and pool.lookup(b"free") is None


def test_check_notices_a_lost_block():
    pool = BlockPool(3, "full")
    block = pool.take()
    pool.check({block: 1})
    with pytest.raises(AssertionError):
        pool.check({})
    with pytest.raises(AssertionError):
        pool.check({block: 2})


def test_random_use_agrees_with_a_plain_model():
    """The same history kept as a dict of references and a list of cached blocks in order of release."""
    rng = random.Random(0)
    pool = BlockPool(9, "full")
    references: dict[int, int] = {}
    keys: dict[bytes, int] = {}
    released: list[int] = []  # free cached blocks, oldest first
    for number in range(4000):
        action = rng.choice(["take", "take", "share", "release", "publish"])
        if action == "take" and pool.num_free:
            plain = [b for b in range(1, 9) if b not in references and b not in released]
            block = pool.take()
            assert block in plain if plain else block == released[0]
            if block in released:
                released.remove(block)
                keys = {k: b for k, b in keys.items() if b != block}
            references[block] = 1
        elif action == "share" and keys:
            block = pool.lookup(rng.choice(sorted(keys)))
            pool.share(block)
            references[block] = references.get(block, 0) + 1
            released = [b for b in released if b != block]
        elif action == "release" and references:
            block = rng.choice(sorted(references))
            pool.release(block)
            references[block] -= 1
            if not references[block]:
                del references[block]
                if block in keys.values():
                    released.append(block)
        elif action == "publish" and references:
            block = rng.choice(sorted(references))
            pool.publish(block, b"%d" % number)
            if block not in keys.values():
                keys[b"%d" % number] = block
        pool.check(references)
        assert {key: pool.lookup(key) for key in keys} == keys and pool.num_cached == len(keys)
