"""Attention straight from the formula: what every other backend is held against.

The formula stands in `kernels/paged_attention.py`, one sequence at a time and in fp32; here it meets the cache.
"""

from typing import Any

from torch import Tensor

from kvant.attention.pattern import AttentionRule
from kvant.attention.storage import KVStorage
from kvant.batch import Batch
from kvant.kernels.deferred import now
from kvant.kernels.paged_attention import Paged, Scores, paged_attention_reference


class ReferenceAttention:
    """One step's attention over the cache. `batch` holds tensors; the host's copy of it is not needed here."""

    def __init__(self, staged: Batch, batch: Batch, storage: KVStorage):
        self.batch = batch
        self.storage = storage

    def attend(self, q: Any, k: Any, v: Tensor, rule: AttentionRule) -> Tensor:
        """`q` [T, N, H], `k`, `v` [T, K, H] of the new tokens -> [T, N, H]; the cache holds their keys and values then."""
        q, k = now(q), now(k)
        number, _ = self.storage.place[rule.layer]
        group = self.batch.groups[number]
        self.storage.write(rule.layer, k, v, group.slot_mapping)
        keys, values = self.storage.of_layer(rule.layer)
        size = self.storage.groups[number].block_size
        paged = Paged(q, keys, values, group.block_table, size, self.batch.query_start, group.kv_lens)
        return paged_attention_reference(paged, Scores(rule.scale, rule.window, rule.soft_cap))
