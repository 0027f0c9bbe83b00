"""The words for weights as they lie in a file: a format per tensor, and the tensor that names its bytes without reading them.

A block format packs `block_elements` neighbours of one row into `block_bytes`; plain formats have blocks of one. What the
bytes mean stands in `quantization/gguf.py`; here is only what a reader needs to check sizes and find rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Format(NamedTuple):
    """`block_elements` values take `block_bytes` bytes."""

    block_elements: int
    block_bytes: int


# GGML's block layouts: ggml/src/ggml-common.h in llama.cpp (sizes of block_q4_0 ... block_q6_K, QK_K = 256).
FORMATS: dict[str, Format] = {
    "F64": Format(1, 8),
    "F32": Format(1, 4),
    "F16": Format(1, 2),
    "BF16": Format(1, 2),
    "I64": Format(1, 8),
    "I32": Format(1, 4),
    "I16": Format(1, 2),
    "I8": Format(1, 1),
    "U8": Format(1, 1),
    "BOOL": Format(1, 1),
    "Q4_0": Format(32, 18),
    "Q4_1": Format(32, 20),
    "Q5_0": Format(32, 22),
    "Q5_1": Format(32, 24),
    "Q8_0": Format(32, 34),
    "IQ4_NL": Format(32, 18),
    "Q2_K": Format(256, 84),
    "Q3_K": Format(256, 110),
    "Q4_K": Format(256, 144),
    "Q5_K": Format(256, 176),
    "Q6_K": Format(256, 210),
}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor of a checkpoint, as stored: `raw` is a uint8 view of the mapped file, `[rows, bytes per row]`.

    `shape` is in row-major (HF) order, last axis contiguous: `[out, in]` for a linear's weight. One-dimensional tensors
    have one row.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    raw: "np.ndarray"

    @property
    def num_bytes(self) -> int:
        return int(self.raw.size)


def row_bytes(format: str, row_elements: int) -> int:
    """Bytes of one row; raises ValueError where a row does not hold whole blocks."""
    block = FORMATS[format]
    if row_elements % block.block_elements:
        raise ValueError(f"a row of {row_elements} values does not hold whole {format} blocks of {block.block_elements}")
    return row_elements // block.block_elements * block.block_bytes
