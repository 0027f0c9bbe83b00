"""Rotary position embedding (Su et al., 2021), in the "rotate half" layout that Hugging Face checkpoints use.

    pair (x[i], x[i + H/2]) turns by the angle position * inv_freq[i]:
        y[i]       = x[i] cos - x[i + H/2] sin
        y[i + H/2] = x[i + H/2] cos + x[i] sin

Where only the first 2P of H values turn, the pairs are (x[i], x[i + P]) for i < P; the rest stays. cos and sin are multiplied
by the attention factor of yarn and longrope, `scale`. Angles are computed in fp32: in bf16 position 300 and 301 are the same
number.

    rotary_and_store    queries turned; keys turned and written to the cache together with the values, in one launch, with
                        the norm per head that some families put before the turn

        qkv row of token t:  [ q of kv head 0's group | ... | k | v ]  ──▶  q' [T, N, H],  cache[slot of t]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvant.kernels.language import begins_early, cdiv, let_next_begin, on_gpu, power_of_two, tl, triton, wait_for_inputs
from kvant.kernels.rms_norm import rms_norm_reference


class Rotation(NamedTuple):
    """How heads turn: `inv_freq` [P] fp32, radians per position, 2P <= H; `scale` multiplies cosines and sines."""

    inv_freq: Tensor
    scale: float = 1.0


class HeadNorms(NamedTuple):
    """RMSNorm of every query and key head before they turn: weights [H] fp32."""

    q: Tensor
    k: Tensor
    eps: float


def rotary_table(rotation: Rotation, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`positions` [T] -> cos and sin, times the scale, each [T, 1, P] fp32."""
    angles = positions.to(torch.float32)[:, None] * rotation.inv_freq[None, :]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return (cos, sin) if rotation.scale == 1.0 else (cos * rotation.scale, sin * rotation.scale)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, N, H] -> the same shape and dtype, every head turned by its row's angles."""
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotary_and_store_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    if norms is not None:
        q = rms_norm_reference(q, norms.q, norms.eps, q.dtype)
        k = rms_norm_reference(k, norms.k, norms.eps, k.dtype)
    if rotation is None:
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
        return q
    cos, sin = rotary_table(rotation, positions)
    keys.index_copy_(0, slots, apply_rotary(k, cos, sin))
    values.index_copy_(0, slots, v)
    return apply_rotary(q, cos, sin)


@triton.jit
def angles(positions, inv_freq, scale, token, inside, pair, TURNING: tl.constexpr, SCALED: tl.constexpr):
    """cos and sin [tokens, pairs]; 1 and 0 from pair TURNING on.

    The angle is brought into [-pi, pi] first, where the hardware's cos and sin are exact to 1e-6; 2 pi is subtracted in three
    parts, the first with so few digits that its multiples are exact (Cody & Waite)."""
    position = tl.load(positions + token, mask=inside, other=0).to(tl.float32)
    frequency = tl.load(inv_freq + pair, mask=pair < TURNING, other=0.0)
    angle = position[:, None] * frequency[None, :]
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    angle = angle - turns * 6.28125
    angle = angle - turns * 1.9350051879882812e-03
    angle = angle - turns * 3.019916050561733e-07
    cos, sin = tl.cos(angle), tl.sin(angle)
    if SCALED:
        factor = tl.where(pair < TURNING, scale, 1.0)[None, :]
        cos, sin = cos * factor, sin * factor
    return cos, sin


@triton.jit
def _members(pair, HALF: tl.constexpr, TURNING: tl.constexpr):
    """Where the two members of every pair lie in a head. Pairs that do not turn are made of the rest of the head, likewise."""
    if TURNING == HALF:
        return pair, HALF + pair
    else:
        first = pair + tl.where(pair < TURNING, 0, TURNING)
        return first, first + tl.where(pair < TURNING, TURNING, HALF - TURNING)


