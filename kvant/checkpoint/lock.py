"""A lock between processes, on every system: a file that one of them holds.

The system itself lets go of it when its holder ends, however it ends; the file stays, and means nothing by itself.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvant.errors import ConfigError

WAIT_SECONDS = 0.2


@contextmanager
def only_one(lock: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Held by one process at a time; `waiting` is called now and then while another one has it."""
    with _opened(lock) as file:
        while not _try(file):
            waiting()
            time.sleep(WAIT_SECONDS)
        try:
            yield
        finally:
            _release(file)


def make_folder(folder: Path) -> None:
    """Raises `ConfigError` with the remedy where the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(f"make the folder {folder}", error) from None


def _opened(lock: Path) -> IO[bytes]:
    try:
        return open(lock, "a+b")
    except OSError as error:  # a cache that belongs to somebody else, or lies on a disk that is read-only
        raise _unwritable(f"write {lock}", error) from None


def _unwritable(what: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot {what} ({error.strerror}); set KVANT_CACHE to a folder that can be written", param="KVANT_CACHE"
    )


if sys.platform == "win32":
    import msvcrt

    def _try(file: IO[bytes]) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _release(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _release(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)
