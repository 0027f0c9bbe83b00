"""Rotary position embedding (Su et al., 2021), in the "rotate half" layout that Hugging Face checkpoints use.

    pair (x[i], x[i + H/2]) turns by the angle position * inv_freq[i]:
        y[i]       = x[i] cos - x[i + H/2] sin
        y[i + H/2] = x[i + H/2] cos + x[i] sin

Angles are computed in fp32: in bf16 position 300 and 301 are the same number.

    rotary_and_store    queries turned; keys turned and written to the cache together with the values, in one launch, with
                        the norm per head that some families put before the turn

        qkv row of token t:  [ q of kv head 0's group | ... | k | v ]  ──▶  q' [T, N, H],  cache[slot of t]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvant.kernels.language import begins_early, cdiv, let_next_begin, on_gpu, power_of_two, tl, triton, wait_for_inputs
from kvant.kernels.rms_norm import rms_norm_reference


class HeadNorms(NamedTuple):
    """RMSNorm of every query and key head before they turn: weights [H] fp32."""

    q: Tensor
    k: Tensor
    eps: float


def rotary_table(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`inv_freq` [H/2] fp32, `positions` [T] -> cos and sin, each [T, 1, H/2] fp32."""
    angles = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, N, H] -> the same shape and dtype, every head turned by its row's angles."""
    half = x.shape[-1] // 2
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_and_store_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    if norms is not None:
        q = rms_norm_reference(q, norms.q, norms.eps, q.dtype)
        k = rms_norm_reference(k, norms.k, norms.eps, k.dtype)
    cos, sin = rotary_table(inv_freq, positions)
    keys.index_copy_(0, slots, apply_rotary(k, cos, sin))
    values.index_copy_(0, slots, v)
    return apply_rotary(q, cos, sin)


@triton.jit
def _angles(positions, inv_freq, token, inside, pair, HALF: tl.constexpr):
    """cos and sin [tokens, pairs]. The angle is brought into [-pi, pi] first, where the hardware's cos and sin are exact to
    1e-6; 2 pi is subtracted in three parts, the first with so few digits that its multiples are exact (Cody & Waite)."""
    position = tl.load(positions + token, mask=inside, other=0).to(tl.float32)
    frequency = tl.load(inv_freq + pair, mask=pair < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    angle = angle - turns * 6.28125
    angle = angle - turns * 1.9350051879882812e-03
    angle = angle - turns * 3.019916050561733e-07
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _turned(x, row_offset, inside, pair, weight, eps, cos, sin, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves of heads at `x + row_offset`, [rows, pairs] fp32, normed where asked and turned."""
    mask = inside[:, None] & (pair < HALF)[None, :]
    first = tl.load(x + row_offset[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + row_offset[:, None] + HALF + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + pair, mask=pair < HALF, other=0.0)[None, :]
        second *= scale * tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin, mask


@triton.jit
def _rotary_and_store_kernel(
    q,
    k,
    v,
    positions,
    inv_freq,
    slots,
    keys,
    values,
    out,
    q_weight,
    k_weight,
    eps,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    cache_stride,
    HALF: tl.constexpr,  # H / 2
    PAIRS: tl.constexpr,  # HALF, up to a power of two
    GROUP: tl.constexpr,  # query heads per key head
    TOKENS: tl.constexpr,  # of one program
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: TOKENS tokens, one key head, the query heads that share it."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    head = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    cos, sin = _angles(positions, inv_freq, token, inside, pair, HALF)
    wide = token.to(tl.int64)

    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    target = slot * cache_stride + head * 2 * HALF
    first, second, mask = _turned(k, wide * k_stride + head * 2 * HALF, inside, pair, k_weight, eps, cos, sin, HALF, NORM)
    tl.store(keys + target[:, None] + pair[None, :], first.to(keys.dtype.element_ty), mask=mask)
    tl.store(keys + target[:, None] + HALF + pair[None, :], second.to(keys.dtype.element_ty), mask=mask)

    source = (wide * v_stride + head * 2 * HALF)[:, None] + pair[None, :]
    tl.store(values + target[:, None] + pair[None, :], tl.load(v + source, mask=mask), mask=mask)
    tl.store(values + target[:, None] + HALF + pair[None, :], tl.load(v + source + HALF, mask=mask), mask=mask)

    num_heads = tl.num_programs(1) * GROUP
    for member in tl.static_range(GROUP):
        number = (head * GROUP + member) * 2 * HALF
        first, second, mask = _turned(q, wide * q_stride + number, inside, pair, q_weight, eps, cos, sin, HALF, NORM)
        place = (wide * num_heads * 2 * HALF + number)[:, None] + pair[None, :]
        tl.store(out + place, first.to(out.dtype.element_ty), mask=mask)
        tl.store(out + place + HALF, second.to(out.dtype.element_ty), mask=mask)


def rotary_and_store_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    q, k, v = (_rows(x) for x in (q, k, v))
    per_program = 1 if tokens <= 64 else 8
    if tokens == 0:
        return out
    _rotary_and_store_kernel[(cdiv(tokens, per_program), kv_heads)](
        q,
        k,
        v,
        positions,
        inv_freq,
        slots,
        keys,
        values,
        out,
        inv_freq if norms is None else norms.q,
        inv_freq if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        keys.stride(0),
        HALF=size // 2,
        PAIRS=power_of_two(size // 2),
        GROUP=heads // kv_heads,
        TOKENS=per_program,
        NORM=norms is not None,
        EARLY=begins_early(q.device),
        launch_pdl=begins_early(q.device),
        num_warps=1 if per_program == 1 else 4,
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """Heads [T, N, H] side by side within a row, as a slice of the fused projection has them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`q` [T, N, H], `k`, `v` [T, K, H], `positions`, `slots` [T], `inv_freq` [H/2] fp32 -> turned queries [T, N, H].

    Turned keys, and values, are written to `keys`, `values` [slots, K, H].
    """
    run = rotary_and_store_triton if on_gpu(q) else rotary_and_store_reference
    return run(q, k, v, positions, inv_freq, slots, keys, values, norms)
