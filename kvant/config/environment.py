"""Environment: what Kvant takes from the process's environment. The only place in the project that reads it.

    KVANT_CACHE      folder of the model store and of compiled kernels; else XDG_CACHE_HOME/kvant, else ~/.cache/kvant,
                     else (a user without a home) a private folder among the temporary ones
    KVANT_PACKED_GIB the most that packed weights may take in the cache folder (default 8); 0 keeps none
    KVANT_OFFLINE    anything but empty, 0, false, no, off: nothing is ever downloaded
    KVANT_ISA        instruction set of the native CPU step: native (default), avx512, avxvnni, avx2 or portable
    NO_COLOR         set and not empty: plain text in the terminal (no-color.org)
    CUDA_VISIBLE_DEVICES   numbers of the GPUs that this process may use; CUDA itself honours it too

It is read once, by whoever stands at a door, and handed down as a value: tests pass an `Environment` of their own.
"""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvant.errors import ConfigError

FALSE_WORDS = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The settings that come from outside the command line."""

    cache: Path
    packed_limit: int = 8 << 30  # bytes
    offline: bool = False
    color: bool = True
    isa: str = "native"  # instruction set to compile the native step for, see native/build.py
    visible_gpus: str | None = None  # as CUDA_VISIBLE_DEVICES has it; None: all

    @property
    def models(self) -> Path:
        """Where downloaded models lie, one folder per alias."""
        return self.cache / "models"

    @property
    def packed(self) -> Path:
        """Where weights lie that were packed for this CPU."""
        return self.cache / "packed"

    @property
    def downloads(self) -> Path:
        """Where packages wait until their model is unpacked."""
        return self.cache / "downloads"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The settings of `variables`, by default those of this process."""
    values = os.environ if variables is None else variables
    return Environment(
        cache=_cache_folder(values),
        packed_limit=_packed_limit(values.get("KVANT_PACKED_GIB") or "8"),
        offline=values.get("KVANT_OFFLINE", "").strip().lower() not in FALSE_WORDS,
        color=not values.get("NO_COLOR"),
        isa=values.get("KVANT_ISA") or "native",
        visible_gpus=values.get("CUDA_VISIBLE_DEVICES"),
    )


def child_environment(**changes: str) -> dict[str, str]:
    """This process's variables with `changes`, for a program that is started from here."""
    return {**os.environ, **changes}


def _packed_limit(text: str) -> int:
    try:
        return max(0, int(float(text) * 2**30))
    except (ValueError, OverflowError):
        raise ConfigError(
            f"KVANT_PACKED_GIB must be a number of GiB, not {text[:20]!r}; 0 keeps no packed weights", param="KVANT_PACKED_GIB"
        ) from None


def _cache_folder(values: Mapping[str, str]) -> Path:
    own, shared = values.get("KVANT_CACHE"), values.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser().absolute()
        if shared and Path(shared).is_absolute():  # the specification tells to ignore relative ones
            return Path(shared) / "kvant"
        return Path.home() / ".cache" / "kvant"
    except RuntimeError:
        if own:  # what was asked for is not replaced by anything
            raise ConfigError(f"KVANT_CACHE={own}: there is no such user; set it to a folder", param="KVANT_CACHE") from None
        return _folder_without_home()  # an id without a user, as containers have


def _folder_without_home() -> Path:
    """A folder of this user's own among the temporary ones. Programs are loaded from it: nobody else may write there."""
    import tempfile

    folder = Path(tempfile.gettempdir()) / f"kvant-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        seen = folder.lstat()
        if stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o022:
            return folder
    raise ConfigError(f"this user has no home folder, and {folder} is not private; set KVANT_CACHE", param="KVANT_CACHE")
