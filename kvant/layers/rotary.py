"""Rotary as a brick: the frequencies of one base and one scaling rule, for every layer that shares them.

`inv_freq[i] = base ** (-2i / H)`, then stretched:

    default   as it is
    linear    inv_freq / factor (positions interpolated; Chen et al., 2023)
    llama3    long wavelengths / factor, short ones kept, a linear blend between (Llama 3.1's published rule)
"""

import math
from typing import Any

from kvant.config.model import RopeScaling
from kvant.kernels import ops
from kvant.layers.brick import Brick
from kvant.native.program import Buffer
from kvant.native.record import Input


class Rotary(Brick):
    """Turns queries [T, N, H] and keys [T, K, H] by their positions [T]."""

    def __init__(self, head_dim: int, base: float, scaling: RopeScaling):
        self.frequencies = frequencies(head_dim, base, scaling)  # H/2 floats; plain Python, so that lowering can read them
        self._inv_freq: dict[Any, Any] = {}

    def forward(self, q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
        if positions.device not in self._inv_freq:
            import torch

            self._inv_freq[positions.device] = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        cos, sin = ops.rotary_table(self._inv_freq[positions.device], positions)
        return ops.apply_rotary(q, cos, sin), ops.apply_rotary(k, cos, sin)

    def emit(self, q: Buffer, k: Buffer, positions: Input) -> tuple[Buffer, Buffer]:
        size = 2 * len(self.frequencies)
        return q.program.rotary(q, size, self.frequencies), k.program.rotary(k, size, self.frequencies)


def frequencies(head_dim: int, base: float, scaling: RopeScaling) -> list[float]:
    """H/2 angles per position, in radians."""
    plain = [base ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if scaling.rope_type == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.rope_type == "llama3":
        return [_llama3(f, scaling) for f in plain]
    return plain


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    """Wavelengths beyond `original / low_freq_factor` are stretched by `factor`, below `original / high_freq_factor` kept."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # how often it turns in the old context
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
