"""Decode attention: sequences with one query each. Bytes: every key and value once; nothing else counts.

The G query heads of a key head are the rows of one product (padded to 16), so keys are read once, not G times. The cache of
all sequences is laid end to end, in tiles of TILE keys, and cut into equal parts, whatever the mix of lengths:

    tiles     | sequence 0    | 1  | sequence 2               |        ends = [4, 6, 13]
    parts     |  0    |  1    |  2    |  3    |  4    | 5     |        3 tiles each

A part that holds a whole sequence writes its result. Otherwise it writes its share, (max, sum, sum of values), and whoever
arrives last adds the shares in the order of the parts: no second launch, and the result does not depend on who was last.

    share of a sequence that comes from the part before: number 2 * part;  that begins inside the part: 2 * part + 1

`plan` computes `ends` on the device, once a step for all layers of a group. Sequences with more than one query count as
empty there: they are the prefill kernel's, in the same step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvant.kernels.language import (
    INTERPRETED,
    begins_early,
    let_next_begin,
    power_of_two,
    processors,
    tl,
    triton,
    wait_for_inputs,
)
from kvant.kernels.paged_attention import Paged, Scores, absorbed, product, scored, slots_of


class Cut(NamedTuple):
    """How the work is cut: parts per key head, tiles a part has at least, keys per tile, warps, stages of loads in flight."""

    parts: int
    least: int
    tile: int
    warps: int
    stages: int


class DecodePlan(NamedTuple):
    """One step's cut of one layer group. The counters return to zero by themselves."""

    ends: Tensor  # [S] int32: tiles up to and including each sequence
    arrived: Tensor  # [S, K] int32
    shares: Tensor  # [2 * parts, K, G, H + 2] fp32: sums of values, then max and sum
    cut: Cut


