"""Rotary position embedding (Su et al., 2021), in the "rotate half" layout that Hugging Face checkpoints use.

    pair (x[i], x[i + H/2]) turns by the angle position * inv_freq[i]:
        y[i]       = x[i] cos - x[i + H/2] sin
        y[i + H/2] = x[i + H/2] cos + x[i] sin

Angles are computed in fp32: in bf16 position 300 and 301 are the same number.
"""

import torch
from torch import Tensor


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
