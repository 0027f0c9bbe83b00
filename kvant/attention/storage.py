"""The cache tensors: keys and values of every layer group, by slot.

    group g:  keys, values  [layers of g][num_blocks * block_size, K, H]
    slot = block * block_size + offset; block 0 is the null block, which padding may overwrite

Who owns which block is decided in `kvcache/`; here are only bytes.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvant.config.model import CacheGroup


class KVStorage:
    """Keys and values of all groups. Allocated once; never grows."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], dtype: torch.dtype, device: str):
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.place: dict[int, tuple[int, int]] = {}  # layer -> (group, position inside the group)
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []
        for number, (group, blocks) in enumerate(zip(groups, num_blocks, strict=True)):
            shape = (blocks * group.block_size, group.num_kv_heads, group.head_dim)
            self.keys.append([_zeros(shape, dtype, device) for _ in group.layers])
            self.values.append([_zeros(shape, dtype, device) for _ in group.layers])
            for position, layer in enumerate(group.layers):
                self.place[layer] = (number, position)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores `keys` and `values` [T, K, H] of one layer at `slots` [T]."""
        group, position = self.place[layer]
        self.keys[group][position].index_copy_(0, slots, keys)
        self.values[group][position].index_copy_(0, slots, values)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, K, H] each."""
        group, position = self.place[layer]
        return self.keys[group][position], self.values[group][position]

    def copy_blocks(self, group: int, copies: Tensor) -> None:
        """Copies whole blocks, `copies` [C, 2] of (source, target), in every layer of `group`. Runs before the forward pass."""
        size = self.groups[group].block_size
        for tensor in self.keys[group] + self.values[group]:
            blocks = tensor.view(-1, size, *tensor.shape[1:])
            blocks[copies[:, 1]] = blocks[copies[:, 0]]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for group in (*self.keys, *self.values) for t in group)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeroed: masked positions of a padded gather are multiplied by a probability of 0, and 0 * NaN is NaN.

    On a CPU the memory comes from numpy, whose zeros are pages that the system hands out when they are first written:
    4 GiB cost nothing at start-up, where torch would touch them all.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
