"""Gated units (Shazeer, 2020): y = act(gate) * up. SwiGLU with silu, GEGLU with gelu.

`gate_up` holds both halves side by side, as the fused projection writes them: [gate | up].
"""

import torch.nn.functional as F
from torch import Tensor


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """`gate_up` [T, 2F] -> [T, F]. `activation` is HF's name: silu, gelu (erf), gelu_pytorch_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * up
