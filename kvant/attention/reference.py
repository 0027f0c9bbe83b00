"""Attention straight from the formula, one sequence at a time, in fp32: what every other backend is held against.

    o_i = sum_j softmax_j(cap(scale * q_i . k_j)) v_j        j from max(0, p_i - W + 1) to p_i

`W` is the window (a query sees itself and W - 1 keys before it), `cap(s) = c tanh(s / c)` where the layer has one. Keys and
values are gathered from the blocks of the sequence's table.
"""

import torch
from torch import Tensor

from kvant.attention.pattern import AttentionRule
from kvant.attention.storage import KVStorage
from kvant.batch import Batch


class ReferenceAttention:
    """One step's attention over the cache. `batch` holds tensors; the host's copy of it is not needed here."""

    def __init__(self, staged: Batch, batch: Batch, storage: KVStorage):
        self.batch = batch
        self.storage = storage

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """`q` [T, N, H], `k`, `v` [T, K, H] of the new tokens -> [T, N, H]; the cache holds their keys and values then."""
        number, _ = self.storage.place[rule.layer]
        group = self.batch.groups[number]
        self.storage.write(rule.layer, k, v, group.slot_mapping)
        keys, values = self.storage.of_layer(rule.layer)
        size = self.storage.groups[number].block_size
        out = torch.empty_like(q)
        starts = self.batch.query_start.tolist()
        for row, kv_len in enumerate(group.kv_lens.tolist()):
            first, last = starts[row], starts[row + 1]
            positions = torch.arange(kv_len, device=q.device)
            slots = group.block_table[row, positions // size].long() * size + positions % size
            visible = mask(self.batch.positions[first:last], positions, rule.window)
            out[first:last] = _one(q[first:last], keys[slots], values[slots], visible, rule)
        return out


def mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which of the positions `keys` [L] a query at each of the positions `queries` [T] sees: bool [T, L]."""
    distance = queries[:, None] - keys[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _one(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, rule: AttentionRule) -> Tensor:
    """`q` [T, N, H], `k`, `v` [L, K, H], `visible` [T, L] -> [T, N, H]."""
    share = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(share, dim=1)  # [L, N, H]
    v = v.float().repeat_interleave(share, dim=1)
    scores = torch.einsum("tnh,lnh->ntl", q.float(), k) * rule.scale
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("ntl,lnh->tnh", scores.softmax(-1), v).to(q.dtype)
