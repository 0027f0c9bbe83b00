"""The metadata of one architecture in a GGUF file, checked by type as it is read."""

import math
from typing import Any

from kvant.checkpoint.gguf import GGUFFile
from kvant.errors import CheckpointError, UnsupportedError


class Keys:
    """What stands behind "<architecture>." in the metadata."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.prefix = file.metadata["general.architecture"] + "."

    def get(self, key: str, kind: type) -> Any:
        """The number behind `key`, or None. A list (one entry per layer) counts as a number if all entries are equal."""
        value = self.file.metadata.get(self.prefix + key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(
                    f"{self.file.path.name}: {self.prefix + key} differs between layers, which is not built here"
                )
            value = value[0]
        if value is None:
            return None
        right = is_whole(value) if kind is int else isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
        if not right:
            raise CheckpointError(
                f"{self.file.path.name}: {self.prefix + key} is {str(value)[:40]!r}, not a number that makes sense"
            )
        return kind(value)


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number from 0 on; truth values are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
