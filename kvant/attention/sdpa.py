"""Attention through torch's fused scaled-dot-product kernels, with the gathering planned once per step on the host.

    decode rows   one query each: gathered together, padded to the longest, one call per layer for all of them. The G query
                  heads that share a key head become G query rows of one head, so keys are read once, not G times.
    chunks        one call per sequence. A chunk that starts a sequence uses the fresh keys and a plain causal mask and
                  touches no block; a later one gathers the keys it can see.

Only keys inside the window are gathered. Soft-capped scores, which the fused kernels do not know, are computed step by step
from the same plan, a block of queries at a time.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvant.attention.pattern import AttentionRule
from kvant.attention.storage import KVStorage
from kvant.batch import Batch, GroupBatch
from kvant.kernels.deferred import now

CAPPED_QUERIES = 256  # whose scores are in memory at once


class DecodePlan(NamedTuple):
    """The rows with one query. Their keys are gathered into [S, L]; positions that a row does not see are masked."""

    rows: Tensor  # [S] rows of the batch
    slots: Tensor  # [S * L] slots to gather
    visible: Tensor  # [S, 1, 1, L] bool


class ChunkPlan(NamedTuple):
    """One sequence's chunk of several queries, rows first to last of the batch."""

    first: int
    last: int
    slots: Tensor | None  # [L] slots to gather; None: the chunk starts the sequence, the fresh keys are all there is
    visible: Tensor | None  # [T, L] bool; None: plainly causal


class GroupPlan(NamedTuple):
    decode: DecodePlan | None
    chunks: list[ChunkPlan]


class SDPAAttention:
    """One step's attention over the cache. `staged` is the batch on the host (numpy), `batch` on the device."""

    def __init__(self, staged: Batch, batch: Batch, storage: KVStorage):
        self.batch = batch
        self.storage = storage
        self.plans = [
            _plan(staged, group, spec.block_size, spec.window, batch.positions.device)
            for group, spec in zip(staged.groups, storage.groups, strict=True)
        ]

    def attend(self, q: Any, k: Any, v: Tensor, rule: AttentionRule) -> Tensor:
        """`q` [T, N, H], `k`, `v` [T, K, H] of the new tokens -> [T, N, H]; the cache holds their keys and values then."""
        q, k = now(q), now(k)
        number, _ = self.storage.place[rule.layer]
        self.storage.write(rule.layer, k, v, self.batch.groups[number].slot_mapping)
        keys, values = self.storage.of_layer(rule.layer)
        plan = self.plans[number]
        if plan.decode is not None and not plan.chunks:
            return _decode(q, keys, values, plan.decode, rule)
        out = torch.empty_like(q)
        if plan.decode is not None:
            out[plan.decode.rows] = _decode(q[plan.decode.rows], keys, values, plan.decode, rule)
        for chunk in plan.chunks:
            rows = slice(chunk.first, chunk.last)
            fresh = chunk.slots is None
            seen_keys = k[rows] if fresh else keys.index_select(0, chunk.slots)
            seen_values = v[rows] if fresh else values.index_select(0, chunk.slots)
            out[rows] = _chunk(q[rows], seen_keys, seen_values, chunk.visible, rule)
        return out


def _decode(q: Tensor, keys: Tensor, values: Tensor, plan: DecodePlan, rule: AttentionRule) -> Tensor:
    """`q` [S, N, H] -> [S, N, H]."""
    count, heads, size = q.shape
    kv_heads = keys.shape[1]
    k = keys.index_select(0, plan.slots).view(count, -1, kv_heads, size).transpose(1, 2)  # [S, K, L, H]
    v = values.index_select(0, plan.slots).view(count, -1, kv_heads, size).transpose(1, 2)
    folded = q.view(count, kv_heads, heads // kv_heads, size)  # [S, K, G, H]
    return _attend(folded, k, v, plan.visible, rule).reshape(count, heads, size)


def _chunk(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, rule: AttentionRule) -> Tensor:
    """`q` [T, N, H], `k`, `v` [L, K, H] -> [T, N, H]."""
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, N, T, H]
    return _attend(q, k, v, visible, rule)[0].transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, rule: AttentionRule) -> Tensor:
    """`q` [S, N, T, H], `k`, `v` [S, N, L, H], `visible` for broadcasting to [S, N, T, L], None: causal -> [S, N, T, H]."""
    if rule.soft_cap is None:
        return sdpa(q, k, v, attn_mask=visible, is_causal=visible is None, scale=rule.scale)
    count = q.shape[2]
    if visible is None:
        visible = torch.ones((count, count), dtype=torch.bool, device=q.device).tril()
    out = torch.empty_like(q)
    for first in range(0, count, CAPPED_QUERIES):
        rows = slice(first, first + CAPPED_QUERIES)
        scores = (q[:, :, rows].float() @ k.float().transpose(-1, -2)) * (rule.scale / rule.soft_cap)
        scores = scores.tanh_().mul_(rule.soft_cap).masked_fill_(~visible[..., rows, :], float("-inf"))
        out[:, :, rows] = scores.softmax(-1).to(v.dtype) @ v
    return out


def _plan(staged: Batch, group: GroupBatch, block_size: int, window: int | None, device: torch.device) -> GroupPlan:
    lengths = np.diff(staged.query_start)
    single = np.flatnonzero(lengths == 1)
    decode = _plan_decode(staged, group, single, block_size, window, device) if single.size else None
    chunks = [_plan_chunk(staged, group, int(row), block_size, window, device) for row in np.flatnonzero(lengths > 1)]
    return GroupPlan(decode, chunks)


def _plan_decode(
    staged: Batch, group: GroupBatch, single: np.ndarray, block_size: int, window: int | None, device: torch.device
) -> DecodePlan:
    kv_lens = group.kv_lens[single].astype(np.int64)
    first_key = np.zeros_like(kv_lens) if window is None else np.maximum(0, kv_lens - window)
    first_block = first_key // block_size
    width = int((-(-kv_lens // block_size) - first_block).max())
    columns = first_block[:, None] + np.arange(width)
    blocks = np.take_along_axis(group.block_table[single], np.minimum(columns, group.block_table.shape[1] - 1), axis=1)
    offsets = np.arange(block_size)
    positions = (columns[:, :, None] * block_size + offsets).reshape(len(single), -1)
    visible = (positions >= first_key[:, None]) & (positions < kv_lens[:, None])
    slots = (blocks[:, :, None].astype(np.int64) * block_size + offsets).reshape(len(single), -1)
    slots = np.where(visible, slots, 0)
    return DecodePlan(
        rows=torch.from_numpy(staged.query_start[single].astype(np.int64)).to(device),
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
        visible=torch.from_numpy(visible[:, None, None, :]).to(device),
    )


def _plan_chunk(
    staged: Batch, group: GroupBatch, row: int, block_size: int, window: int | None, device: torch.device
) -> ChunkPlan:
    first, last = int(staged.query_start[row]), int(staged.query_start[row + 1])
    kv_len = int(group.kv_lens[row])
    start = kv_len - (last - first)  # position of the chunk's first query
    first_key = 0 if window is None else max(0, start - window + 1)
    narrow = window is not None and kv_len > window
    if start == 0 and not narrow:
        return ChunkPlan(first, last, None, None)
    keys = np.arange(first_key, kv_len)
    slots = group.block_table[row, keys // block_size].astype(np.int64) * block_size + keys % block_size
    distance = np.arange(start, kv_len)[:, None] - keys[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    fresh = start == 0
    return ChunkPlan(first, last, None if fresh else torch.from_numpy(slots).to(device), torch.from_numpy(visible).to(device))
