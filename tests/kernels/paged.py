"""Paged caches for tests: sequences of given lengths in scattered blocks, every slot that belongs to nobody poisoned."""

import torch

from kvant.kernels.paged_attention import Paged
from tests.kernels.compare import DEVICE, rand


def paged(lengths, heads=4, kv_heads=2, size=16, block_size=16, dtype=torch.float32) -> Paged:
    """`lengths`: (queries, keys) of every sequence."""
    blocks_of = [-(-kv_len // block_size) for _, kv_len in lengths]
    order = (torch.randperm(sum(blocks_of) + 3) + 1).tolist()
    table = torch.zeros(len(lengths), max(blocks_of) + 1, dtype=torch.int32)
    owned = torch.zeros((sum(blocks_of) + 4) * block_size, dtype=torch.bool)
    for row, (_, kv_len) in enumerate(lengths):
        blocks = [order.pop() for _ in range(blocks_of[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        for position in range(kv_len):
            owned[blocks[position // block_size] * block_size + position % block_size] = True
    keys, values = (rand(len(owned), kv_heads, size, dtype=dtype) for _ in range(2))
    keys[~owned.to(DEVICE)] = values[~owned.to(DEVICE)] = float("nan")
    starts = torch.tensor([0] + [queries for queries, _ in lengths]).cumsum(0).to(torch.int32)
    kv_lens = torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32)
    q = rand(int(starts[-1]), heads, size, dtype=dtype)
    return Paged(q, keys, values, table.to(DEVICE), block_size, starts.to(DEVICE), kv_lens.to(DEVICE))
