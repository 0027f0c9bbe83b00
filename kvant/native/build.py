"""Building the executor: compiled at first use with the compiler that is there, then kept.

    key = SHA-256 of (sources, flags, compiler, CPU flags)      ->  <cache>/<key>.so  and  <key>.sha256 of its bytes

A changed source, another compiler or another CPU means another key; a damaged file does not match its sum, one that cannot
be loaded is of no use: both are built again. Files appear by renaming, so that a process which is killed while it builds
leaves nothing half-done behind; of several that want the same library one builds it. What can go wrong has a next step, and
ends in one line:

    the cache folder cannot be used      built in a temporary folder, anew in every process
    a compiler fails                     the next one; then the first again, without instructions of this CPU
    all of them do, or there is none     None: the caller goes on with torch
"""

import _ctypes
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvant.config.compilers import Compiler, find_compilers, remedy
from kvant.config.environment import child_environment
from kvant.errors import ConfigError
from kvant.native import abi

HERE = Path(__file__).parent
COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-w", "-Wno-psabi", "-shared", "-fPIC", "-pthread"]
TIMEOUT = 600  # seconds; 6-12 is usual, ziglang's first build of its own library takes a minute
ABANDONED = 3600  # seconds after which a folder of a build that was killed is removed


class Isa(NamedTuple):
    """An instruction set to compile for."""

    cpu: str = "native"
    features: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # flags of /proc/cpuinfo


