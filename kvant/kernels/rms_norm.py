"""RMSNorm (Zhang & Sennrich, 2019): y = x / sqrt(mean(x^2) + eps) * (w + offset), the mean over the last axis.

The square and the mean are taken in fp32 whatever x is: in bf16 the sum over 576 squares would keep two digits. Llama
rounds x / rms to the activation dtype *before* the weight, Gemma (offset 1) after it; `round_first` keeps each family's
own order, which shows in bf16 only.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = True) -> Tensor:
    """`x` [..., D] and `weight` [D] (fp32 or x's dtype) -> [..., D] in x's dtype."""
    if offset == 0.0 and (round_first is False or x.dtype == torch.float32):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        return normed.to(x.dtype) * (weight + offset).to(x.dtype)
    return (normed * (weight.float() + offset)).to(x.dtype)
