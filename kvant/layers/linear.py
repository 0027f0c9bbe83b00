"""Linear maps y = x W^T (+ b), and those that multiply the same input fused into one matrix.

    QKV      [q_proj; k_proj; v_proj]   one product for the three projections of attention
    GateUp   [gate_proj; up_proj]       one product for both halves of a gated unit

Phi-3's files hold those matrices fused already: `StackedLinear`.

How the matrix is stored and multiplied is its `WeightScheme`'s business.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvant.config.formats import StoredTensor
from kvant.distributed.mesh import Mesh
from kvant.layers.brick import Brick, Shape
from kvant.native.program import Buffer
from kvant.quantization.gguf import dequantize

if TYPE_CHECKING:
    from kvant.quantization.scheme import Placement, WeightScheme


class FusedLinear(Brick):
    """Several matrices of the file that share their input, stacked along the output: [..., in] -> [..., sum of outs]."""

    fused = True
    weight: "WeightScheme"

    def __init__(self, in_features: int, outs: dict[str, int], bias: bool, mesh: Mesh):
        self.in_features = in_features
        self.outs = outs  # name of the part -> rows
        self.mesh = mesh
        self.has_bias = bias
        self.bias: Any = None

    def wants(self) -> dict[str, Shape]:
        wanted: dict[str, Shape] = {}
        for part, rows in self.outs.items():
            prefix = f"{part}." if part else ""
            wanted[f"{prefix}weight"] = (rows, self.in_features)
            if self.has_bias:
                wanted[f"{prefix}bias"] = (rows,)
        return wanted

    def load(self, tensors: "Mapping[str, StoredTensor]", placement: "Placement") -> None:
        from kvant.quantization import scheme

        prefixes = [f"{part}." if part else "" for part in self.outs]
        self.weight = scheme.pack([tensors[f"{prefix}weight"] for prefix in prefixes], placement)
        if self.has_bias:
            self.bias = scheme.concatenate([tensors[f"{prefix}bias"] for prefix in prefixes], placement)

    def forward(self, x: Any) -> Any:
        return self.weight.product(x, self.bias)

    def emit(self, x: Buffer) -> Buffer:
        prefixes = [f"{part}." if part else "" for part in self.outs]
        weights = [self.stored[f"{prefix}weight"] for prefix in prefixes]
        if not self.has_bias:
            return x.program.linear(x, weights)
        biases = [dequantize(self.stored[f"{prefix}bias"]) for prefix in prefixes]
        return x.program.linear(x, weights, bias=[value for bias in biases for value in bias])


class Linear(FusedLinear):
    """One matrix of the file."""

    fused = False

    def __init__(self, in_features: int, out_features: int, bias: bool, mesh: Mesh):
        super().__init__(in_features, {"": out_features}, bias, mesh)


class StackedLinear(FusedLinear):
    """A fused matrix that is one matrix in the file too, its parts stacked in the order of `outs`."""

    fused = False

    def wants(self) -> dict[str, Shape]:
        return {"weight": (sum(self.outs.values()), self.in_features)}

    def load(self, tensors: "Mapping[str, StoredTensor]", placement: "Placement") -> None:
        from kvant.quantization import scheme

        self.weight = scheme.pack([tensors["weight"]], placement)

    def emit(self, x: Buffer) -> Buffer:
        """As parts: only two matrices can become a gate while they are multiplied."""
        weights, first = [], 0
        for part, rows in self.outs.items():
            weights.append(_rows(self.stored["weight"], part, first, first + rows))
            first += rows
        return x.program.linear(x, weights)


def _rows(stored: StoredTensor, part: str, first: int, last: int) -> StoredTensor:
    shape = (last - first, *stored.shape[1:])
    return StoredTensor(f"{stored.name} ({part})", stored.format, shape, stored.raw[first:last])