# What may be asked for by name. "native" is what the machine has; the others simulate lesser ones, and serve cautious people.
_AVX2 = ("avx2", "fma", "f16c", "bmi2")
ISAS: dict[str, Isa] = {
    "native": Isa(),
    "avx512": Isa("x86-64-v4", ("avx512vnni",), (), (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")),
    "avxvnni": Isa("x86-64-v3", ("avxvnni",), (), (*_AVX2, "avx_vnni")),
    "avx2": Isa("x86-64-v3", (), (), _AVX2),
    "portable": Isa("baseline", (), ("-DKVANT_PORTABLE",)),
}

SLOWER = "the CPU runs on torch, several times slower"
LEVELS = ("portable C++", "AVX2", "AVX2 with VNNI", "AVX-512 VNNI")

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
        return LEVELS[self.functions.kvant_vector_level()]

    @property
    def has_tiles(self) -> bool:
        """Whether AMX tiles were compiled in and the system grants them."""
        return bool(self.functions.kvant_tiles_granted())


class CompilerFailed(Exception):
    """What a compiler said, in a few words."""


def default_cache() -> Path:
    """Where built libraries are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "kvant" / "native"


def load(notice: Notice, cache: Path | None = None, isa: str = "native") -> Library | None:
    """The executor for `isa`, built if need be; None where that is impossible. What is not as it should be is said to `notice`.

    Raises `ConfigError` for an instruction set that is unknown, or that this machine does not have.
    """
    if not runs_here(isa):
        raise ConfigError(f"this CPU cannot run {isa} code; take native", param="KVANT_ISA")
    compilers = find_compilers()
    if not compilers:
        notice(f"no C++ compiler found: {SLOWER}; {remedy()}")
        return None
    failures: list[str] = []
    for compiler, kind in dict.fromkeys([*((each, isa) for each in compilers), (compilers[0], "portable")]):
        try:
            library = _somewhere(compiler, kind, cache or default_cache(), notice)
        except (CompilerFailed, OSError, AttributeError) as error:
            failures.append(f"{compiler} failed ({str(error)[:200]})")
            continue
        if failures:
            notice(f"{failures[0]}: the native step is compiled by {compiler} for {kind}")
        return library
    notice(f"the C++ compiler {failures[0]}: {SLOWER}")
    return None


def runs_here(isa: str) -> bool:
    """Whether code compiled for `isa` runs on this machine."""
    if isa not in ISAS:
        raise ConfigError(f"the instruction set must be one of {', '.join(ISAS)}, not {isa[:40]!r}", param="KVANT_ISA")
    return set(ISAS[isa].needs) <= set(_cpu().decode().split())


def sources() -> list[Path]:
    """Everything the library is made of, in a fixed order."""
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def options(compiler: Compiler, isa: str) -> list[str]:
    """What the compiler is told, except the files."""
    target = ISAS[isa]
    return [*COMMON, *compiler.target(target.cpu, target.features), *target.defines]


# --- building and opening -----------------------------------------------------------------------------------------------


def _somewhere(compiler: Compiler, isa: str, cache: Path, notice: Notice) -> Library:
    """The library in `cache`, or, where that folder is of no use, in a temporary one that is gone once it is loaded."""
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _kept_or_built(compiler, isa, cache)
    except (OSError, AttributeError) as error:
        with tempfile.TemporaryDirectory(prefix="kvant-native-") as folder:
            library = _kept_or_built(compiler, isa, Path(folder))
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        notice(f"the cache folder {cache} cannot be used ({reason}): the native step is compiled anew every time")
        return library


def _kept_or_built(compiler: Compiler, isa: str, folder: Path) -> Library:
    flags = options(compiler, isa)
    target = folder / f"{_key(compiler, flags)}.so"
    if _intact(target):
        with suppress(OSError, AttributeError):
            return _open(target, isa)
        target.unlink()  # whole, and yet of another machine or another version
    with _turn(target):
        if not _intact(target):  # meanwhile somebody else may have built it
            _compile(compiler, flags, target)
    return _open(target, isa)


@contextmanager
def _turn(target: Path) -> Iterator[None]:
    """One process at a time builds `target`; the system ends the turn of one that dies."""
    with target.with_suffix(".lock").open("w") as file:
        with suppress(OSError):  # a file system without locks: two may build, and the last one stays
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(target: Path, isa: str) -> Library:
    functions = ctypes.CDLL(str(target))
    try:
        abi.declare(functions)
    except AttributeError:
        _ctypes.dlclose(functions._handle)  # or its path would mean this library as long as the process lives
        raise
    return Library(target, isa, functions)


def _key(compiler: Compiler, flags: list[str]) -> str:
    parts = [source.name.encode() + source.read_bytes() for source in sources()]
    parts += [" ".join(flags).encode(), _version(compiler), _cpu()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _version(compiler: Compiler) -> bytes:
    # Looking at the file replaces running the compiler, which would cost 10 ms of every start.
    stat = compiler.program.stat()
    return f"{compiler.program} {stat.st_size} {stat.st_mtime_ns}".encode()


def _cpu() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features"))).encode()
    except (OSError, StopIteration):
        return platform.processor().encode() + platform.machine().encode()


def _sum_file(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _intact(target: Path) -> bool:
    try:
        return hashlib.sha256(target.read_bytes()).hexdigest() == _sum_file(target).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _compile(compiler: Compiler, flags: list[str], target: Path) -> None:
    """Builds `target`. Raises `CompilerFailed`, and `OSError` where the folder cannot be written."""
    _sweep(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        built, digest = Path(folder) / "step.so", Path(folder) / "step.sha256"
        # An absolute path: a compiler that runs elsewhere, or behind a wrapper, finds the source all the same.
        command = [*compiler.command, *flags, "-o", str(built.absolute()), str(HERE / "step.cpp")]
        try:
            result = subprocess.run(
                command, capture_output=True, timeout=TIMEOUT, check=False, env=child_environment(TMPDIR=str(folder))
            )
        except subprocess.TimeoutExpired:
            raise CompilerFailed(f"timed out after {TIMEOUT} s") from None
        except OSError as error:
            raise CompilerFailed(error.strerror or str(error)) from None
        if result.returncode:
            raise CompilerFailed(_complaint(result.returncode, result.stderr.decode(errors="replace")))
        if not built.exists():
            raise CompilerFailed("it wrote nothing")
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        os.replace(built, target)
        os.replace(digest, _sum_file(target))


def _complaint(status: int, text: str) -> str:
    """The line of a compiler's output that says most."""
    lines = [line for line in text.splitlines() if line.strip()]
    if status < 0 and not lines:
        return f"killed by signal {-status}"
    return next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {status}")


def _sweep(folder: Path) -> None:
    """Removes what builds that were killed left behind."""
    for abandoned in folder.glob("build-*"):
        with suppress(OSError):
            if time.time() - abandoned.stat().st_mtime > ABANDONED:
                shutil.rmtree(abandoned, ignore_errors=True)
