"""The KV cache's memory: zeros, of this process alone, and handed out page by page."""

import os

import numpy as np
import pytest

from kvant.config.model import CacheGroup
from kvant.errors import CapacityError
from kvant.native.cache import NativeCache

GROUP = CacheGroup(name="full", layers=tuple(range(30)), window=None, num_kv_heads=3, head_dim=64, block_size=16)


def resident(kind="RssAnon"):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(kind))


def test_one_block_of_every_layer_takes_its_own_size_and_not_more():
    blocks = 3000  # 1.1 GB, if it were touched
    before = resident()
    cache = NativeCache([GROUP], [blocks])
    (array,) = cache.arrays
    assert cache.num_bytes == array.nbytes == blocks * GROUP.block_bytes(2)
    layers = array.reshape(30, -1)
    layers[:, : layers.shape[1] // blocks] = 7
    assert not array[-1] and np.count_nonzero(layers[:, : layers.shape[1] // blocks]) == GROUP.block_bytes(2) // 2
    assert resident() - before < 4 << 20  # with huge pages: 60 MB


@pytest.mark.parametrize("blocks", [1 << 34, 1 << 52])
def test_what_does_not_fit_is_refused(blocks):
    with pytest.raises(CapacityError, match=r"KV cache of \d+ MiB does not fit; lower kv_cache_memory_bytes"):
        NativeCache([GROUP], [blocks])


def test_a_forked_process_writes_into_its_own():
    cache = NativeCache([GROUP], [2])
    child = os.fork()
    if child == 0:
        cache.arrays[0][:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not cache.arrays[0].any()
