"""Weights, from the file's bytes into the kernels' order: panels of 16 rows, tiles of 32 columns (the picture is in `pack.h`).

Packed once at load, all matrices in one call, by all threads. The bytes stay what they were, except in the K formats, whose
small integer scales become halves (Q4_K: 4.5 -> 5.0 bits per weight, the others in `pack.h`); F32 and F16 become bf16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvant.config.formats import StoredTensor
from kvant.errors import CapacityError, UnsupportedError
from kvant.native import abi
from kvant.native.build import Library

CACHE_LINE = 64


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [rows, columns] as the executor reads it."""

    rows: int
    columns: int
    packing: int
    data: np.ndarray  # uint8, on a cache-line boundary


def pack(library: Library, weights: Sequence[StoredTensor], threads: int) -> list[PackedWeight]:
    """Packs `weights`. Raises `UnsupportedError` for a format that has no kernel, by the tensor's name."""
    for weight in weights:
        if weight.format not in abi.FORMATS:
            raise UnsupportedError(f"{weight.name}: format {weight.format} has no kernel; built are {', '.join(abi.FORMATS)}")
    packings = [library.functions.kvant_packing_of(abi.FORMATS[weight.format]) for weight in weights]
    packed, fits = _pack(library, weights, packings, threads)
    misfits = [i for i, fit in enumerate(fits) if not fit]  # scales beyond half precision: as plain values then
    if misfits:
        again, _ = _pack(library, [weights[i] for i in misfits], [abi.DENSE] * len(misfits), threads)
        for i, weight in zip(misfits, again, strict=True):
            packed[i] = weight
    return packed


def _pack(
    library: Library, weights: Sequence[StoredTensor], packings: list[int], threads: int
) -> tuple[list[PackedWeight], np.ndarray]:
    sources = np.zeros(len(weights), abi.SOURCE)
    raws = [np.ascontiguousarray(weight.raw) for weight in weights]
    packed = []
    for source, weight, raw, packing in zip(sources, weights, raws, packings, strict=True):
        rows, columns = weight.shape
        source["rows"], source["row_bytes"] = abi.address(raw), raw.size // rows
        source["format"], source["num_rows"], source["num_columns"] = abi.FORMATS[weight.format], rows, columns
        size = library.functions.kvant_packed_bytes(packing, rows, columns)
        packed.append(PackedWeight(rows, columns, packing, aligned(size)))
    outs = np.array([abi.address(weight.data) for weight in packed], abi.POINTER)
    kinds = np.array(packings, np.int32)
    fits = np.ones(len(weights), np.uint8)
    arguments = [abi.address(array) for array in (sources, kinds, outs, fits)]
    if library.functions.kvant_pack(*arguments, len(weights), threads):
        raise CapacityError("not enough memory to pack the weights")
    return packed, fits


def aligned(size: int) -> np.ndarray:
    """Uninitialised bytes on a cache-line boundary."""
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -abi.address(memory) % CACHE_LINE
    return memory[start : start + size]