@triton.jit
def first_tile(kv_len, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile that the last query of a sequence sees."""
    if WINDOW:
        return tl.maximum(kv_len - WINDOW, 0) // TILE
    return kv_len * 0


@triton.jit
def _plan_kernel(
    query_start,
    kv_lens,
    ends,
    arrived,
    num_sequences,
    num_counters,
    SEQUENCES: tl.constexpr,  # up to a power of two
    COUNTERS: tl.constexpr,  # up to a power of two
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence = tl.arange(0, SEQUENCES)
    inside = sequence < num_sequences
    kv_len = tl.load(kv_lens + sequence, mask=inside, other=0)
    first = tl.load(query_start + sequence, mask=inside, other=0)
    last = tl.load(query_start + sequence + 1, mask=inside, other=0)
    tiles = (kv_len + TILE - 1) // TILE - first_tile(kv_len, TILE, WINDOW)
    tl.store(ends + sequence, tl.cumsum(tl.where(last - first == 1, tiles, 0), 0), mask=inside)
    counter = tl.arange(0, COUNTERS)
    tl.store(arrived + counter, tl.zeros([COUNTERS], tl.int32), mask=counter < num_counters)


@triton.jit
def merge(
    shares,
    out,
    first_part,
    last_part,
    begins_inside,
    head,
    num_heads,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MEMBERS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Adds one sequence's shares of one key head in the order of the parts, AT_ONCE at a time."""
    member = tl.arange(0, MEMBERS)
    column = tl.arange(0, COLUMNS)
    stride = num_heads * GROUP * (SIZE + 2)
    start = shares + (head * GROUP + member) * (SIZE + 2)
    in_group = (member < GROUP)[None, :]
    best = tl.full([MEMBERS], -1e30, tl.float32)
    weight_sum = tl.zeros([MEMBERS], tl.float32)
    total = tl.zeros([MEMBERS, COLUMNS], tl.float32)
    for part in range(first_part, last_part + 1, AT_ONCE):
        number = part + tl.arange(0, AT_ONCE)
        mask = (number <= last_part)[:, None] & in_group
        number = 2 * number + ((number == first_part) & begins_inside).to(tl.int32)
        share = start[None, :] + number[:, None] * stride  # [parts, heads of the group]
        seen = tl.load(share + SIZE, mask=mask, other=-1e30, cache_modifier=".cg")
        sums = tl.load(share + SIZE + 1, mask=mask, other=0.0, cache_modifier=".cg")
        inside = mask[:, :, None] & (column < SIZE)[None, None, :]
        values = tl.load(share[:, :, None] + column[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(seen, axis=0))
        decay = tl.exp2(best - new_best)
        weight = tl.exp2(seen - new_best[None, :])
        weight_sum = weight_sum * decay + tl.sum(weight * sums, axis=0)
        total = total * decay[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        best = new_best
    target = out + (head * GROUP + member)[:, None] * SIZE + column[None, :]
    mask = (member < GROUP)[:, None] & (column < SIZE)[None, :]
    tl.store(target, (total / weight_sum[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _decode_kernel(
    q,
    keys,
    values,
    out,
    block_table,
    query_start,
    kv_lens,
    ends,
    arrived,
    shares,
    num_sequences,
    scale,
    cap,
    table_stride,
    cache_stride,
    GROUP: tl.constexpr,  # query heads per key head
    ROWS: tl.constexpr,  # GROUP, padded to at least 16
    MEMBERS: tl.constexpr,  # GROUP, up to a power of two
    SIZE: tl.constexpr,  # H
    COLUMNS: tl.constexpr,  # H, up to a power of two
    SEQUENCES: tl.constexpr,  # S, up to a power of two
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: one part of the tiles, one key head."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    part, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    sequence = tl.arange(0, SEQUENCES)
    all_ends = tl.load(ends + sequence, mask=sequence < num_sequences, other=2147483647)
    num_tiles = tl.load(ends + num_sequences - 1)
    part_size = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(0)), LEAST)
    part_begin = part * part_size
    part_end = tl.minimum(part_begin + part_size, num_tiles)
    first_sequence = tl.sum((all_ends <= part_begin).to(tl.int32))
    last_sequence = tl.sum((all_ends < part_end).to(tl.int32))
    if part_begin >= part_end:
        return

    member = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (member < GROUP)[:, None] & (column < SIZE)[None, :]
    for number in range(first_sequence, last_sequence + 1):
        end = tl.load(ends + number)
        begin = tl.load(ends + number - 1, mask=number > 0, other=0)
        low, high = tl.maximum(begin, part_begin), tl.minimum(end, part_end)
        if low < high:
            kv_len = tl.load(kv_lens + number)
            row = tl.load(query_start + number).to(tl.int64)
            place = row * num_heads * GROUP * SIZE + (head * GROUP + member)[:, None] * SIZE + column[None, :]
            query = tl.load(q + place, mask=inside, other=0.0)
            table = block_table + number * table_stride
            best = tl.full([ROWS], -1e30, tl.float32)
            weight_sum = tl.zeros([ROWS], tl.float32)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            shift = first_tile(kv_len, TILE, WINDOW) - begin
            for tile in range(low + shift, high + shift):
                position = tile * TILE + tl.arange(0, TILE)
                visible = position < kv_len
                if WINDOW:
                    visible = visible & (position >= kv_len - WINDOW)
                slot = slots_of(table, position, visible, BLOCK_SIZE)
                source = (slot * cache_stride + head * SIZE)[:, None] + column[None, :]
                mask = visible[:, None]
                if SIZE != COLUMNS:
                    mask = mask & (column < SIZE)[None, :]
                k = tl.load(keys + source, mask=mask, other=0.0)
                v = tl.load(values + source, mask=mask, other=0.0)
                raw = product(query, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32), UPCAST)
                score = tl.where(visible[None, :], scored(raw, scale, cap, CAPPED), float("-inf"))
                best, weight_sum, total = absorbed(v, score, best, weight_sum, total, UPCAST)

            if (low == begin) & (high == end):
                tl.store(out + place, (total / weight_sum[:, None]).to(out.dtype.element_ty), mask=inside)
            else:
                share_number = 2 * part + (low > part_begin).to(tl.int32)
                share = shares + (share_number * num_heads + head) * (GROUP * (SIZE + 2)) + member * (SIZE + 2)
                tl.store(share[:, None] + column[None, :], total, mask=inside)
                tl.store(share + SIZE, best, mask=member < GROUP)
                tl.store(share + SIZE + 1, weight_sum, mask=member < GROUP)
                tl.debug_barrier()  # every thread's part of the share is written before one thread says so
                first_part, last_part = begin // part_size, (end - 1) // part_size
                counter = arrived + number * num_heads + head
                if tl.atomic_add(counter, 1, sem="acq_rel") == last_part - first_part:
                    tl.store(counter, 0)
                    begins_inside = begin > first_part * part_size
                    target = out + row * num_heads * GROUP * SIZE
                    merge(
                        shares,
                        target,
                        first_part,
                        last_part,
                        begins_inside,
                        head,
                        num_heads,
                        GROUP,
                        SIZE,
                        COLUMNS,
                        MEMBERS,
                        AT_ONCE,
                    )


FEW = 4  # sequences up to which a step is short of work


def choose_cut(paged: Paged) -> Cut:
    """Chosen by sweeps on an H200 (docs/kernels.md)."""
    kv_heads, size = paged.keys.shape[1:]
    per_head = processors(paged.q.device) / kv_heads  # parts that give every multiprocessor one
    if size > 128:
        return Cut(max(1, int(2 * per_head)), 2, 64, 4, 3)
    if paged.kv_lens.shape[0] <= FEW:
        # Tiles of 128 in 5 stages gain 3 us on 1 x 32k, but keep the next kernel from beginning early: 4.92 ms against
        # 3.98 for a step of an 8B model at context 200.
        return Cut(max(1, int(3 * per_head)), 1, 64, 4, 3)
    if size <= 64:
        return Cut(max(1, int(2 * per_head)), 2, 128, 4, 5)  # 64 x 2k: 70 us; tiles of 64: 74
    return Cut(max(1, int(3 * per_head)), 2, 32, 4, 5)  # 64 x 8k: 484 us; tiles of 64: 490


def plan(paged: Paged, window: int | None, cut: Cut) -> DecodePlan:
    """Where every part begins, for one step and all layers that share lengths and window.

    Reads `query_start` and `kv_lens` on the device, and waits for nothing; a decoding sequence has at least one key.
    """
    sequences = paged.kv_lens.shape[0]
    heads, size = paged.q.shape[1:]
    kv_heads = paged.keys.shape[1]
    device = paged.kv_lens.device
    ends = torch.empty(sequences, dtype=torch.int32, device=device)
    arrived = torch.empty(sequences * kv_heads, dtype=torch.int32, device=device)
    shares = torch.empty((2 * cut.parts, kv_heads, heads // kv_heads, size + 2), dtype=torch.float32, device=device)
    _plan_kernel[(1,)](
        paged.query_start,
        paged.kv_lens,
        ends,
        arrived,
        sequences,
        sequences * kv_heads,
        SEQUENCES=power_of_two(sequences),
        COUNTERS=power_of_two(sequences * kv_heads),
        TILE=cut.tile,
        WINDOW=window or 0,
        num_warps=4,
    )
    return DecodePlan(ends, arrived, shares, cut)


def paged_decode(paged: Paged, scores: Scores, plan: DecodePlan, out: Tensor) -> None:
    """Writes the rows of `out` [T, N, H] whose sequence has one query. `paged_attention_reference` is its reference."""
    sequences = paged.kv_lens.shape[0]
    heads, size = paged.q.shape[1:]
    kv_heads = paged.keys.shape[1]
    cut = plan.cut
    columns = max(16, power_of_two(size))
    _decode_kernel[(cut.parts, kv_heads)](
        paged.q,
        paged.keys,
        paged.values,
        out,
        paged.block_table,
        paged.query_start,
        paged.kv_lens,
        plan.ends,
        plan.arrived,
        plan.shares,
        sequences,
        scores.scale,
        scores.soft_cap or 1.0,
        paged.block_table.stride(0),
        paged.keys.stride(0),
        GROUP=heads // kv_heads,
        ROWS=max(16, power_of_two(heads // kv_heads)),
        MEMBERS=power_of_two(heads // kv_heads),
        SIZE=size,
        COLUMNS=columns,
        SEQUENCES=power_of_two(sequences),
        TILE=cut.tile,
        LEAST=cut.least,
        BLOCK_SIZE=paged.block_size,
        WINDOW=scores.window or 0,
        CAPPED=scores.soft_cap is not None,
        UPCAST=INTERPRETED,
        AT_ONCE=min(power_of_two(cut.parts), max(2, 4096 // (columns * power_of_two(heads // kv_heads)))),
        EARLY=begins_early(paged.q.device),
        launch_pdl=begins_early(paged.q.device),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
