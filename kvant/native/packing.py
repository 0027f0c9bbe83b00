"""Weights, from the file's bytes into the kernels' order: panels of 16 rows, tiles of 32 columns (the picture is in `pack.h`).

Packed at load, many matrices in one call, by all threads. The bytes stay what they were, except in the K formats, whose
small integer scales become halves (Q4_K: 4.5 -> 5.0 bits per weight, the others in `pack.h`); F32 and F16 become bf16.

With a `Shelf` this happens once per model: what was packed is kept in a file, and later starts map it. SmolLM2-135M then loads
in 12 ms instead of 100, and its weights are in memory once, not as the model's file and as a copy. The program is not kept:
recording and lowering take 4 ms.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvant.config.formats import StoredTensor
from kvant.errors import CapacityError, UnsupportedError
from kvant.native import abi
from kvant.native.build import Library

CACHE_LINE = 64
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [rows, columns] as the executor reads it."""

    rows: int
    columns: int
    packing: int
    data: np.ndarray  # uint8, on a cache-line boundary


class Shelf(Protocol):
    """Where packed weights are kept from one start to the next (`checkpoint/kept.py`). Anything that fails says so itself."""

    def read(self, key: str) -> list[Any] | None:
        """(about, data) of every weight kept under `key`, or None."""

    def write(self, key: str, size: int, parts: Iterable[tuple[tuple[int, ...], np.ndarray]]) -> bool:
        """Keeps them; whether that worked."""


def packed(library: Library, weights: Sequence[StoredTensor], threads: int, shelf: Shelf | None) -> list[PackedWeight]:
    """`weights`, packed now or before."""
    if shelf is None:
        return pack(library, weights, threads)
    key = _key(library, weights)
    kept = shelf.read(key)
    if kept is None and shelf.write(key, _packed_bytes(library, weights), _pieces(library, weights, threads)):
        kept = shelf.read(key)
    if kept is None:
        return pack(library, weights, threads)
    return [PackedWeight(*about, data) for about, data in kept]


def _key(library: Library, weights: Sequence[StoredTensor]) -> str:
    """What packing depends on beside the bytes. The library's name is a hash of its source, its compiler and the CPU."""
    shapes = [(weight.name, weight.format, *weight.shape) for weight in weights]
    return hashlib.sha256(repr((library.path.stem, shapes)).encode()).hexdigest()


def _packed_bytes(library: Library, weights: Sequence[StoredTensor]) -> int:
    """About what they take; a known format is checked in `pack`."""
    functions = library.functions
    known = [(abi.FORMATS.get(weight.format, 0), *weight.shape) for weight in weights]
    return sum(functions.kvant_packed_bytes(functions.kvant_packing_of(number), *shape) for number, *shape in known)


def _pieces(
    library: Library, weights: Sequence[StoredTensor], threads: int
) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
    """Packed some at a time, so that only a piece of the model is in memory twice."""
    first = size = 0
    for i, weight in enumerate(weights):
        size += weight.num_bytes
        if size >= PIECE_BYTES or i == len(weights) - 1:
            for done in pack(library, weights[first : i + 1], threads):
                yield (done.rows, done.columns, done.packing), done.data
            first, size = i + 1, 0


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
