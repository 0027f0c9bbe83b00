"""Decode attention for a few sequences: bound not by bytes but by the chain of dependent reads, so as much of it as can be
is done while the projection before it still runs.

    before the wait   length, block table, position, angles, the first tile of older keys and values (they are from earlier
                      steps: nobody writes them in a step of decode rows)
    after it          the query heads are normed and turned; tiles; the program with a sequence's last tile norms, turns and
                      stores the new key with its value, and adds it to the sum as one more column

One program: one part of one sequence, one key head. Parts have at least LEAST tiles, since adding shares costs two more trips
to the L2 cache: up to LEAST * TILE keys there is one part and nothing to add. With many sequences every program's own turning
costs more than the launch it saves (64 rows of Qwen3-0.6B: 2.45 ms against 1.64 with `rotary_and_store`).
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
from kvant.kernels.paged_decode import first_tile, merge
from kvant.kernels.rotary import HeadNorms, Rotation, angles, rows_of

FEW = 2  # sequences


class Cut(NamedTuple):
    """Parts per sequence and key head at most, tiles a part has at least, keys per tile, warps, stages of loads in flight."""

    parts: int
    least: int
    tile: int
    warps: int
    stages: int


class Fresh(NamedTuple):
    """New keys and values that are not in the cache yet, neither normed nor turned; the queries are not either."""

    k: Tensor  # [S, K, H]
    v: Tensor  # [S, K, H]
    positions: Tensor  # [S] int64
    slots: Tensor  # [S] int64
    norms: HeadNorms | None
    rotation: Rotation | None


class FewPlan(NamedTuple):
    """One step's room for shares. The counters return to zero by themselves."""

    arrived: Tensor  # [S, K] int32
    shares: Tensor  # [S, 2 * parts, K, G, H + 2] fp32, as paged_decode.py has them; every other one is used
    cut: Cut


@triton.jit
def _column_angles(positions, inv_freq, scale, row, column, TURNING: tl.constexpr, SCALED: tl.constexpr):
    """What every value of a head, and the other member of its pair, are multiplied by when it turns: [1, H] each."""
    pair = tl.where(column < TURNING, column, column - TURNING)
    pair = tl.where(column < 2 * TURNING, pair, TURNING)  # the rest does not turn
    one = tl.arange(0, 1)
    cos, sin = angles(positions + row, inv_freq, scale, one, one == 0, pair, TURNING, SCALED)
    return cos, tl.where(column < TURNING, -1.0, 1.0)[None, :] * sin


