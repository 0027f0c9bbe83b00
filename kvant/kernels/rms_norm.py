"""RMSNorm (Zhang & Sennrich, 2019): y = x / sqrt(mean(x^2) + eps) * w, the mean over the last axis.

Everything is computed in fp32 and rounded once, to the activation dtype of the layer that follows. The residual stream
itself stays in fp32: in bf16 each of 60 additions would round it anew, which costs more accuracy than all products do.
Families that store w - 1 add the 1 when they load.

    rms_norm        y = norm(x)
    add_rms_norm    s = x + d,  y = norm(s)          the stream moves on and is normalised for what follows, in one pass
                    s = x + norm'(d), y = norm(s)    Gemma's sandwich: what is added is normalised, too

Bytes per row: add_rms_norm moves 4D + 2D in and 4D + 2D out; apart, the addition and the norm move 4D more.
"""

from typing import Any

import torch
from torch import Tensor

from kvant.kernels.language import begins_early, cdiv, let_next_begin, on_gpu, power_of_two, tl, triton, wait_for_inputs


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(dtype)


def add_rms_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, inner: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if inner is not None:
        delta = rms_norm_reference(delta, inner, eps, torch.float32)
    summed = x + delta
    return summed, rms_norm_reference(summed, weight, eps, dtype)


@triton.jit
def _normalise(x, size, eps):
    """`x` [rows, columns] fp32, zero beyond `size` columns."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]


@triton.jit
def _rms_norm_kernel(
    x,
    delta,
    weight,
    inner,
    summed,
    out,
    num_rows,
    num_heads,
    stride_token,
    stride_head,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # SIZE, up to a power of two
    ROWS: tl.constexpr,  # rows of one program
    ADD: tl.constexpr,
    SANDWICH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    token = (row // num_heads).to(tl.int64)
    source = token[:, None] * stride_token + (row % num_heads)[:, None] * stride_head + column[None, :]
    target = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0)
    wait_for_inputs(EARLY)
    values = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(delta + target, mask=inside, other=0.0).to(tl.float32)
        if SANDWICH:
            inner_scale = tl.load(inner + column, mask=column < SIZE, other=0.0)
            added = _normalise(added, SIZE, eps) * inner_scale[None, :]
        values += added
        tl.store(summed + target, values, mask=inside)
    result = _normalise(values, SIZE, eps) * scale[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Reads `x` where it lies: [T, D], or heads [T, N, H] inside a wider row. The last axis must be contiguous."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    view = x if x.dim() == 3 and x.stride(-1) == 1 else x.contiguous().view(-1, 1, x.shape[-1])
    _launch(view, None, weight, None, None, out, eps)
    return out


def add_rms_norm_triton(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, inner: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    summed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    view = x.contiguous().view(-1, 1, x.shape[-1])
    _launch(view, delta.contiguous(), weight, inner, summed, out, eps)
    return summed, out


def _launch(x: Tensor, delta: Any, weight: Tensor, inner: Any, summed: Any, out: Tensor, eps: float) -> None:
    """`x` [T, N, D]; everything else is contiguous."""
    tokens, heads, size = x.shape
    columns = power_of_two(size)
    rows = max(1, 2048 // columns)  # a warp's loads stay full for heads of 64 values
    warps = min(16, max(4, columns // 512))  # 16 values per thread at D = 4,096
    if tokens * heads == 0:
        return
    _rms_norm_kernel[(cdiv(tokens * heads, rows),)](
        x,
        x if delta is None else delta,
        weight,
        weight if inner is None else inner,
        out if summed is None else summed,
        out,
        tokens * heads,
        heads,
        x.stride(0),
        x.stride(1),
        eps,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows,
        ADD=delta is not None,
        SANDWICH=inner is not None,
        EARLY=begins_early(x.device),
        launch_pdl=begins_early(x.device),
        num_warps=warps,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`x` [..., D], `weight` [D] fp32 -> [..., D] in `dtype`."""
    return (rms_norm_triton if on_gpu(x) else rms_norm_reference)(x, weight, eps, dtype)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, inner: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`x` [T, D] fp32, `delta` [T, D], `weight`, `inner` [D] fp32 -> (x + delta [T, D] fp32, its norm [T, D] in `dtype`).

    With `inner`, `delta` is normalised with that weight before it is added.
    """
    return (add_rms_norm_triton if on_gpu(x) else add_rms_norm_reference)(x, delta, weight, eps, dtype, inner)
