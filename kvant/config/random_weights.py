"""Random weights by recipe: a tensor whose values follow from a seed and their index, so that every device can make its own.

    h     = mix(index * GOLDEN + seed)              32 bits: the finaliser of MurmurHash3 (Appleby, 2008)
    value = center + width * (h / 2^32 - 1/2)       fp32, from the upper 24 bits of h; then rounded to the stored format

16 GB of weights made on a CPU and carried to a GPU take half a minute; made there, a quarter of a second. The torch twin
of `values` is `quantization/random.py`; both give the same bits.
"""

from typing import TYPE_CHECKING

from kvant.config.formats import FORMATS, StoredTensor

if TYPE_CHECKING:
    import numpy as np

GOLDEN = 0x9E3779B1
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0x85EBCA6B, 0xC2B2AE35
CHUNK = 1 << 16  # values made at a time: they stay in the second-level cache


class RandomTensor(StoredTensor):
    """A StoredTensor of F32, F16 or BF16 whose `raw` is made anew whenever it is asked for."""

    __slots__ = ("center", "seed", "width")
    seed: int
    center: float
    width: float  # of the interval around `center`

    def __init__(self, name: str, format: str, shape: tuple[int, ...], seed: int, center: float, width: float):
        fields = {"name": name, "format": format, "shape": shape, "seed": seed, "center": center, "width": width}
        for key, value in fields.items():
            object.__setattr__(self, key, value)

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_values * FORMATS[self.format].block_bytes

    @property
    def raw(self) -> "np.ndarray":
        """uint8 [rows, bytes per row]."""
        import numpy as np

        size = FORMATS[self.format].block_bytes
        out = np.empty(self.num_values * size, np.uint8)
        for first in range(0, self.num_values, CHUNK):
            last = min(first + CHUNK, self.num_values)
            out[first * size : last * size] = _encode(self.values(first, last), self.format)
        width = self.shape[-1] * size
        return out.reshape(-1, width)

    def values(self, first: int, last: int) -> "np.ndarray":
        """fp32 values number `first` ... `last` - 1."""
        import numpy as np

        h = np.arange(first, last, dtype=np.uint32)
        h *= np.uint32(GOLDEN)
        h += np.uint32(self.seed)
        h ^= h >> np.uint32(16)
        h *= np.uint32(FIRST_MULTIPLIER)
        h ^= h >> np.uint32(13)
        h *= np.uint32(SECOND_MULTIPLIER)
        h ^= h >> np.uint32(16)
        h >>= np.uint32(8)
        values = h.astype(np.float32)
        values *= np.float32(2**-24)
        values -= np.float32(0.5)
        values *= np.float32(self.width)
        values += np.float32(self.center)
        return values


def _encode(values: "np.ndarray", format: str) -> "np.ndarray":
    """fp32 -> the bytes of `format`, rounded to nearest even."""
    import numpy as np

    if format == "F32":
        return values.view(np.uint8)
    if format == "F16":
        return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.ascontiguousarray((bits >> np.uint32(16)).astype(np.uint16)).view(np.uint8)
