"""Kept arrays: what loading made of a model's weights, in a file of the cache folder that the next start maps into memory.

    <cache>/packed/<source>-<key>.kept
    ┌─ arrays, each from a page on, filled up with zeros     ─┬─ index (JSON) ─┬─ tail ───────────────────────────────┐
    └──────────────────────────────────────────────────────────┴────────────────┴ magic, length and SHA-256 of the index

`source` stands for the model's path, `key` for all that the arrays depend on: its files as they are now (path, size, times,
number on the disk), and whatever the caller adds. A changed file, another CPU or another version is another key; what no
longer fits is deleted when its successor is written.

Written in order, index last, under another name, and renamed: a file with a tail is whole, and two processes that write at
once leave one whole file. Reading checks all of it, since wrong weights would talk fluently: the SHA-256 of the sums of its
pages. That costs one pass over the memory (98 MB: 12 ms), as much as the first token will, and brings the pages in besides. It
finds whatever a disk does to a file; it is no signature. Nothing waits for the disk: after a loss of power the check fails.

Nothing that goes wrong here stops a start. It ends in one notice, and in arrays made anew.
"""

import hashlib
import json
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # what lists and deletes needs no numpy
    import numpy as np

MAGIC = b"KVANTKP1"  # the last figure is the version of this format
TAIL = struct.Struct("<8sQ32s")
PAGE = 4096
SUFFIX = ".kept"
ABANDONED = 3600  # seconds after which a half-written file belongs to nobody


class Kept(NamedTuple):
    """An array of bytes, and a few numbers that say what it is."""

    about: tuple[int, ...]
    data: "np.ndarray"  # uint8; read-only once it comes from a file


Parts = Iterable[tuple[tuple[int, ...], "np.ndarray"]]  # (about, data) of what becomes `Kept`


class Shelf:
    """The place of one model's arrays. `limit` bounds all files of `folder` together; `notice` is told what goes wrong."""

    def __init__(self, folder: Path, checkpoint: Path, limit: int, notice: Callable[[str], None]):
        self._folder, self._checkpoint, self._limit, self._notice = folder, checkpoint, limit, notice
        self._source = _digest(str(checkpoint.resolve()))
        self._identity = _identity(checkpoint)

    def read(self, key: str) -> list[Kept] | None:
        """What was kept under `key`, mapped; None where there is nothing, or nothing that is whole."""
        path = self._path(key)
        try:
            kept = _read(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._notice(f"the packed weights in {path} are of no use ({_reason(error)}): they are packed anew")
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # the one used longest ago goes first
        return kept

    def write(self, key: str, size: int, parts: Parts) -> bool:
        """Keeps `parts`, some `size` bytes. False where that is impossible, after a notice, or not wanted."""
        if size > self._limit:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if shutil.disk_usage(self._folder).free < 2 * size:
                raise OSError(0, "the disk is nearly full")
            self._write(self._path(key), parts)
        except OSError as error:
            self._notice(
                f"packed weights cannot be kept in {self._folder} ({_reason(error)}): they are packed anew at every start"
            )
            return False
        self._make_room(self._path(key))
        return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._source}-{_digest(self._identity + key)}{SUFFIX}"

    def _write(self, path: Path, parts: Parts) -> None:
        part = path.with_name(f"{path.stem}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            with open(part, "wb") as file:
                _write(file, str(self._checkpoint.resolve()), parts)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def _make_room(self, newest: Path) -> None:
        """Removes what this model had before, what has no model any more, and the longest unused beyond the limit."""
        with suppress(OSError):
            forget(self._folder)
            for part in self._folder.glob("*.part"):
                if part.stat().st_mtime < time.time() - ABANDONED:
                    part.unlink()
            for old in self._folder.glob(f"{self._source}-*{SUFFIX}"):
                if old != newest:
                    old.unlink()
            room = self._limit
            for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda p: p.stat().st_mtime, reverse=True):
                room -= path.stat().st_size
                if room < 0:
                    path.unlink()


def total_bytes(folder: Path) -> int:
    """What the files of `folder` take."""
    return sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))


def forget(folder: Path) -> int:
    """Deletes what was kept of models that are gone, and what cannot be read; returns the bytes."""
    freed = 0
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            with open(path, "rb") as file:
                source = _index(file)["source"]
        except (OSError, ValueError):
            source = ""
        with suppress(FileNotFoundError):  # another process was faster
            if not source or not Path(source).exists():
                size = path.stat().st_size
                path.unlink()
                freed += size
    return freed


# --- the file ---------------------------------------------------------------------------------------------------------------


def _write(file: IO[bytes], source: str, parts: Parts) -> None:
    import numpy as np

    sums, sections, position = hashlib.sha256(), [], 0
    for about, data in parts:
        padded = np.zeros(-(-data.size // PAGE) * PAGE, np.uint8)
        padded[: data.size] = data
        file.write(memoryview(padded))
        sums.update(_page_sums(padded))
        sections.append([position, data.size, *about])
        position += padded.size
    index = json.dumps({"source": source, "sections": sections, "bytes": position, "sums": sums.hexdigest()}).encode()
    file.write(index + TAIL.pack(MAGIC, len(index), hashlib.sha256(index).digest()))


def _read(path: Path) -> list[Kept]:
    """Raises OSError, and ValueError for a file that is damaged."""
    import numpy as np

    with open(path, "rb") as file:
        index = _index(file)
        size = index["bytes"]
        if size == 0:
            return [Kept(tuple(about), np.zeros(0, np.uint8)) for _, _, *about in index["sections"]]
        data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    if hashlib.sha256(_page_sums(data)).hexdigest() != index["sums"]:
        raise ValueError("damaged")
    return [Kept(tuple(about), data[start : start + length]) for start, length, *about in index["sections"]]


def _index(file: IO[bytes]) -> dict:
    size = file.seek(0, os.SEEK_END)
    if size < TAIL.size:
        raise ValueError("cut off")
    file.seek(size - TAIL.size)
    magic, length, digest = TAIL.unpack(file.read(TAIL.size))
    if magic != MAGIC or length > size - TAIL.size:
        raise ValueError("cut off, or of another version")
    file.seek(size - TAIL.size - length)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("damaged")
    index: dict = json.loads(text)
    if index["bytes"] != size - TAIL.size - length:
        raise ValueError("cut off")
    return index


def _page_sums(data: "np.ndarray") -> bytes:
    sums: bytes = data.view("u8").reshape(-1, PAGE // 8).sum(axis=1, dtype="u8").tobytes()
    return sums


def _identity(checkpoint: Path) -> str:
    """The files of a model as they are now. `ctime` changes with every write and cannot be set back, as `mtime` can."""
    files = [checkpoint] if checkpoint.is_file() else sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"])
    stats = [(file.name, file.stat()) for file in files]
    return json.dumps([(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev) for name, s in stats])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
