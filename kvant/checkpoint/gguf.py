"""Reads the head of a GGUF file (versions 2 and 3) and maps its tensors into memory; no value is touched.

    "GGUF" version num_tensors num_keys │ key type value ... │ name dims type offset ... │ padding │ tensor data ...
    └────────────── 24 bytes ──────────┘ └─── metadata ────┘ └──── tensor infos ───────┘           └ data_start, aligned

Written for speed in plain Python: what is long in a real file are a few arrays of strings (262,144 tokens in Gemma's), and
one tight loop over them takes 0.1 s. The other idea is distrust: every count and length is compared with the bytes that
are left before anything is built from it, so a lying header costs neither time nor memory. Specification:
github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvant.checkpoint.mapped import map_file
from kvant.config.formats import FORMATS, StoredTensor, row_bytes
from kvant.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_NAME = 1024  # bytes; ggml itself takes 63 for a tensor, and no key in use comes near
MAX_ARRAY = 1 << 20  # four times Gemma's vocabulary; more would only be there to cost time and memory
MIN_KEY_BYTES = 8 + 4 + 1  # a key's length, its type, the smallest value
MIN_INFO_BYTES = 8 + 4 + 8 + 4 + 8  # a tensor's name length, dimension count, one dimension, type, offset

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# enum ggml_type. Only those that `FORMATS` knows can be read; the others are here to be named.
TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
SUPPORTED = tuple(sorted(name for name in TENSOR_TYPES.values() if name in FORMATS))


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """What a file says: its metadata (plain Python values, arrays as lists) and its tensors by the file's own names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads the head of `path` and maps the rest.

    Raises `CheckpointError` for a file that is malformed or cut off, `UnsupportedError` for a tensor type or version that
    is not built here.
    """
    data = map_file(path)
    cursor = _Cursor(data, path.name)
    try:
        return _read(path, data, cursor)
    except struct.error:
        raise cursor.malformed("it ends inside its header; the download is probably incomplete") from None
    except UnicodeDecodeError:
        raise cursor.malformed("its header holds text that is not UTF-8") from None


class _Cursor:
    """A place in the file's head that moves on as values are read."""

    def __init__(self, data: mmap.mmap, name: str):
        self.data, self.name, self.position, self.size = data, name, 0, len(data)

    def malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.name} is not a valid GGUF file: {what[:300]}")  # names may be long, and of any kind

    def need(self, count: int, each: int, what: str) -> None:
        """Refuses `count` items of at least `each` bytes where fewer bytes are left."""
        if count * each > self.size - self.position:
            raise self.malformed(f"it claims {count} {what}, more than the rest of its {self.size} bytes can hold")

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self, limit: int | None = None) -> str:
        length = self.number("Q")
        if limit is not None and length > limit:
            raise self.malformed(f"a name is {length} bytes long")
        self.need(length, 1, "bytes of text")
        start, self.position = self.position, self.position + length
        return str(self.data[start : self.position], "utf-8")

    def strings(self, count: int) -> list[str]:
        """`count` strings in a row. The hot loop of the reader: 0.3 µs per string, hence local names and no method calls."""
        self.need(count, 8, "strings")
        data, position, size = self.data, self.position, self.size
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, position)
            position += 8
            end = position + length
            if end > size:
                raise self.malformed(f"a text of {length} bytes reaches beyond its end")
            strings.append(str(data[position:end], "utf-8"))
            position = end
        self.position = position
        return strings


