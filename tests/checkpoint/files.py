"""Writers of model files for tests, simple enough to be trusted, and able to write wrong ones."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "BF16": 30, "F64": 28, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "IQ4_NL": 20}
TYPE_IDS |= {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
ALIGNMENT = 32


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # row-major
    type_id: int
    data: bytes


class Typed(NamedTuple):
    """A metadata value with its type id; arrays have the id of their elements."""

    kind: int
    value: Any
    array: bool = False


def u32(value: int) -> Typed:
    return Typed(4, value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def one(kind: int, value: Any) -> bytes:
    return string(value) if kind == 8 else struct.pack("<" + CODES[kind], value)


def typed(value: Any) -> Typed:
    """Gives a plain Python value the type that model files use for it."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, list):
        return Typed(typed(value[0]).kind if value else 8, value, array=True)
    kinds: list[tuple[type, int]] = [(bool, 7), (int, 4), (float, 6), (str, 8), (bytes, 8)]
    return Typed(next(kind for known, kind in kinds if isinstance(value, known)), value)


def entry(key: str, value: Any) -> bytes:
    kind, plain, array = typed(value)
    head = string(key)
    if array:
        return head + struct.pack("<IIQ", 9, kind, len(plain)) + b"".join(one(kind, item) for item in plain)
    return head + struct.pack("<I", kind) + one(kind, plain)


def gguf_bytes(metadata: dict[str, Any], tensors: list[Tensor], version: int = 3, alignment: int = ALIGNMENT) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items())
    data = b""
    for tensor in tensors:
        data += b"\0" * (-len(data) % alignment)
        head += string(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.type_id, len(data))
        data += tensor.data
    return head + b"\0" * (-len(head) % alignment) + data


def f32_tensor(name: str, values: np.ndarray) -> Tensor:
    return Tensor(name, values.shape, TYPE_IDS["F32"], np.ascontiguousarray(values, np.float32).tobytes())


def safetensors_bytes(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path
