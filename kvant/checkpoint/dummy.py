"""Random weights for any shape: measurements and tests need a network, not knowledge.

No tensor is ever zero or constant (zeros run faster than weights do, and hide faults), and a name always gives the same
values: the generator is seeded with the name. Matrices keep the size of what flows through them, so that deep networks
stay finite; norms are near 1 in the family's convention.
"""

import hashlib
import math

import numpy as np

from kvant.config.formats import FORMATS, StoredTensor
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

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor `name`: uniform values around 0, around 1 - offset for norms."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        values = np.random.default_rng(int.from_bytes(digest, "little")).random(shape, np.float32)
        center, spread = self._distribution(name, shape)
        values -= np.float32(0.5)
        values *= np.float32(spread * math.sqrt(12))  # a uniform value of width w has a deviation of w / sqrt(12)
        values += np.float32(center)
        rows, width = math.prod(shape[:-1]), shape[-1] * FORMATS[self._format].block_bytes
        return StoredTensor(name, self._format, shape, _encode(values, self._format).reshape(rows, width))

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


def _encode(values: np.ndarray, format: str) -> np.ndarray:
    """fp32 -> the bytes of `format`, rounded to nearest even."""
    if format == "F32":
        return values.view(np.uint8)
    if format == "F16":
        return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.ascontiguousarray((bits >> np.uint32(16)).astype(np.uint16)).view(np.uint8)
