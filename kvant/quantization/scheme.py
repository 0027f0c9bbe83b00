"""WeightScheme: how a stored weight multiplies. One stored form per weight, chosen when the engine loads.

    StoredTensor (bytes of the file) ──pack──▶ WeightScheme ──product──▶ activations

`unpack()` is every scheme's reference: the fp32 matrix that its `product` stands for. A storage format is a part that is
swapped here, never a flag threaded through layers.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvant.config.formats import StoredTensor
from kvant.config.random_weights import RandomTensor
from kvant.kernels import deferred, ops
from kvant.quantization.gguf import dequantize
from kvant.quantization.random import make


class WeightScheme(Protocol):
    """A matrix [out, in] that can multiply rows from the right: y = x W^T."""

    shape: tuple[int, int]

    def product(self, x: Any, bias: Tensor | None = None) -> Any:
        """`x` [T, in] -> [T, out] in the activation dtype. Either may be deferred (kernels/deferred.py)."""

    def logits(self, x: Tensor) -> Tensor:
        """`x` [R, in] -> [R, out] in fp32."""

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` [T] as activations [T, in]: an embedding look-up."""

    def unpack(self) -> Tensor:
        """The matrix as fp32 [out, in]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where weights go and in which arithmetic. `deterministic`: a row's bits must not depend on the rows beside it."""

    device: str
    dtype: torch.dtype
    deterministic: bool = False


class Dense:
    """The plain form: every value in the activation dtype."""

    def __init__(self, weight: Tensor, deterministic: bool = False):
        self.weight = weight
        self.deterministic = deterministic
        self.shape = (weight.shape[0], weight.shape[1])

    def product(self, x: Any, bias: Tensor | None = None) -> Any:
        return deferred.product(x, self.weight, bias, self.deterministic)

    def logits(self, x: Tensor) -> Tensor:
        if self.deterministic and ops.on_gpu(x):
            return ops.fixed_linear(x, self.weight, dtype=torch.float32)
        return ops.logits(x, self.weight)

    def rows(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.weight)

    def unpack(self) -> Tensor:
        return self.weight.float()


def pack(parts: list[StoredTensor], placement: Placement) -> WeightScheme:
    """One scheme for matrices that share their input, stacked along the rows."""
    weight = torch.cat([to_tensor(part, placement) for part in parts]) if len(parts) > 1 else to_tensor(parts[0], placement)
    return Dense(weight, placement.deterministic)


def to_tensor(stored: StoredTensor, placement: Placement) -> Tensor:
    """The values of `stored`, dequantised exactly in fp32 and then rounded to the placement's dtype."""
    if isinstance(stored, RandomTensor):
        return make(stored, placement.device, placement.dtype)
    if stored.format == "BF16" and placement.dtype == torch.bfloat16:
        values = torch.from_numpy(np.ascontiguousarray(stored.raw).copy()).view(torch.bfloat16).reshape(stored.shape)
        return values.to(placement.device)
    return torch.from_numpy(dequantize(stored)).to(device=placement.device, dtype=placement.dtype)


def exact(stored: StoredTensor, placement: Placement) -> Tensor:
    """The values of `stored` in fp32, for weights that are too small and too sensitive to round."""
    return torch.from_numpy(dequantize(stored)).to(device=placement.device)


def concatenate(parts: list[StoredTensor], placement: Placement) -> Tensor:
    """Vectors (biases) end to end, in the placement's dtype."""
    return torch.cat([to_tensor(part, placement) for part in parts])
