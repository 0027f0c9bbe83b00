"""Prefill attention for long chunks: the keys and values of every sequence are first copied out of their blocks, one after
the other, and read from there by the copy engine (TMA), which brings a whole tile with one instruction.

    blocks of the cache ──_gather_kernel──▶ gathered [rows, K * H]    | sequence 0      0 0 | sequence 2   0 |
                                                                       begins at keys_start[s], a multiple of KEYS

Addresses of scattered rows cost the attention kernel more than a third of its time (350 against 490 TFLOP/s at 16k on an
H200); the copy moves 4 L K H bytes twice, which is under 5 % of the attention's time from about 2,000 queries on, and
nothing once per chunk of 8,000. For a few queries paged_prefill.py reads the blocks where they are.

Rows between a sequence's end and the next multiple of KEYS are zero: their probability is 0, and 0 times garbage may be NaN.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.kernels.language import INTERPRETED, cdiv, power_of_two, tl, triton
from kvant.kernels.paged_attention import Paged, Scores, product, slots_of


class Gathered(NamedTuple):
    """One step's places of the gathered keys, for all layers of a group; the copies themselves are made per layer."""

    keys_start: Tensor  # [S + 1] int32: first row of every sequence; no rows for sequences with one query
    first_key: Tensor  # [S] int32: position of the first gathered key, a multiple of KEYS; 0 without a window
    num_rows: int
    most_queries: int


class Tile(NamedTuple):
    """Rows of queries and keys of one tile, warps, stages of loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _gather_kernel(
    keys,
    values,
    gathered_keys,
    gathered_values,
    block_table,
    kv_lens,
    keys_start,
    first_key,
    num_sequences,
    table_stride,
    WIDTH: tl.constexpr,  # K * H
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.arange(0, SEQUENCES)
    starts = tl.load(keys_start + 1 + index, mask=index < num_sequences, other=2147483647)
    sequence = tl.sum((starts <= row).to(tl.int32))
    place = row + tl.arange(0, ROWS)
    position = place - tl.load(keys_start + sequence) + tl.load(first_key + sequence)
    there = position < tl.load(kv_lens + sequence)
    slot = slots_of(block_table + sequence * table_stride, position, there, BLOCK_SIZE)
    inside = (column < WIDTH)[None, :]
    mask = there[:, None] & inside
    source = slot[:, None] * WIDTH + column[None, :]
    target = place.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(gathered_keys + target, tl.load(keys + source, mask=mask, other=0.0), mask=inside)
    tl.store(gathered_values + target, tl.load(values + source, mask=mask, other=0.0), mask=inside)


@triton.jit
def _swept(
    query,
    keys,
    values,
    head,
    shift,
    first_key,
    last_key,
    own,
    best,
    weight_sum,
    total,
    factor,
    cap,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`query` [rows, H] at positions `own` meets the keys from `first_key` to before `last_key`, which lie at row position +
    `shift`. Scores times `factor` are in units of log2, as the hardware's exponential wants them."""
    for first in range(first_key, last_key, KEYS):
        k = keys.load([first + shift, head * SIZE])
        score = product(query, tl.trans(k), tl.zeros([query.shape[0], KEYS], tl.float32), UPCAST)
        if CAPPED:  # c tanh(z) = c (2 sigmoid(2z) - 1); `factor` is 2 scale / c then
            score = cap * (2.0 * tl.sigmoid(score * factor) - 1.0)
            unit = 1.4426950408889634
        else:
            unit = factor
        if MASKED:
            distance = own[:, None] - (first + tl.arange(0, KEYS))[None, :]
            visible = distance >= 0
            if WINDOW:
                visible = visible & (distance < WINDOW)
            score = tl.where(visible, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1) * unit)
        weight = tl.exp2(score * unit - new_best[:, None])
        decay = tl.exp2(best - new_best)
        weight_sum = weight_sum * decay + tl.sum(weight, axis=1)
        v = values.load([first + shift, head * SIZE])
        total = product(weight.to(v.dtype), v, total * decay[:, None], UPCAST)
        best = new_best
    return best, weight_sum, total


