"""Random weights for any shape: measurements and tests need a network, not knowledge.

No tensor is ever zero or constant (zeros run faster than weights do, and hide faults), and a name always gives the same
values: their seed is made of the name. Matrices keep the size of what flows through them, so that deep networks stay finite;
norms are near 1 in the family's convention.
"""

import hashlib
import math

from kvant.config.random_weights import RandomTensor
from kvant.errors import UnsupportedError

FORMAT_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NORM_SPREAD = 0.1
BIAS_SPREAD = 0.02
EMBEDDING_SPREAD = 0.05  # tied heads multiply by it again: small, or one token would win every time


class DummyTensors:
    """A source of weights that has every tensor, in whatever shape it is asked for."""

    def __init__(self, dtype: str, norm_offset: float = 0.0, seed: int = 0):
        if dtype not in FORMAT_OF_DTYPE:
            raise UnsupportedError(f"dummy weights in {dtype!r} are not built here; supported: {', '.join(FORMAT_OF_DTYPE)}")
        self._format = FORMAT_OF_DTYPE[dtype]
        self._norm_offset = norm_offset
        self._seed = seed

    def find(self, name: str, shape: tuple[int, ...]) -> RandomTensor:
        """The tensor `name`: uniform values around 0, around 1 - offset for norms."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=4).digest()
        center, spread = self._distribution(name, shape)
        width = spread * math.sqrt(12)  # a uniform value of width w has a deviation of w / sqrt(12)
        return RandomTensor(name, self._format, shape, int.from_bytes(digest, "little"), center, width)

    def names(self) -> set[str]:
        """None: whatever is not asked for is not left over either."""
        return set()

    def _distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Center and standard deviation."""
        if len(shape) == 1:
            return (1.0 - self._norm_offset, NORM_SPREAD) if "norm" in name else (0.0, BIAS_SPREAD)
        if "embed" in name:
            return 0.0, EMBEDDING_SPREAD
        return 0.0, shape[-1] ** -0.5
