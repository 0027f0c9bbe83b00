"""Gated units (Shazeer, 2020): y = act(gate) * up. SwiGLU with silu, GEGLU with gelu.

`gate_up` holds both halves side by side, as the fused projection writes them: [gate | up]. The kernel computes in fp32 and
rounds once; it moves 3F values per row, which is all there is to it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvant.errors import UnsupportedError
from kvant.kernels.language import begins_early, cdiv, let_next_begin, on_gpu, tl, triton, wait_for_inputs

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


def gated_reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * up


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """act(gate), fp32."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        return gate * (0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)))
    else:  # 0.5 (1 + tanh(z)) = sigmoid(2z)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def _gated_kernel(
    gate_up,
    out,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=inside)


def gated_triton(gate_up: Tensor, activation: str) -> Tensor:
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"activation {activation!r} is not built here; there are: {', '.join(ACTIVATIONS)}")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024  # 8 values, 16 bytes, per thread and load
    if rows:
        grid = (rows, cdiv(size, block))
        early = begins_early(gate_up.device)
        _gated_kernel[grid](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=block,
            ACTIVATION=activation,
            EARLY=early,
            launch_pdl=early,
            num_warps=4,
        )
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """`gate_up` [T, 2F] -> [T, F]. `activation` is HF's name: silu, gelu (erf), gelu_pytorch_tanh."""
    return (gated_triton if on_gpu(gate_up) else gated_reference)(gate_up, activation)
