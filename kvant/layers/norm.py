"""RMSNorm as a brick: the weight, its epsilon, and the family's convention (offset 1 for Gemma: stored is w - 1)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvant.kernels import deferred
from kvant.layers.brick import Brick, Shape
from kvant.native.program import Buffer
from kvant.quantization.gguf import dequantize

if TYPE_CHECKING:
    from kvant.config.formats import StoredTensor
    from kvant.quantization.scheme import Placement


class RMSNorm(Brick):
    """Over the last axis: [..., size] -> [..., size] in the activation dtype. For hidden states [T, D], or heads [T, N, H]."""

    weight: Any
    dtype: Any

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        self.size, self.eps, self.offset = size, eps, offset

    def wants(self) -> dict[str, Shape]:
        return {"weight": (self.size,)}

    def load(self, tensors: "Mapping[str, StoredTensor]", placement: "Placement") -> None:
        from kvant.quantization import scheme

        # Norm weights stay fp32: 61 vectors cost nothing, and Gemma's 1 + w would lose digits in bf16.
        self.weight = scheme.exact(tensors["weight"], placement) + self.offset
        self.dtype = placement.dtype

    def forward(self, x: Any) -> Any:
        return deferred.normed(x, self.weight, self.eps, self.dtype)

    def emit(self, x: Buffer) -> Buffer:
        weight = dequantize(self.stored["weight"])
        norm = x.program.rms_norm if x.width == self.size else x.program.head_norm
        return norm(x, weight, self.eps, self.offset)