@triton.jit
def _turned_heads(
    x, offset, inside, column, weight, eps, cos, sin, SIZE: tl.constexpr, TURNING: tl.constexpr, NORM: tl.constexpr
):
    """Heads at `x + offset`, [rows, H] fp32, normed where asked and turned by `cos`, `sin` [1, H]."""
    partner = tl.where(column < TURNING, column + TURNING, tl.where(column < 2 * TURNING, column - TURNING, column))
    own = tl.load(x + offset[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    other = own
    if TURNING > 0:
        other = tl.load(x + offset[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / SIZE + eps)[:, None]
        own *= scale * tl.load(weight + column, mask=column < SIZE, other=0.0)[None, :]
        other *= scale * tl.load(weight + partner, mask=column < SIZE, other=0.0)[None, :]
    if TURNING > 0:
        own = own * cos + other * sin
    return own


@triton.jit
def _few_kernel(
    q,
    k_new,
    v_new,
    positions,
    inv_freq,
    q_weight,
    k_weight,
    slots,
    keys,
    values,
    out,
    block_table,
    kv_lens,
    arrived,
    shares,
    scale,
    cap,
    eps,
    turn_scale,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    cache_stride,
    GROUP: tl.constexpr,  # query heads per key head
    ROWS: tl.constexpr,  # GROUP, padded to at least 16
    MEMBERS: tl.constexpr,  # GROUP, up to a power of two
    SIZE: tl.constexpr,  # H
    COLUMNS: tl.constexpr,  # H, up to a power of two
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TURNING: tl.constexpr,  # pairs that turn
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts, num_heads = tl.num_programs(0), tl.num_programs(1)
    kv_len = tl.load(kv_lens + row)
    first = first_tile(kv_len, TILE, WINDOW)
    num_tiles = tl.maximum(tl.cdiv(kv_len - 1, TILE) - first, 1)
    part_size = tl.maximum(tl.cdiv(num_tiles, parts), LEAST)
    last_part = (num_tiles - 1) // part_size
    begin = first + part * part_size
    end = tl.minimum(begin + part_size, first + num_tiles)

    member = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (member < GROUP)[:, None] & (column < SIZE)[None, :]
    table = block_table + row * table_stride
    position = begin * TILE + tl.arange(0, TILE)
    visible = (position < kv_len - 1) & (part <= last_part)
    if WINDOW:
        visible = visible & (position >= kv_len - WINDOW)
    source = (slots_of(table, position, visible, BLOCK_SIZE) * cache_stride + head * SIZE)[:, None] + column[None, :]
    mask = visible[:, None] & (column < SIZE)[None, :]
    k = tl.load(keys + source, mask=mask, other=0.0)
    v = tl.load(values + source, mask=mask, other=0.0)
    cos, sin = 1.0, 0.0
    if TURNING > 0:
        cos, sin = _column_angles(positions, inv_freq, turn_scale, row, column, TURNING, SCALED)
    new = tl.load(slots + row) * cache_stride + head * SIZE + column[None, :]
    wait_for_inputs(EARLY)
    if part > last_part:
        return

    offset = row * q_stride + (head * GROUP + member) * SIZE
    query = _turned_heads(q, offset, inside, column, q_weight, eps, cos, sin, SIZE, TURNING, NORM).to(k.dtype)
    best = tl.full([ROWS], -1e30, tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    raw = product(query, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32), UPCAST)
    score = tl.where(visible[None, :], scored(raw, scale, cap, CAPPED), float("-inf"))
    best, weight_sum, total = absorbed(v, score, best, weight_sum, total, UPCAST)
    for tile in range(begin + 1, end):
        position = tile * TILE + tl.arange(0, TILE)
        visible = position < kv_len - 1
        if WINDOW:
            visible = visible & (position >= kv_len - WINDOW)
        source = (slots_of(table, position, visible, BLOCK_SIZE) * cache_stride + head * SIZE)[:, None] + column[None, :]
        mask = visible[:, None] & (column < SIZE)[None, :]
        k = tl.load(keys + source, mask=mask, other=0.0)
        v = tl.load(values + source, mask=mask, other=0.0)
        raw = product(query, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32), UPCAST)
        score = tl.where(visible[None, :], scored(raw, scale, cap, CAPPED), float("-inf"))
        best, weight_sum, total = absorbed(v, score, best, weight_sum, total, UPCAST)

    if part == last_part:
        wide = (column < SIZE)[None, :]
        one = tl.arange(0, 1) + head * SIZE
        fresh = _turned_heads(
            k_new, row * k_stride + one, wide, column, k_weight, eps, cos, sin, SIZE, TURNING, NORM
        ).to(k.dtype)  # what is seen now is what is seen later  # fmt: skip
        value = tl.load(v_new + row * v_stride + head * SIZE + column[None, :], mask=wide, other=0.0)
        tl.store(keys + new, fresh, mask=wide)
        tl.store(values + new, value, mask=wide)
        found = scored(tl.sum(query.to(tl.float32) * fresh.to(tl.float32), axis=1), scale, cap, CAPPED)
        new_best = tl.maximum(best, found)
        decay, share_of_new = tl.exp2(best - new_best), tl.exp2(found - new_best)
        weight_sum = weight_sum * decay + share_of_new
        total = total * decay[:, None] + share_of_new[:, None] * value.to(tl.float32)
        best = new_best

    target = out + row * num_heads * GROUP * SIZE
    if last_part == 0:
        place = (head * GROUP + member)[:, None] * SIZE + column[None, :]
        tl.store(target + place, (total / weight_sum[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        mine = shares + row * (2 * parts * num_heads * GROUP * (SIZE + 2))
        share = mine + (2 * part * num_heads + head) * (GROUP * (SIZE + 2)) + member * (SIZE + 2)
        tl.store(share[:, None] + column[None, :], total, mask=inside)
        tl.store(share + SIZE, best, mask=member < GROUP)
        tl.store(share + SIZE + 1, weight_sum, mask=member < GROUP)
        tl.debug_barrier()  # every thread's part of the share is written before one thread says so
        counter = arrived + row * num_heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == last_part:
            tl.store(counter, 0)
            merge(mine, target, 0, last_part, False, head, num_heads, GROUP, SIZE, COLUMNS, MEMBERS, AT_ONCE)


def choose_cut(paged: Paged) -> Cut:
    """Parts of all sequences and heads together keep the multiprocessors busy; 256 keys are worth no second part."""
    sequences, kv_heads = paged.kv_lens.shape[0], paged.keys.shape[1]
    parts = max(1, 3 * processors(paged.q.device) // (kv_heads * sequences))
    tile = 64 if paged.keys.element_size() * paged.keys.shape[2] <= 256 else 32
    return Cut(parts, 256 // tile, tile, 4, 3)


def plan(paged: Paged, cut: Cut) -> FewPlan:
    """Room for the shares of one step, for all layers that share the number of heads."""
    sequences, device = paged.kv_lens.shape[0], paged.kv_lens.device
    heads, size = paged.q.shape[1:]
    kv_heads = paged.keys.shape[1]
    arrived = torch.zeros(sequences * kv_heads, dtype=torch.int32, device=device)
    shape = (sequences, 2 * cut.parts, kv_heads, heads // kv_heads, size + 2)
    return FewPlan(arrived, torch.empty(shape, dtype=torch.float32, device=device), cut)


def few_decode(paged: Paged, scores: Scores, plan: FewPlan, fresh: Fresh, out: Tensor) -> None:
    """Writes `out` [S, N, H], and the new keys and values to the cache. Every sequence has one query: row s is sequence s.

    `paged.q` is as the projection wrote it, and may, like `fresh`, be a slice of wider rows.
    """
    sequences = paged.kv_lens.shape[0]
    heads, size = paged.q.shape[1:]
    kv_heads = paged.keys.shape[1]
    group = heads // kv_heads
    cut = plan.cut
    columns = max(16, power_of_two(size))
    q, k, v = rows_of(paged.q), rows_of(fresh.k), rows_of(fresh.v)
    norms, rotation = fresh.norms, fresh.rotation
    _few_kernel[(cut.parts, kv_heads, sequences)](
        q,
        k,
        v,
        fresh.positions,
        q if rotation is None else rotation.inv_freq,
        q if norms is None else norms.q,
        q if norms is None else norms.k,
        fresh.slots,
        paged.keys,
        paged.values,
        out,
        paged.block_table,
        paged.kv_lens,
        plan.arrived,
        plan.shares,
        scores.scale,
        scores.soft_cap or 1.0,
        0.0 if norms is None else norms.eps,
        1.0 if rotation is None else rotation.scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        paged.block_table.stride(0),
        paged.keys.stride(0),
        GROUP=group,
        ROWS=max(16, power_of_two(group)),
        MEMBERS=power_of_two(group),
        SIZE=size,
        COLUMNS=columns,
        TILE=cut.tile,
        LEAST=cut.least,
        BLOCK_SIZE=paged.block_size,
        WINDOW=scores.window or 0,
        CAPPED=scores.soft_cap is not None,
        UPCAST=INTERPRETED,
        AT_ONCE=min(power_of_two(cut.parts), max(2, 4096 // (columns * power_of_two(group)))),
        TURNING=0 if rotation is None else rotation.inv_freq.shape[0],
        NORM=norms is not None,
        SCALED=rotation is not None and rotation.scale != 1.0,
        EARLY=begins_early(paged.q.device),
        launch_pdl=begins_early(paged.q.device),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