@triton.jit
def _attend_kernel(
    q,
    keys,  # descriptor of [rows, K * H], tiles of [KEYS, H]
    values,
    out,
    query_start,
    kv_lens,
    keys_start,
    first_key,
    num_sequences,
    factor,
    cap,
    GROUP: tl.constexpr,  # query heads per key head
    QUERIES: tl.constexpr,  # of one tile
    ROWS: tl.constexpr,  # QUERIES * GROUP, up to a power of two
    SIZE: tl.constexpr,  # H, a power of two
    SEQUENCES: tl.constexpr,  # S, up to a power of two
    KEYS: tl.constexpr,  # of one tile
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program: one tile of queries, one key head. The tiles are numbered as in paged_prefill.py."""
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    num_heads = tl.num_programs(0)
    index = tl.arange(0, SEQUENCES)
    starts = tl.load(query_start + index, mask=index < num_sequences, other=0) // QUERIES + index
    sequence = tl.sum(((starts <= number) & (index < num_sequences)).to(tl.int32)) - 1
    start = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - start
    first_query = (number - (start // QUERIES + sequence)) * QUERIES
    if (first_query >= num_queries) | (num_queries == 1):
        return

    row = tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    mine = first_query + row // GROUP
    valid = (row < QUERIES * GROUP) & (mine < num_queries)
    token = (start + mine).to(tl.int64)
    place = (token * num_heads * GROUP + head * GROUP + row % GROUP)[:, None] * SIZE + column[None, :]
    query = tl.load(q + place, mask=valid[:, None], other=0.0)

    kv_len = tl.load(kv_lens + sequence)
    own = kv_len - num_queries + mine  # positions of the queries
    lowest = kv_len - num_queries + first_query
    end = tl.minimum(lowest + QUERIES, kv_len)
    shift = tl.load(keys_start + sequence) - tl.load(first_key + sequence)
    best = tl.full([ROWS], -1e30, tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, SIZE], tl.float32)
    first = 0
    middle = (lowest + 1) // KEYS * KEYS  # keys before it are seen by every query of the tile
    if WINDOW:
        first = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
        edge = tl.minimum((tl.maximum(lowest + QUERIES - WINDOW, 0) + KEYS - 1) // KEYS * KEYS, end)
        best, weight_sum, total = _swept(
            query, keys, values, head, shift, first, edge, own, best, weight_sum, total, factor, cap,
            SIZE, KEYS, WINDOW, CAPPED, True, UPCAST,
        )  # fmt: skip
        first = tl.maximum(edge, first)
        middle = tl.maximum(middle, first)
    best, weight_sum, total = _swept(
        query, keys, values, head, shift, first, middle, own, best, weight_sum, total, factor, cap,
        SIZE, KEYS, 0, CAPPED, False, UPCAST,
    )  # fmt: skip
    best, weight_sum, total = _swept(
        query, keys, values, head, shift, middle, end, own, best, weight_sum, total, factor, cap,
        SIZE, KEYS, WINDOW, CAPPED, True, UPCAST,
    )  # fmt: skip
    tl.store(out + place, (total / weight_sum[:, None]).to(out.dtype.element_ty), mask=valid[:, None])


def choose_tile(size: int) -> Tile:
    """Chosen by sweeps on an H200 (docs/kernels.md)."""
    if size == 256:
        return Tile(128, 64, 8, 2)  # 1.10 ms for 8,192 queries of 16 heads
    if size == 128:
        return Tile(64, 64, 4, 3)  # 1.12 ms for 32 heads; two programs share a multiprocessor. 128 rows, 8 warps: 1.28
    return Tile(64, 128, 4, 2)  # 0.66 ms for 32 heads of 64


def places(query_start: np.ndarray, kv_lens: np.ndarray, window: int | None, keys: int, device: torch.device) -> Gathered:
    """Lays the sequences with more than one query end to end. `query_start` [S + 1], `kv_lens` [S] on the host."""
    queries = np.diff(query_start)
    several = queries > 1
    first = np.zeros_like(kv_lens)
    if window is not None:
        first = np.maximum(kv_lens - queries - window + 1, 0) // keys * keys
    rows = np.where(several, -(-(kv_lens - first) // keys) * keys, 0)
    start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(rows, out=start[1:])
    packed = torch.from_numpy(np.concatenate((start, first)).astype(np.int32)).to(device, non_blocking=True)
    return Gathered(packed[: len(start)], packed[len(start) :], int(start[-1]), int(queries.max(initial=0)))


def gathered_prefill(paged: Paged, scores: Scores, gathered: Gathered, out: Tensor, tile: Tile | None = None) -> None:
    """Writes the rows of `out` [T, N, H] whose sequence has more than one query. H is a power of two.

    `gathered` was made with the tile's number of keys. `paged_attention_reference` is its reference.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    sequences = paged.kv_lens.shape[0]
    tokens, heads, size = paged.q.shape
    kv_heads = paged.keys.shape[1]
    group = heads // kv_heads
    tile = tile or choose_tile(size)
    rows = max(tile.rows, power_of_two(group))
    queries = rows // group
    width = kv_heads * size
    copied = torch.empty((2, gathered.num_rows, width), dtype=paged.keys.dtype, device=paged.keys.device)
    columns = min(power_of_two(width), 1024)
    _gather_kernel[(gathered.num_rows // 16, cdiv(width, columns))](
        paged.keys,
        paged.values,
        copied[0],
        copied[1],
        paged.block_table,
        paged.kv_lens,
        gathered.keys_start,
        gathered.first_key,
        sequences,
        paged.block_table.stride(0),
        WIDTH=width,
        COLUMNS=columns,
        ROWS=16,
        SEQUENCES=power_of_two(sequences),
        BLOCK_SIZE=paged.block_size,
        num_warps=8,
    )
    factor = 2 * scores.scale / scores.soft_cap if scores.soft_cap is not None else scores.scale * 1.4426950408889634
    _attend_kernel[(kv_heads, tokens // queries + sequences)](
        paged.q,
        TensorDescriptor(copied[0], [gathered.num_rows, width], [width, 1], [tile.keys, size]),
        TensorDescriptor(copied[1], [gathered.num_rows, width], [width, 1], [tile.keys, size]),
        out,
        paged.query_start,
        paged.kv_lens,
        gathered.keys_start,
        gathered.first_key,
        sequences,
        factor,
        scores.soft_cap or 1.0,
        GROUP=group,
        QUERIES=queries,
        ROWS=rows,
        SIZE=size,
        SEQUENCES=power_of_two(sequences),
        KEYS=tile.keys,
        WINDOW=scores.window or 0,
        CAPPED=scores.soft_cap is not None,
        UPCAST=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
