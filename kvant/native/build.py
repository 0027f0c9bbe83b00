"""Building the executor: compiled at first use with the compiler that is there, then kept.

    key = SHA-256 of (sources, flags, compiler version, CPU flags)      ->  <cache>/<key>.so  and  <key>.sha256 of its bytes

A changed source, another compiler or another CPU means another key; a damaged file does not match its sum and is built again.
Files appear by renaming, so that two processes never see half of one. Without a compiler, or where it fails, `load` returns
None and says why in one line: the caller goes on with torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.native import abi

HERE = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-w", "-Wno-psabi", "-shared", "-fPIC", "-pthread"]
TIMEOUT = 120  # seconds; 2-6 is usual

# What may be asked for by name. "native" is what the machine has; the others exist for tests and for cautious people.
ISAS: dict[str, list[str]] = {
    "native": ["-march=native"],
    "avx512": ["-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"],
    "avx2": ["-march=x86-64-v3"],
    "portable": ["-march=native", "-DKVANT_PORTABLE"],
}

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded executor."""

    path: Path
    isa: str
    functions: Any  # ctypes.CDLL, with signatures declared

    @property
    def vector_level(self) -> str:
        """What the kernels were compiled for."""
        return ("portable C++", "AVX2", "AVX-512 VNNI")[self.functions.kvant_vector_level()]

    @property
    def has_tiles(self) -> bool:
        """Whether AMX tiles were compiled in and the system grants them."""
        return bool(self.functions.kvant_tiles_granted())


def default_cache() -> Path:
    """Where built libraries are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "kvant" / "native"


def load(notice: Notice, cache: Path | None = None, isa: str = "native") -> Library | None:
    """The executor for `isa`, built if need be. None, after one `notice`, where that is impossible."""
    compiler = find_compiler()
    if compiler is None:
        notice("no C++ compiler found (c++, g++ or clang++): the CPU runs on torch, several times slower; install g++")
        return None
    flags = [*COMMON, *ISAS[isa]]
    key = _key(compiler, flags)
    folder = _writable(cache or default_cache())
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="kvant-native-"))
        notice(f"the cache folder {cache or default_cache()} cannot be written: the native step is compiled anew every time")
    target = folder / f"{key}.so"
    if not _intact(target):
        error = _compile(compiler, flags, target)
        if error:
            notice(f"the C++ compiler {compiler} failed ({error}): the CPU runs on torch, several times slower")
            return None
    return _open(target, isa, notice)


def runs_here(isa: str) -> bool:
    """Whether code compiled for `isa` runs on this machine."""
    needs = {"avx512": "avx512_vnni", "avx2": "avx2"}
    return isa not in needs or needs[isa].encode() in _cpu().split()


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _open(target: Path, isa: str, notice: Notice) -> Library | None:
    try:
        functions = ctypes.CDLL(str(target))
        abi.declare(functions)
    except (OSError, AttributeError) as error:
        notice(f"the compiled native step cannot be loaded ({error}): the CPU runs on torch, several times slower")
        return None
    return Library(target, isa, functions)


def _key(compiler: str, flags: list[str]) -> str:
    parts = [source.name.encode() + source.read_bytes() for source in sources()]
    parts += [" ".join(flags).encode(), _version(compiler), _cpu()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def sources() -> list[Path]:
    """Everything the library is made of, in a fixed order."""
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def _version(compiler: str) -> bytes:
    # Resolving and stat replace running the compiler, which would cost 10 ms of every start.
    path = Path(compiler).resolve()
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()


def _cpu() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features"))).encode()
    except (OSError, StopIteration):
        return platform.processor().encode() + platform.machine().encode()


def _writable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _sum_file(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _intact(target: Path) -> bool:
    try:
        return hashlib.sha256(target.read_bytes()).hexdigest() == _sum_file(target).read_text()
    except OSError:
        return False


def _compile(compiler: str, flags: list[str], target: Path) -> str:
    """Builds `target`; returns the error in a few words, or nothing."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        built = Path(folder) / "step.so"
        command = [compiler, *flags, "-o", str(built), str(HERE / "step.cpp")]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            return lines[0][:200] if lines else f"exit status {result.returncode}"
        digest = Path(folder) / "step.sha256"
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        os.replace(built, target)
        os.replace(digest, _sum_file(target))
    return ""
