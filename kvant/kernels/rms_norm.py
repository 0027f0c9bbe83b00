"""RMSNorm (Zhang & Sennrich, 2019): y = x / sqrt(mean(x^2) + eps) * w, the mean over the last axis.

Everything is computed in fp32 and rounded once, to the activation dtype of the layer that follows. The residual stream
itself stays in fp32: in bf16 each of 60 additions would round it anew, which costs more accuracy than all products do.
Families that store w - 1 add the 1 when they load.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`x` [..., D], `weight` [D] fp32 -> [..., D] in `dtype`."""
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps).to(dtype)
