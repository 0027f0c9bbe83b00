"""A file as read-only memory: what both readers stand on. Pages are loaded when they are first looked at."""

import mmap
from pathlib import Path

from kvant.errors import CheckpointError


def map_file(path: Path) -> mmap.mmap:
    """Maps `path`. The mapping lives as long as an array over it does. Raises `CheckpointError` for what cannot be read."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path.name} is empty; fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
