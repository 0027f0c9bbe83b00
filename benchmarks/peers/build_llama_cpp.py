"""Builds llama.cpp for this very processor, from the source package of llama-cpp-python on the package index.

That package carries the whole tree of llama.cpp, so an index is all it takes, and its version pins the peer. The build is
the one its authors recommend for speed (release, `-march=native`), with one line mended: see `BARRIER`.

    <cache>/peers/llama.cpp-<version>/bin/llama-bench, ...   the programs, linked statically; there once all are built
    <cache>/peers/llama.cpp-<version>/build.json             what they were built with
    <cache>/peers/llama.cpp-<version>.work/                  source and objects while building; a second call goes on there

    python -m benchmarks.peers.build_llama_cpp [--jobs 2]    about 12 minutes on two cores
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from kvant.config.environment import read_environment

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-completion", "llama-perplexity")
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
AMX_FILE = "vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
LOAD = "    _tile_loadconfig(&tc);\n"
# gcc 12 believes that _tile_loadconfig reads 8 bytes of the 64 and drops the stores of the others: the first product with
# tiles then dies with SIGILL. The barrier says that all of `tc` is read. It costs nothing where the compiler knows better.
BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


class BuildError(Exception):
    """The peer cannot be built here; the text says why and what helps."""


def home() -> Path:
    """The folder of the finished build."""
    return read_environment().cache / "peers" / f"llama.cpp-{VERSION}"


def programs() -> dict[str, Path] | None:
    """The built programs by name; None where they have not been built."""
    found = {name: home() / "bin" / name for name in PROGRAMS}
    return found if (home() / "build.json").is_file() and all(path.is_file() for path in found.values()) else None


def versions() -> dict[str, str]:
    """What a result says of the peer; nothing where it has not been built. All flags stand in `build.json`."""
    if programs() is None:
        return {}
    note = json.loads((home() / "build.json").read_text())
    return {"llama.cpp": f"of {note['package']}, {note['compiler']}, GGML_NATIVE, barrier in {Path(note['mended']).name}"}


def build(jobs: int) -> dict[str, Path]:
    """Builds what is missing and returns the programs. Raises `BuildError`."""
    if (found := programs()) is not None:
        return found
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            raise BuildError(f"building llama.cpp needs {tool}; install it (Debian: apt install cmake g++ ninja-build)")
    work = home().with_name(home().name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    mend(source := fetch(work))
    compile_programs(source / "vendor" / "llama.cpp", work / "build", jobs)
    collect(work)
    return {name: home() / "bin" / name for name in PROGRAMS}


def fetch(work: Path) -> Path:
    """The unpacked source package. pip asks the package for its metadata only; nothing is compiled yet."""
    folder = work / f"{PACKAGE.replace('-', '_')}-{VERSION}"
    if folder.is_dir():
        return folder
    wanted = ("--no-deps", f"--no-binary={PACKAGE}", f"{PACKAGE}=={VERSION}", "--dest", str(work))
    run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *wanted])
    with tarfile.open(work / f"{folder.name}.tar.gz") as archive:
        archive.extractall(work / "unpacking", filter="data")
    (work / "unpacking" / folder.name).rename(folder)
    return folder


def mend(source: Path) -> None:
    """Puts the barrier before the one place that loads a tile configuration. A second call changes nothing."""
    file = source / AMX_FILE
    text = file.read_text()
    if BARRIER + LOAD in text:
        return
    if text.count(LOAD) != 1:
        raise BuildError(f"{AMX_FILE} of {PACKAGE} {VERSION} does not load its tile configuration where this script expects it")
    file.write_text(text.replace(LOAD, BARRIER + LOAD))


def compile_programs(tree: Path, folder: Path, jobs: int) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(["cmake", "-S", str(tree), "-B", str(folder), *generator, *FLAGS])
    run(["cmake", "--build", str(folder), "--parallel", str(jobs), "--target", *PROGRAMS])


def collect(work: Path) -> None:
    """Moves the programs to their place, the note last: where it is, the build is whole."""
    target = home() / "bin"
    target.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        shutil.copy2(work / "build" / "bin" / name, target / name)
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    note = {"package": f"{PACKAGE} {VERSION}", "flags": FLAGS, "compiler": compiler, "mended": AMX_FILE}
    (home() / "build.json").write_text(json.dumps(note, indent=1) + "\n")
    shutil.rmtree(work)


def run(command: list[str]) -> None:
    if subprocess.run(command).returncode:
        raise BuildError(f"failed: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    try:
        for path in build(parser.parse_args().jobs).values():
            print(path)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
