"""Prefill attention: sequences with several queries, after a cached prefix of any length (FlashAttention; Dao et al., 2022).

Operations: 4 T L H N, half of it where queries and keys are the same tokens; the tensor cores are the limit. A tile is ROWS
rows of queries: the G query heads of one key head times ROWS / G neighbouring queries, since they need the same keys.

    keys ─────────────────────────▶              . computed without a mask
    query tile 0   . . . . d                     d computed with one: the diagonal, the window's edge, the end
               1   . . . . . d
               2   . . . . . . d                 tiles run longest first, so that the short ones fill the gaps at the end

The tiles of all sequences are numbered without knowing the lengths on the host: those of sequence s begin at
query_start[s] // QUERIES + s, which is enough room for every sequence; tiles that turn out to be empty leave at once.

`fixed_attention` is the same kernel for all sequences, those with one query too, and with one shape whatever the step: every
query meets its keys in the same tiles, in the same order, and always through the loop with the mask. What a query computes is
its row of each tile, so its bits do not depend on what else is computed.
"""

from typing import NamedTuple

from torch import Tensor

from kvant.kernels.language import INTERPRETED, power_of_two, tl, triton
from kvant.kernels.paged_attention import Paged, Scores, absorbed, product, scored, slots_of


class Tile(NamedTuple):
    """Rows of queries and keys of one tile, warps, stages of loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _swept(
    query,
    keys,
    values,
    table,
    head,
    first_key,
    last_key,
    kv_len,
    own,
    best,
    weight_sum,
    total,
    scale,
    cap,
    cache_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`query` [rows, H] at positions `own` meets the keys from `first_key` to before `last_key`."""
    column = tl.arange(0, COLUMNS)
    for first in range(first_key, last_key, KEYS):
        position = first + tl.arange(0, KEYS)
        there = position < kv_len if MASKED else position >= 0
        slot = slots_of(table, position, there, BLOCK_SIZE)
        source = (slot * cache_stride + head * SIZE)[:, None] + column[None, :]
        if SIZE != COLUMNS:
            mask = there[:, None] & (column < SIZE)[None, :]
            k, v = tl.load(keys + source, mask=mask, other=0.0), tl.load(values + source, mask=mask, other=0.0)
        elif MASKED:
            mask = there[:, None]
            k, v = tl.load(keys + source, mask=mask, other=0.0), tl.load(values + source, mask=mask, other=0.0)
        else:
            k, v = tl.load(keys + source), tl.load(values + source)
        raw = product(query, tl.trans(k), tl.zeros([query.shape[0], KEYS], tl.float32), UPCAST)
        score = scored(raw, scale, cap, CAPPED)
        if MASKED:
            distance = own[:, None] - position[None, :]
            visible = distance >= 0
            if WINDOW:
                visible = visible & (distance < WINDOW)
            score = tl.where(visible, score, float("-inf"))
        best, weight_sum, total = absorbed(v, score, best, weight_sum, total, UPCAST)
    return best, weight_sum, total


