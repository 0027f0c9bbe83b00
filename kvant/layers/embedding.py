"""Token embedding, and the head that turns hidden states into logits. Tied models use one matrix for both."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvant.distributed.mesh import Mesh
from kvant.kernels import ops
from kvant.layers.brick import Brick, Shape
from kvant.native.program import Buffer
from kvant.native.record import Input

if TYPE_CHECKING:
    from kvant.config.formats import StoredTensor
    from kvant.quantization.scheme import Placement, WeightScheme


class Embedding(Brick):
    """[T] ids -> [T, D] in fp32, where the residual stream begins, times `scale` (Gemma: sqrt(D))."""

    weight: "WeightScheme"

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, scale: float | None = None):
        self.vocab_size, self.hidden_size, self.mesh, self.scale = vocab_size, hidden_size, mesh, scale

    def wants(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.hidden_size)}

    def load(self, tensors: "Mapping[str, StoredTensor]", placement: "Placement") -> None:
        from kvant.quantization import scheme

        self.weight = scheme.pack([tensors["weight"]], placement)

    def forward(self, ids: Any) -> Any:
        x = self.weight.rows(ids).float()
        return x if self.scale is None else x * self.scale

    def emit(self, ids: Input) -> Buffer:
        return ids.program.embedding(self.stored["weight"], self.scale or 1.0)


class Head(Brick):
    """[R, D] -> fp32 logits [R, V]. With `tied`, the embedding's matrix is used and the file needs none of its own."""

    weight: "WeightScheme"

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, tied: Embedding | None, cap: float | None = None):
        self.vocab_size, self.hidden_size, self.mesh, self.cap = vocab_size, hidden_size, mesh, cap
        self._tied = (tied,)  # in a tuple: the embedding is no child of the head

    def wants(self) -> dict[str, Shape]:
        return {} if self._tied[0] is not None else {"weight": (self.vocab_size, self.hidden_size)}

    def load(self, tensors: "Mapping[str, StoredTensor]", placement: "Placement") -> None:
        from kvant.quantization import scheme

        tied = self._tied[0]
        self.weight = tied.weight if tied is not None else scheme.pack([tensors["weight"]], placement)

    def forward(self, x: Any) -> Any:
        logits = self.weight.logits(x)
        return logits if self.cap is None else ops.soft_cap(logits, self.cap)

    def emit(self, x: Buffer) -> None:
        tied = self._tied[0]
        stored = self.stored if tied is None else tied.stored
        x.program.logits([stored["weight"]], self.cap)
