"""The native KV cache: per layer group one array of halves, in the order in which the attention kernels read it.

    group g:  [layers of g][num_blocks][block_size / 16][K]  x  { keys [H][16 positions], values [16 positions][H] }

Keys are transposed inside 16 positions, so that one register holds one coordinate of 16 keys; saturating fp16 keeps eight
times finer steps than bf16. Block 0 is the null block. Which block belongs to whom is decided in `kvcache/`.
"""

import mmap
from collections.abc import Sequence

import numpy as np

from kvant.config.model import CacheGroup
from kvant.errors import CapacityError, ConfigError

POSITIONS = 16  # of a unit
ITEMSIZE = 2


class NativeCache:
    """Allocated once; never grows. Pages the system has not handed out yet cost nothing."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: Sequence[int]):
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.arrays: list[np.ndarray] = []
        for group, blocks in zip(groups, num_blocks, strict=True):
            if group.block_size % POSITIONS:
                raise ConfigError(
                    f"the native CPU cache needs a block size that is a multiple of 16, not {group.block_size}",
                    param="block_size",
                )
            size = blocks * group.block_bytes(ITEMSIZE)
            try:
                self.arrays.append(np.frombuffer(_zeros(size), np.uint16))
            except (OSError, OverflowError):
                raise CapacityError(f"the KV cache of {size >> 20} MiB does not fit; lower kv_cache_memory_bytes") from None

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def _zeros(size: int) -> mmap.mmap:
    """Zeroed by the system, page by page when it is written: a block read before that must at least be finite.

    Not `np.zeros`, which asks for huge pages: the layers lie far apart, so the first block alone took one of 2 MiB in each
    (30 layers: 60 MB, and 80 ms of the first step). Speeds are the same with small pages, at 4,096 tokens too.
    """
    if hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # private: a forked process has its own
    return mmap.mmap(-1, size)
