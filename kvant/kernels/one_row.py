"""y = W x for one row: the products of single-stream decoding, with what stands before and after them.

    bytes 2 N K, once; everything else (x, norms, residual) is small and lies in the L2 cache

    norm_linear          W norm(x)                          x is the fp32 residual stream; its RMSNorm costs no launch: the sum
    norm_gated_linear    act(G norm(x)) * (U norm(x))       of squares is taken along with the product, and applied after it
    linear_add           x + W h                            the residual's addition

A bias is a residual of its own: both are one value per row of W.

A program takes ROWS rows of W and multiplies them element by element, every load of a tile in flight at once; the sum along K
comes at the end. The first tile of W is asked for before the kernel waits for its predecessor (programmatic dependent
launch): how much of W that is matters more in a chain of kernels than the time of one alone.
"""

import torch
from torch import Tensor

from kvant.kernels.gated import activated, gated_reference
from kvant.kernels.language import begins_early, cdiv, let_next_begin, power_of_two, tl, triton, wait_for_inputs
from kvant.kernels.rms_norm import rms_norm_reference


def norm_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(rms_norm_reference(x, norm_weight, eps, weight.dtype), weight, bias)


def norm_gated_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, activation: str) -> Tensor:
    return gated_reference(norm_linear_reference(x, norm_weight, eps, weight), activation)


def linear_add_reference(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual + torch.nn.functional.linear(x, weight)


@triton.jit
def _one_row_kernel(
    x,
    weight,
    out,
    norm_weight,
    residual,
    eps,
    num_outs,
    SIZE: tl.constexpr,  # K
    ROWS: tl.constexpr,  # of W, per program (and as many of the other half, with GATE)
    COLUMNS: tl.constexpr,  # of W, per pass
    NORM: tl.constexpr,
    GATE: tl.constexpr,  # activation between the halves of W; "": none
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < num_outs
    start = weight + row.to(tl.int64)[:, None] * SIZE
    other_half = num_outs.to(tl.int64) * SIZE
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for first in tl.static_range(0, SIZE, COLUMNS):
        place = first + column
        mask = inside[:, None]
        if first + COLUMNS > SIZE:
            mask = mask & (place < SIZE)[None, :]
        w = tl.load(start + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if GATE != "":
            w_up = tl.load(start + other_half + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if NORM:
            scale = tl.load(norm_weight + place, mask=place < SIZE, other=0.0, eviction_policy="evict_last")
        if first == 0:
            wait_for_inputs(EARLY)
        values = tl.load(x + place, mask=place < SIZE, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if NORM:
            squares += values * values
            values *= scale
        total += w.to(tl.float32) * values[None, :]
        if GATE != "":
            up += w_up.to(tl.float32) * values[None, :]
    result = tl.sum(total, axis=1)
    if NORM:
        size = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
        result *= size
        if GATE != "":
            result = activated(result, GATE) * tl.sum(up, axis=1) * size
    if ADD:
        result += tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def one_row_shape(size: int, gated: bool) -> tuple[int, int, int]:
    """Rows of W per program, columns per pass, warps. Chosen in chains of all layers of a model on an H200, where they
    overlap, not alone: K = 14,336 gave 3.93 ms a step with 4 rows, 4,096 columns and 8 warps, 3.66 with these."""
    if size > 8192:
        return 2, 2048, 4
    if size <= 1024:
        return 4, power_of_two(size), 4
    columns = min(power_of_two(size), 4096)
    return (2, columns, 4) if gated or size <= 3072 else (4, columns, 8)


def _launch(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    norm: tuple[Tensor, float] | None = None,
    gate: str = "",
    residual: Tensor | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Tensor:
    outs, size = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    out = torch.empty((1, outs), dtype=dtype, device=x.device)
    rows, columns, warps = shape or one_row_shape(size, bool(gate))
    early = begins_early(x.device)
    _one_row_kernel[(cdiv(outs, rows),)](
        x,
        weight,
        out,
        weight if norm is None else norm[0],
        weight if residual is None else residual,
        0.0 if norm is None else norm[1],
        outs,
        SIZE=size,
        ROWS=rows,
        COLUMNS=columns,
        NORM=norm is not None,
        GATE=gate,
        ADD=residual is not None,
        EARLY=early,
        launch_pdl=early,
        num_warps=warps,
    )
    return out


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`x` [1, K], `weight` [N, K], `bias` [N] -> [1, N] in `dtype`, x's where none is given."""
    return _launch(x, weight, dtype or x.dtype, residual=bias)


def norm_linear_triton(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [1, K] fp32, `norm_weight` [K] fp32, `weight` [N, K], `bias` [N] -> [1, N] in weight's dtype."""
    return _launch(x, weight, weight.dtype, norm=(norm_weight, eps), residual=bias)


def norm_gated_linear_triton(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, activation: str) -> Tensor:
    """`x` [1, K] fp32, `weight` [2F, K], gate above up -> [1, F] in weight's dtype."""
    return _launch(x, weight, weight.dtype, norm=(norm_weight, eps), gate=activation)


def linear_add_triton(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """`x` [1, K], `residual` [1, N] fp32 -> residual + W x, [1, N] fp32, rounded nowhere on the way."""
    return _launch(x, weight, torch.float32, residual=residual)