def _read(path: Path, data: mmap.mmap, cursor: _Cursor) -> GGUFFile:
    num_tensors, num_keys = _counts(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string(MAX_NAME)
        if key in metadata:
            raise cursor.malformed(f"the key {key!r} occurs twice")
        metadata[key] = _value(cursor, cursor.number("I"), key)
    cursor.need(num_tensors, MIN_INFO_BYTES, "tensors")
    infos = [_info(cursor) for _ in range(num_tensors)]
    alignment = _alignment(metadata, cursor)
    start = -(-cursor.position // alignment) * alignment
    return GGUFFile(path, metadata, _map_tensors(data, infos, start, alignment, cursor.malformed))


def _counts(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != MAGIC:
        raise cursor.malformed("it does not begin with the letters GGUF")
    cursor.position = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "a big-endian file" if swapped else f"version {version}"
        raise UnsupportedError(f"{cursor.name} is GGUF, but {kind}; versions 2 and 3, little-endian, can be read")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    cursor.need(num_tensors, MIN_INFO_BYTES, "tensors")
    cursor.need(num_keys, MIN_KEY_BYTES, "metadata keys")
    return num_tensors, num_keys


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == STRING:
        return cursor.string()
    if kind != ARRAY:
        return _scalar(cursor, kind, key)
    kind, count = cursor.number("I"), cursor.number("Q")
    if count > MAX_ARRAY:
        raise cursor.malformed(f"{key!r} claims {count} entries; at most {MAX_ARRAY} are accepted")
    if kind == STRING:
        return cursor.strings(count)
    if kind not in SCALARS:
        raise cursor.malformed(f"{key!r} is an array of the unknown or nested type {kind}")
    code = SCALARS[kind]
    cursor.need(count, struct.calcsize("<" + code), f"entries in {key!r}")
    values = list(struct.unpack_from(f"<{count}{code}", cursor.data, cursor.position))
    cursor.position += count * struct.calcsize("<" + code)
    return values


def _scalar(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind not in SCALARS:
        raise cursor.malformed(f"{key!r} has the unknown value type {kind}")
    return cursor.number(SCALARS[kind])


def _alignment(metadata: dict[str, Any], cursor: _Cursor) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.malformed(f"general.alignment is {str(alignment)[:20]!r}, not a power of two from 8 up")
    return int(alignment)


@dataclass(frozen=True, slots=True)
class _Info:
    """A tensor as its entry describes it; `shape` is already in row-major order."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int  # from the start of the data section


def _info(cursor: _Cursor) -> _Info:
    name = cursor.string(MAX_NAME)
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.malformed(f"tensor {name!r} has {num_dimensions} dimensions")
    # GGUF writes the fastest axis first; row-major order is the reverse.
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    kind, offset = cursor.number("I"), cursor.number("Q")
    if 0 in shape:
        raise cursor.malformed(f"tensor {name!r} has a dimension of 0")
    if kind not in TENSOR_TYPES:
        raise cursor.malformed(f"tensor {name!r} has the unknown type {kind}")
    if TENSOR_TYPES[kind] not in FORMATS:
        raise UnsupportedError(
            f"{cursor.name}: tensor {name[:80]!r} is stored as {TENSOR_TYPES[kind]}, which is not built here; "
            f"supported: {', '.join(SUPPORTED)} (see docs/models.md)"
        )
    return _Info(name, TENSOR_TYPES[kind], shape, offset)


def _map_tensors(
    data: mmap.mmap, infos: list[_Info], start: int, alignment: int, malformed: Callable[[str], CheckpointError]
) -> dict[str, StoredTensor]:
    whole = np.frombuffer(data, np.uint8)
    tensors: dict[str, StoredTensor] = {}
    end_of_last = 0
    for info in sorted(infos, key=lambda i: i.offset):
        try:
            width = row_bytes(info.format, info.shape[-1])
        except ValueError as error:
            raise malformed(f"tensor {info.name!r}: {error}") from None
        rows = math.prod(info.shape[:-1])
        begin, end = start + info.offset, start + info.offset + rows * width
        if info.name in tensors:
            raise malformed(f"the tensor {info.name!r} occurs twice")
        if info.offset % alignment or info.offset < end_of_last:
            raise malformed(f"tensor {info.name!r} lies at offset {info.offset}, unaligned or inside another tensor")
        if end > len(data):
            raise malformed(f"tensor {info.name!r} ends at byte {end} of {len(data)}; the download is probably incomplete")
        tensors[info.name] = StoredTensor(info.name, info.format, info.shape, whole[begin:end].reshape(rows, width))
        end_of_last = info.offset + rows * width
    return tensors
