"""Reads safetensors files, one or many shards, as views of mapped memory.

    length of header (8 bytes) │ header: JSON {name: {dtype, shape, data_offsets}} │ data ...
                                                                                    └ tensors, end to end, no gap

The header is checked completely before any value is mapped or read: the spans must follow each other without hole or
overlap and end with the file, and each must be as long as its dtype and shape say. Nothing here can run code from a file:
there is no pickle. Format: github.com/huggingface/safetensors#format
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kvant.checkpoint.mapped import map_file
from kvant.config.formats import FORMATS, StoredTensor, row_bytes
from kvant.errors import CheckpointError, UnsupportedError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the reference implementation's limit
MAX_DIMENSIONS = 8
MAX_COUNT = 1 << 48  # of a dimension or an offset: 256 TiB
MAX_NAME = 1024

# Known to the format, but of no use to a network that is built here.
UNUSED_DTYPES = frozenset(
    {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4", "U16", "U32", "U64", "C64"}
)  # fmt: skip
DTYPES = tuple(sorted(name for name, block in FORMATS.items() if block.block_elements == 1))


class _Entry(NamedTuple):
    name: str
    format: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises `CheckpointError` where its header contradicts itself or the file's size."""
    data = map_file(path)
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > min(MAX_HEADER, len(data) - 8):
        _malformed(path, f"it claims a header of {header_bytes} bytes in a file of {len(data)}")
    start = 8 + header_bytes
    entries = _entries(path, bytes(data[8:start]))
    position = 0
    for entry in entries:
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            _malformed(path, f"tensor {entry.name!r} {kind} (offset {entry.begin}, expected {position})")
        position = entry.end
    if start + position != len(data):
        _malformed(path, f"its tensors end at byte {start + position}, the file at {len(data)}; fetch it again")
    whole = np.frombuffer(data, np.uint8)
    return {entry.name: _stored(entry, whole[start + entry.begin : start + entry.end]) for entry in entries}


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face folder: those of its index, or of its only safetensors file.

    Raises `CheckpointError` naming every missing shard, and every tensor that the index promises but no shard holds.
    """
    if (folder / INDEX).is_file():
        return _read_shards(folder, _weight_map(folder / INDEX))
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_without_safetensors(folder)
    if len(files) > 1:
        raise CheckpointError(f"{folder} holds {len(files)} safetensors files but no {INDEX}; fetch that file too")
    return read_safetensors(files[0])


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {_some(missing)}, named in {INDEX}; fetch the missing files")
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        shard = read_safetensors(folder / name)
        twice = sorted(tensors.keys() & shard.keys())
        if twice:
            _malformed(folder / name, f"{_some(twice)} also occurs in another shard")
        tensors.update(shard)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise CheckpointError(f"no shard of {folder} holds {_some(absent)}, although {INDEX} names it; fetch the shards again")
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _malformed(path, "it has no weight_map")
    for file in weight_map.values():
        # A shard lies beside its index; anything else could reach out of the folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            _malformed(path, f"{file!r} is not the name of a safetensors file in the same folder")
    return weight_map


def _refuse_without_safetensors(folder: Path) -> NoReturn:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for p in folder.glob(pattern))
    if pickles:
        raise UnsupportedError(
            f"{folder} has its weights only as pickle ({_some(pickles)}), which can run code when it is loaded; "
            "convert them to safetensors (save_pretrained with safe_serialization=True) and try again"
        )
    raise CheckpointError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")


# --- one file's header --------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `CheckpointError` where it is none."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    return _parse(f"{path}", text)


def _parse(what: str, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # both UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{what} is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{what} is JSON, but no object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of `pairs`; json itself would silently keep the last of several values."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _entries(path: Path, text: bytes) -> list[_Entry]:
    """The tensors that the header declares, in order of offset, each consistent in itself."""
    header = _parse(f"the header of {path.name}", text)
    header.pop("__metadata__", None)
    entries = [_entry(path, name, declared) for name, declared in header.items()]
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def _entry(path: Path, name: str, declared: Any) -> _Entry:
    if len(name) > MAX_NAME:
        _malformed(path, f"a tensor's name is {len(name)} characters long")
    if not isinstance(declared, dict) or declared.keys() != {"dtype", "shape", "data_offsets"}:
        _malformed(path, f"tensor {name!r} is not described by exactly dtype, shape and data_offsets")
    dtype, shape, offsets = declared["dtype"], declared["shape"], declared["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        if isinstance(dtype, str) and dtype in UNUSED_DTYPES:
            raise UnsupportedError(
                f"{path.name}: tensor {name!r} is stored as {dtype}, which is not built here; supported: {', '.join(DTYPES)}"
            )
        _malformed(path, f"tensor {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        _malformed(path, f"tensor {name!r} has the impossible shape {str(shape)[:80]}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _malformed(path, f"tensor {name!r} has the impossible offsets {str(offsets)[:80]}")
    size = math.prod(shape) * FORMATS[dtype].block_bytes
    if offsets[1] - offsets[0] != size:
        _malformed(path, f"tensor {name!r} takes {offsets[1] - offsets[0]} bytes, but its dtype and shape need {size}")
    return _Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _counts(values: Any) -> bool:
    """Whether `values` is a list of whole numbers of at least 0 below `MAX_COUNT`."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_COUNT for value in values)


def _stored(entry: _Entry, raw: np.ndarray) -> StoredTensor:
    if not raw.size:
        return StoredTensor(entry.name, entry.format, entry.shape, raw.reshape(0, 0))
    width = row_bytes(entry.format, entry.shape[-1] if entry.shape else 1)
    return StoredTensor(entry.name, entry.format, entry.shape, raw.reshape(-1, width))


def _some(names: list[str], shown: int = 6) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _malformed(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path.name} is not a valid safetensors checkpoint: {what}")
