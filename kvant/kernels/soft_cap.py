"""Soft cap (Gemma 2): y = cap * tanh(x / cap), which keeps logits inside (-cap, cap) without a kink."""

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Elementwise, any shape."""
    return torch.tanh(x / cap) * cap
