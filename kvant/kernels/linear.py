"""y = x W^T for a few rows, where the time is that of reading W once; for many rows cuBLAS is asked.

    bytes 2 N K,  operations 2 M N K:  on an H200 (4.2 TB/s, 700 TFLOP/s) reading is the limit up to M of about 170

    M = 1       one_row.py
    M <= 64     tensor cores, with W as the left operand (y^T = W x^T), so that its rows fill the 64 rows of an instruction
                and x, padded to 16, 32 or 64, costs little.

           K ───────────────▶
        ┌──────────┬──────────┐
      N │ tile 0   │ tile 0   │    split over K: where N / TILE programs would leave multiprocessors idle, a tile's K is cut
      │ │ part 0   │ part 1   │    into parts. Each writes its sums; whoever arrives last adds them in the order of the
      ▼ ├──────────┼──────────┤    parts, so the result does not depend on who that was.
        │ tile 1   │ tile 1   │
        └──────────┴──────────┘

Weights are read once and marked as the first to leave the L2 cache; x stays in it.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.kernels import one_row
from kvant.kernels.gated import gated
from kvant.kernels.language import (
    INTERPRETED,
    begins_early,
    cdiv,
    let_next_begin,
    on_gpu,
    power_of_two,
    processors,
    tl,
    triton,
    wait_for_inputs,
)
from kvant.kernels.rms_norm import rms_norm

MAX_ROWS = 64  # from here on cuBLAS


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@triton.jit
def _part(
    x,
    weight,
    part,
    outs,
    rows,
    num_rows,
    num_outs,
    x_stride,
    SIZE: tl.constexpr,
    PART_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The sums over one part of K, [TILE, ROWS] fp32."""
    step = tl.arange(0, STEP)
    w_start = weight + outs.to(tl.int64)[:, None] * SIZE
    x_start = x + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([TILE, ROWS], tl.float32)
    first = part * PART_SIZE
    for k in range(first, tl.minimum(first + PART_SIZE, SIZE), STEP):
        column = k + step
        w_mask = (outs < num_outs)[:, None]
        x_mask = (rows < num_rows)[:, None]
        if SIZE % STEP:
            w_mask = w_mask & (column < SIZE)[None, :]
            x_mask = x_mask & (column < SIZE)[None, :]
        w = tl.load(w_start + column[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        values = tl.load(x_start + column[None, :], mask=x_mask, other=0.0, eviction_policy="evict_last")
        if UPCAST:
            w, values = w.to(tl.float32), values.to(tl.float32)
        total = tl.dot(w, tl.trans(values), total, input_precision="ieee")
    return total


@triton.jit
def _skinny_kernel(
    x,
    weight,
    bias,
    out,
    partial,  # [tiles, parts, TILE, ROWS] fp32
    arrived,  # [tiles] int32, zero between launches
    num_rows,
    num_outs,
    x_stride,
    SIZE: tl.constexpr,
    PART_SIZE: tl.constexpr,  # of K, per part
    ROWS: tl.constexpr,  # M, padded
    TILE: tl.constexpr,  # outs of one program
    STEP: tl.constexpr,  # of K
    PARTS: tl.constexpr,
    ALONE: tl.constexpr,  # one program takes all parts, one after the other
    BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    tile, part = tl.program_id(0), tl.program_id(1)
    outs = tile * TILE + tl.arange(0, TILE)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = (outs < num_outs)[:, None] & (rows < num_rows)[None, :]
    target = out + rows.to(tl.int64)[None, :] * num_outs + outs[:, None]
    if ALONE:
        total = tl.zeros([TILE, ROWS], tl.float32)
        for number in tl.static_range(PARTS):
            total += _part(
                x, weight, number, outs, rows, num_rows, num_outs, x_stride, SIZE, PART_SIZE, ROWS, TILE, STEP, UPCAST
            )
    else:
        total = _part(x, weight, part, outs, rows, num_rows, num_outs, x_stride, SIZE, PART_SIZE, ROWS, TILE, STEP, UPCAST)
    if ALONE or PARTS == 1:
        if BIAS:
            total += tl.load(bias + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[:, None]
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)
    else:
        cell = tl.arange(0, TILE)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(partial + (tile * PARTS + part) * (TILE * ROWS) + cell, total)
        tl.debug_barrier()  # every thread's sums are written before one thread says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros([TILE, ROWS], tl.float32)
            for number in tl.static_range(PARTS):
                total += tl.load(partial + (tile * PARTS + number) * (TILE * ROWS) + cell, cache_modifier=".cg")
            if BIAS:
                total += tl.load(bias + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[:, None]
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)
            tl.store(arrived + tile, 0)


class Shape(NamedTuple):
    """How `_skinny_kernel` is cut: outs per program, step along K, parts of K, warps, stages of loads in flight."""

    tile: int
    step: int
    parts: int
    warps: int
    stages: int


def skinny_shape(rows: int, outs: int, size: int, processors: int) -> Shape:
    """Chosen by sweeps on an H200 (docs/kernels.md): one program per multiprocessor wants long steps and few of them in
    flight, several want short ones."""
    tiles = cdiv(outs, 64)
    parts = max(1, min(8, processors // tiles, size // 256))
    crowded = tiles * parts > 2 * processors
    if rows <= 16:
        # 4096 x 14336, 8 rows: 30.1 us with steps of 256 and 3 stages, 31.6 with 128 and 3; cuBLAS 31.8.
        return Shape(64, 128, parts, 4, 5) if crowded or size // parts < 1024 else Shape(64, 256, parts, 4, 3)
    return Shape(64, 128, parts, 4, 3 if crowded else 5)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters that every launch leaves at zero. One stream per device may use them at a time."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def skinny_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """`x` [M, K], M <= 64 -> [M, N] in `dtype`, x's where none is given."""
    rows, size = x.shape
    shape = shape or skinny_shape(rows, weight.shape[0], size, processors(x.device))
    part_size = cdiv(cdiv(size, shape.parts), shape.step) * shape.step
    return _launch(x, weight, bias, dtype, shape, part_size, max(16, power_of_two(rows)))


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, shape: Shape, part_size: int, padded: int
) -> Tensor:
    """`padded`: rows of one program; more rows are more programs, which then take all parts of K themselves."""
    rows, size = x.shape
    outs = weight.shape[0]
    tiles, blocks = cdiv(outs, shape.tile), cdiv(rows, padded)
    alone = blocks > 1
    out = torch.empty((rows, outs), dtype=dtype or x.dtype, device=x.device)
    partial = out
    if shape.parts > 1 and not alone:
        partial = torch.empty((tiles * shape.parts * shape.tile * padded,), dtype=torch.float32, device=x.device)
    _skinny_kernel[(tiles, 1 if alone else shape.parts, blocks)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        _arrivals(x.device),
        rows,
        outs,
        x.stride(0),
        SIZE=size,
        PART_SIZE=part_size,
        ROWS=padded,
        TILE=shape.tile,
        STEP=shape.step,
        PARTS=shape.parts,
        ALONE=alone,
        BIAS=bias is not None,
        UPCAST=INTERPRETED,
        EARLY=begins_early(x.device),
        launch_pdl=begins_early(x.device),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """As `linear`, for any number of rows, and every row has the same bits whatever rows are beside it.

    K is cut into the same parts, walked in the same order of tensor-core instructions, and the parts are added in the same
    order, whether programs of their own or one program took them. Only how many rows a program has depends on M: a column of
    an instruction does not see its neighbours.
    """
    rows, size = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.element_size() == 4:  # for checking: one shape for everything
        shape = Shape(32, 32, 1, 4, 2)
        return _launch(x, weight, bias, dtype, shape, cdiv(size, 32) * 32, 16)
    cut = skinny_shape(MAX_ROWS, weight.shape[0], size, processors(x.device))
    part_size = cdiv(cdiv(size, cut.parts), 128) * 128
    if rows <= MAX_ROWS:
        return _launch(x, weight, bias, dtype, cut._replace(step=128), part_size, max(16, power_of_two(rows)))
    shape = Shape(128, 64, cdiv(size, part_size), 8, 3)
    return _launch(x, weight, bias, dtype, shape, part_size, 128)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [T, K], `weight` [N, K], contiguous, `bias` [N] -> [T, N] in x's dtype; sums are fp32 and rounded once."""
    if not _is_skinny(x):
        return linear_reference(x, weight, bias)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return one_row.linear_triton(x, weight, bias) if x.shape[0] == 1 else skinny_triton(x, weight, bias)


def _is_skinny(x: Tensor) -> bool:
    # fp32 products are for checking, and too wide for these tiles.
    return on_gpu(x) and 0 < x.shape[0] <= MAX_ROWS and x.element_size() <= 2


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [R, K], `weight` [V, K] -> [R, V] in fp32, never rounded: equal to `linear` before its rounding."""
    if _is_skinny(x):
        x = x if x.stride(-1) == 1 else x.contiguous()
        if x.shape[0] == 1:
            return one_row.linear_triton(x, weight, dtype=torch.float32)
        return skinny_triton(x, weight, dtype=torch.float32)
    if x.is_cuda and x.element_size() == 2:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear_reference(x, weight).float()


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [T, K] fp32, `norm_weight` [K] fp32, `weight` [N, K], `bias` [N] -> W norm(x) + b, [T, N] in weight's dtype."""
    if on_gpu(x) and x.shape[0] == 1:
        return one_row.norm_linear_triton(x, norm_weight, eps, weight, bias)
    return linear(rms_norm(x, norm_weight, eps, weight.dtype), weight, bias)


def norm_gated_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, activation: str) -> Tensor:
    """`x` [T, K] fp32, `weight` [2F, K], gate above up -> act(G norm(x)) * (U norm(x)), [T, F] in weight's dtype."""
    if on_gpu(x) and x.shape[0] == 1:
        return one_row.norm_gated_linear_triton(x, norm_weight, eps, weight, activation)
    return gated(norm_linear(x, norm_weight, eps, weight), activation)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """`x` [T, K], `weight` [N, K], `residual` [T, N] fp32 -> residual + W x, [T, N] fp32."""
    if on_gpu(x) and x.shape[0] == 1:
        return one_row.linear_add_triton(x, weight, residual)
    return residual + linear(x, weight)