@triton.jit
def _prefill_kernel(
    q,
    keys,
    values,
    out,
    block_table,
    query_start,
    kv_lens,
    num_sequences,
    scale,
    cap,
    table_stride,
    cache_stride,
    GROUP: tl.constexpr,  # query heads per key head
    QUERIES: tl.constexpr,  # of one tile
    ROWS: tl.constexpr,  # QUERIES * GROUP, up to a power of two
    SIZE: tl.constexpr,  # H
    COLUMNS: tl.constexpr,  # H, up to a power of two
    SEQUENCES: tl.constexpr,  # S, up to a power of two
    KEYS: tl.constexpr,  # of one tile
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    FIXED: tl.constexpr,  # one loop for all keys, sequences with one query too
):
    """One program: one tile of queries, one key head."""
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    index = tl.arange(0, SEQUENCES)
    starts = tl.load(query_start + index, mask=index < num_sequences, other=0) // QUERIES + index
    sequence = tl.sum(((starts <= number) & (index < num_sequences)).to(tl.int32)) - 1
    start = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - start
    first_query = (number - (start // QUERIES + sequence)) * QUERIES
    if (first_query >= num_queries) | ((num_queries == 1) & (not FIXED)):
        return

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mine = first_query + row // GROUP
    valid = (row < QUERIES * GROUP) & (mine < num_queries)
    token = (start + mine).to(tl.int64)
    place = (token * num_heads * GROUP + head * GROUP + row % GROUP)[:, None] * SIZE + column[None, :]
    inside = valid[:, None] & (column < SIZE)[None, :]
    query = tl.load(q + place, mask=inside, other=0.0)

    kv_len = tl.load(kv_lens + sequence)
    table = block_table + sequence.to(tl.int64) * table_stride
    own = kv_len - num_queries + mine  # positions of the queries
    lowest = kv_len - num_queries + first_query
    end = tl.minimum(lowest + QUERIES, kv_len)
    best = tl.full([ROWS], -1e30, tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first_key = 0
    middle = (lowest + 1) // KEYS * KEYS  # keys before it are seen by every query of the tile
    if WINDOW:
        first_key = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
        middle = first_key
    elif FIXED:
        middle = 0
    else:
        best, weight_sum, total = _swept(
            query, keys, values, table, head, first_key, middle, kv_len, own, best, weight_sum, total, scale, cap,
            cache_stride, SIZE, COLUMNS, KEYS, BLOCK_SIZE, WINDOW, CAPPED, False, UPCAST,
        )  # fmt: skip
    best, weight_sum, total = _swept(
        query, keys, values, table, head, middle, end, kv_len, own, best, weight_sum, total, scale, cap,
        cache_stride, SIZE, COLUMNS, KEYS, BLOCK_SIZE, WINDOW, CAPPED, True, UPCAST,
    )  # fmt: skip
    tl.store(out + place, (total / weight_sum[:, None]).to(out.dtype.element_ty), mask=inside)


def choose_tile(size: int, itemsize: int) -> Tile:
    """Chosen by sweeps on an H200 (docs/kernels.md)."""
    if itemsize == 4:
        return Tile(32, 32, 4, 2)
    if size <= 64:
        return Tile(128, 64, 4, 3)
    if size <= 128:
        return Tile(128, 128, 8, 2)
    return Tile(128, 64, 8, 2)


def fixed_attention(paged: Paged, scores: Scores, out: Tensor) -> None:
    """Writes all rows of `out` [T, N, H]; the bits of each depend on its sequence alone."""
    tile = Tile(16, 32, 4, 2) if paged.q.element_size() == 4 else Tile(64, 64, 4, 3)
    _launch(paged, scores, out, tile, fixed=True)


def paged_prefill(paged: Paged, scores: Scores, out: Tensor, tile: Tile | None = None) -> None:
    """Writes the rows of `out` [T, N, H] whose sequence has more than one query. Reference: `paged_attention_reference`."""
    _launch(paged, scores, out, tile or choose_tile(paged.q.shape[-1], paged.q.element_size()), fixed=False)


def _launch(paged: Paged, scores: Scores, out: Tensor, tile: Tile, fixed: bool) -> None:
    sequences = paged.kv_lens.shape[0]
    tokens, heads, size = paged.q.shape
    kv_heads = paged.keys.shape[1]
    group = heads // kv_heads
    rows = max(tile.rows, power_of_two(group))
    queries = rows // group
    _prefill_kernel[(tokens // queries + sequences, kv_heads)](
        paged.q,
        paged.keys,
        paged.values,
        out,
        paged.block_table,
        paged.query_start,
        paged.kv_lens,
        sequences,
        scores.scale,
        scores.soft_cap or 1.0,
        paged.block_table.stride(0),
        paged.keys.stride(0),
        GROUP=group,
        QUERIES=queries,
        ROWS=rows,
        SIZE=size,
        COLUMNS=max(16, power_of_two(size)),
        SEQUENCES=power_of_two(sequences),
        KEYS=tile.keys,
        BLOCK_SIZE=paged.block_size,
        WINDOW=scores.window or 0,
        CAPPED=scores.soft_cap is not None,
        UPCAST=INTERPRETED,
        FIXED=fixed,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
