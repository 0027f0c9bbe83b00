"""Rotary as a brick: the frequencies of one base and one scaling rule, for every layer that shares them.

head  [ x0 ... x(P-1) | xP ... x(2P-1) | the rest ]       P = D/2 frequencies; D < H where a family turns a part only
        └── pair i: x(i), x(P+i) ──┘     untouched
"""

from typing import Any

import numpy as np

from kvant.config.model import ModelConfig
from kvant.config.rope import RopeScaling
from kvant.kernels import deferred
from kvant.layers.brick import Brick
from kvant.layers.frequencies import frequencies
from kvant.native.program import Buffer
from kvant.native.record import Input


class Rotary(Brick):
    """Turns queries [T, N, H] and keys [T, K, H] by their positions [T] and `frequencies` [P] fp32, 2P <= H.

    `scale` multiplies cosines and sines (the attention factor of yarn and longrope).
    """

    def __init__(self, head_dim: int, frequencies: np.ndarray, scale: float = 1.0):
        self.head_dim = head_dim
        self.frequencies = frequencies  # an array, so that lowering can read it without torch
        self.scale = scale
        self._rotations: dict[Any, Any] = {}  # by device

    def forward(self, q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
        return deferred.turned(q, k, positions, self._rotation(positions.device))

    def _rotation(self, device: Any) -> Any:
        import torch

        from kvant.kernels.rotary import Rotation

        if device not in self._rotations:
            inv_freq = torch.tensor(self.frequencies, dtype=torch.float32, device=device)
            self._rotations[device] = Rotation(inv_freq, self.scale)
        return self._rotations[device]

    def emit(self, q: Buffer, k: Buffer, positions: Input) -> tuple[Buffer, Buffer]:
        program = q.program
        return (
            program.rotary(q, self.head_dim, self.frequencies, self.scale),
            program.rotary(k, self.head_dim, self.frequencies, self.scale),
        )


def rotaries(config: ModelConfig) -> list[Rotary | None]:
    """How each layer turns: sliding layers may have a base of their own, some layers have no positions at all (None).

    Layers that turn alike share one brick.
    """
    everywhere = _rotary(config, config.rope_theta, config.rope_scaling)
    nearby = everywhere
    if config.rope_local_base_freq is not None:
        nearby = _rotary(config, config.rope_local_base_freq, RopeScaling())
    return [
        None if not config.turns(layer) else nearby if config.window(layer) else everywhere
        for layer in range(config.num_hidden_layers)
    ]


def _rotary(config: ModelConfig, base: float, scaling: RopeScaling) -> Rotary:
    context = config.context_length or config.max_position_embeddings
    return Rotary(config.head_dim, frequencies(config.rotary_dim, base, scaling, context), scaling.attention_factor)
