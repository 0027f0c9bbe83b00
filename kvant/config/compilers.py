"""Compilers: which C++ compilers this machine has, and how each is told what processor to compile for.

Compilers of the system come first. ziglang, a package of the index, carries one (clang, 100 MB) for machines where nothing
can be installed but Python packages. Two names of one program count once.
"""

import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NAMES = ("c++", "g++", "clang++")
PACKAGE = "ziglang"


@dataclass(frozen=True, slots=True)
class Compiler:
    """One C++ compiler that understands the options of GCC."""

    command: tuple[str, ...]  # what to start, before any option
    program: Path  # the file whose change means another compiler

    def __str__(self) -> str:
        return f"python -m {PACKAGE} c++" if self.is_zig else self.command[0]

    @property
    def is_zig(self) -> bool:
        return PACKAGE in self.command

    def target(self, cpu: str, features: tuple[str, ...] = ()) -> list[str]:
        """Options for one processor and for `features` beyond it. `cpu`: "native", "baseline" for the least of this
        machine's family, or a name that GCC knows."""
        if self.is_zig:  # clang behind another front: everything in one option, and no dashes
            return [f"-mcpu={'+'.join([cpu.replace('-', '_'), *features])}"]
        if cpu == "baseline":
            return ["-march=x86-64"] if is_x86() else []
        option = "-march" if is_x86() else "-mcpu"  # on ARM, clang takes "native" here only
        return [f"{option}={cpu}", *(f"-m{feature}" for feature in features)]


def is_x86() -> bool:
    """Whether this machine's processor is one of x86-64."""
    return platform.machine().lower() in ("x86_64", "amd64")


def find_compilers(
    which: Callable[[str], str | None] = shutil.which,
    package: Callable[[], Path | None] = lambda: _package_folder(),
) -> tuple[Compiler, ...]:
    """All compilers, the preferred one first. `which` and `package` stand in for the machine in tests."""
    programs = {Path(path).resolve(): path for name in reversed(NAMES) if (path := which(name))}
    found = [Compiler((path,), program) for program, path in reversed(programs.items())]
    folder = package()
    if folder is not None:
        found.append(Compiler((sys.executable, "-m", PACKAGE, "c++"), folder / "zig"))
    return tuple(found)


def remedy() -> str:
    """How a machine without a compiler gets one."""
    system = "xcode-select --install" if platform.system() == "Darwin" else "apt install g++ (dnf install gcc-c++)"
    return f"{system}, or pip install {PACKAGE}"


def _package_folder() -> Path | None:
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent if found and found.origin else None