@triton.jit
def _turned(x, row_offset, inside, pair, weight, eps, cos, sin, HALF: tl.constexpr, TURNING: tl.constexpr, NORM: tl.constexpr):
    """Both members of all pairs of heads at `x + row_offset`, [rows, pairs] fp32, normed where asked and turned."""
    mask = inside[:, None] & (pair < HALF)[None, :]
    one, other = _members(pair, HALF, TURNING)
    first = tl.load(x + row_offset[:, None] + one[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + row_offset[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + one, mask=pair < HALF, other=0.0)[None, :]
        second *= scale * tl.load(weight + other, mask=pair < HALF, other=0.0)[None, :]
    if TURNING == 0:
        return first, second, mask
    else:
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
    scale,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    cache_stride,
    HALF: tl.constexpr,  # H / 2
    TURNING: tl.constexpr,  # P, pairs that turn; 0: none
    PAIRS: tl.constexpr,  # HALF, up to a power of two
    GROUP: tl.constexpr,  # query heads per key head
    TOKENS: tl.constexpr,  # of one program
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: TOKENS tokens, one key head, the query heads that share it."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    head = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    cos, sin = 1.0, 0.0
    if TURNING > 0:
        cos, sin = angles(positions, inv_freq, scale, token, inside, pair, TURNING, SCALED)
    wide = token.to(tl.int64)
    one, other = _members(pair, HALF, TURNING)

    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    target = (slot * cache_stride + head * 2 * HALF)[:, None]
    first, second, mask = _turned(
        k, wide * k_stride + head * 2 * HALF, inside, pair, k_weight, eps, cos, sin, HALF, TURNING, NORM
    )
    tl.store(keys + target + one[None, :], first.to(keys.dtype.element_ty), mask=mask)
    tl.store(keys + target + other[None, :], second.to(keys.dtype.element_ty), mask=mask)

    source = (wide * v_stride + head * 2 * HALF)[:, None] + pair[None, :]
    tl.store(values + target + pair[None, :], tl.load(v + source, mask=mask), mask=mask)
    tl.store(values + target + HALF + pair[None, :], tl.load(v + source + HALF, mask=mask), mask=mask)

    num_heads = tl.num_programs(1) * GROUP
    for member in tl.static_range(GROUP):
        number = (head * GROUP + member) * 2 * HALF
        first, second, mask = _turned(q, wide * q_stride + number, inside, pair, q_weight, eps, cos, sin, HALF, TURNING, NORM)
        place = (wide * num_heads * 2 * HALF + number)[:, None]
        tl.store(out + place + one[None, :], first.to(out.dtype.element_ty), mask=mask)
        tl.store(out + place + other[None, :], second.to(out.dtype.element_ty), mask=mask)


def rotary_and_store_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
    per_program: int | None = None,
) -> Tensor:
    """`per_program`: tokens of one program; how a head's norm is summed depends on it."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    q, k, v = (rows_of(x) for x in (q, k, v))
    per_program = per_program or (1 if tokens <= 64 else 8)
    if tokens == 0:
        return out
    _rotary_and_store_kernel[(cdiv(tokens, per_program), kv_heads)](
        q,
        k,
        v,
        positions,
        positions if rotation is None else rotation.inv_freq,
        slots,
        keys,
        values,
        out,
        q if norms is None else norms.q,
        q if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        1.0 if rotation is None else rotation.scale,
        tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        keys.stride(0),
        HALF=size // 2,
        TURNING=0 if rotation is None else rotation.inv_freq.shape[0],
        PAIRS=power_of_two(size // 2),
        GROUP=heads // kv_heads,
        TOKENS=per_program,
        NORM=norms is not None,
        SCALED=rotation is not None and rotation.scale != 1.0,
        EARLY=begins_early(q.device),
        launch_pdl=begins_early(q.device),
        num_warps=1 if per_program == 1 else 4,
    )
    return out


def rows_of(x: Tensor) -> Tensor:
    """Heads [T, N, H] side by side within a row, as a slice of the fused projection has them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotation: Rotation | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`q` [T, N, H], `k`, `v` [T, K, H], `positions`, `slots` [T] -> normed and turned queries [T, N, H].

    Normed and turned keys, and values, are written to `keys`, `values` [slots, K, H]. Without `rotation` nothing turns.
    """
    run = rotary_and_store_triton if on_gpu(q) else rotary_and_store_reference
    return run(q, k, v, positions, rotation, slots, keys, values, norms)
