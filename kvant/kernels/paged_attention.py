"""Attention over keys and values that lie in blocks.

    o_i = sum_j softmax_j(cap(scale * q_i . k_j)) v_j        j from max(0, p_i - W + 1) to p_i

`W` is the window, `cap(s) = c tanh(s / c)` where the layer has one. Position j of sequence s lies in slot
block_table[s, j // B] * B + j % B. Two kernels, each with its file; both read the lengths on the device, so that a launch
depends on the number of sequences and tokens alone and can stand in a CUDA graph:

    paged_decode.py     sequences with one query: bound by reading the cache, cut over the length
    paged_prefill.py    sequences with several: bound by the tensor cores, tiled over the queries

Here: what both read, the reference, and the pieces they share.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvant.kernels.language import tl, triton


class Paged(NamedTuple):
    """Queries and where their keys are."""

    q: Tensor  # [T, N, H]
    keys: Tensor  # [slots, K, H]
    values: Tensor  # [slots, K, H]
    block_table: Tensor  # [S, M] int32
    block_size: int
    query_start: Tensor  # [S + 1] int32
    kv_lens: Tensor  # [S] int32, the new tokens included


class Scores(NamedTuple):
    """What is done to the scores; as `attention.pattern.AttentionRule`."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


def paged_attention_reference(paged: Paged, scores: Scores) -> Tensor:
    """One sequence at a time, in fp32. -> [T, N, H]."""
    out = torch.empty_like(paged.q)
    starts = paged.query_start.tolist()
    for row, kv_len in enumerate(paged.kv_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        positions = torch.arange(kv_len, device=out.device)
        slots = paged.block_table[row, positions // paged.block_size].long() * paged.block_size
        slots += positions % paged.block_size
        distance = (kv_len - last + torch.arange(first, last, device=out.device))[:, None] - positions
        visible = (distance >= 0) if scores.window is None else (distance >= 0) & (distance < scores.window)
        out[first:last] = _one(paged.q[first:last], paged.keys[slots], paged.values[slots], visible, scores)
    return out


def _one(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """`q` [T, N, H], `k`, `v` [L, K, H], `visible` [T, L] -> [T, N, H]."""
    share = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(share, dim=1)  # [L, N, H]
    v = v.float().repeat_interleave(share, dim=1)
    found = torch.einsum("tnh,lnh->ntl", q.float(), k) * scores.scale
    if scores.soft_cap is not None:
        found = torch.tanh(found / scores.soft_cap) * scores.soft_cap
    found = found.masked_fill(~visible, float("-inf"))
    return torch.einsum("ntl,lnh->tnh", found.softmax(-1), v).to(q.dtype)


@triton.jit
def slots_of(table, position, visible, BLOCK_SIZE: tl.constexpr):
    """Slots of `position` of the sequence whose row of the table begins at `table`; 0 where not visible."""
    block = tl.load(table + position // BLOCK_SIZE, mask=visible, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def product(a, b, total, UPCAST: tl.constexpr):
    """total + a b, on the tensor cores. fp32 stays fp32: a cache in fp32 is asked for by whoever wants its digits."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def scored(raw, scale, cap, CAPPED: tl.constexpr):
    """Raw products -> scores times log2(e), since the hardware's exponential is 2^x."""
    if CAPPED:  # c tanh(z) = c (2 sigmoid(2z) - 1)
        return cap * 1.4426950408889634 * (2.0 * tl.sigmoid(raw * (2.0 * scale / cap)) - 1.0)
    return raw * (scale * 1.4426950408889634)


@triton.jit
def absorbed(values, score, best, weight_sum, total, UPCAST: tl.constexpr):
    """One step of the online softmax (Milakov & Gimelshein, 2018): `score` [rows, keys], -inf where hidden, meets `values`
    [keys, H]. `best` is the largest score so far, at least -1e30, so that a row that has seen nothing stays finite."""
    new_best = tl.maximum(best, tl.max(score, axis=1))
    decay = tl.exp2(best - new_best)
    weight = tl.exp2(score - new_best[:, None])
    weight_sum = weight_sum * decay + tl.sum(weight, axis=1)
    total = product(weight.to(values.dtype), values, total * decay[:, None], UPCAST)
    return new_best, weight_sum, total
