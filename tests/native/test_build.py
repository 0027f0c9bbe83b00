"""Building ends in a working library or in one clear line, whatever compiler, cache folder and kept files are like.

What is built here is a stand-in that has the executor's names and nothing behind them: 0.1 s instead of 6.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvant.config.compilers import Compiler, find_compilers
from kvant.errors import ConfigError
from kvant.native import abi, build

REAL = find_compilers()
pytestmark = pytest.mark.skipif(not REAL, reason="no C++ compiler")


class Names:
    """Stands in for a ctypes library and remembers what was asked of it."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        self.asked.append(name)
        return lambda: None


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    names = Names()
    abi.declare(names)
    folder = tmp_path / "source"
    folder.mkdir()
    level = "#ifdef KVANT_PORTABLE\n#define LEVEL 0\n#else\n#define LEVEL 3\n#endif\n"
    bodies = [f'extern "C" int {name}() {{ return LEVEL; }}\n' for name in names.asked]
    (folder / "step.cpp").write_text(level + "".join(bodies))
    monkeypatch.setattr(build, "HERE", folder)
    return folder


@pytest.fixture
def notices():
    return []


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def script(path: Path, text: str) -> Compiler:
    """A compiler that is a shell script; $REAL is the true one."""
    path.write_text(f"#!/bin/sh\nREAL={REAL[0].command[0]}\n{text}\n")
    path.chmod(0o755)
    return Compiler((str(path),), path)


def use(monkeypatch, *compilers: Compiler) -> None:
    monkeypatch.setattr(build, "find_compilers", lambda: compilers)


# --- compilers ----------------------------------------------------------------------------------------------------------


def test_without_a_compiler_there_is_one_notice_with_the_remedy(monkeypatch, notices, cache):
    use(monkeypatch)
    assert build.load(notices.append, cache) is None
    assert len(notices) == 1 and "no C++ compiler" in notices[0] and "pip install ziglang" in notices[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'step.cpp:1: error: no such machine' >&2; exit 1", "no such machine"),
        ("kill -9 $$", "killed by signal 9"),
        ("exit 3", "exit status 3"),
        ("exit 0", "it wrote nothing"),
        ("exec sleep 30", "timed out"),
        ("echo 'int;' > source.txt; cp source.txt $(echo $* | sed 's/.*-o //; s/ .*//')", "file too short"),
    ],
)
def test_a_compiler_that_fails_is_reported_in_one_line(monkeypatch, notices, tmp_path, cache, text, words):
    monkeypatch.setattr(build, "TIMEOUT", 0.3)
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, script(tmp_path / "broken", text))
    assert build.load(notices.append, cache) is None
    assert len([n for n in notices if "torch" in n]) == 1 and words in notices[-1] and "\n" not in notices[-1]
    assert not list(cache.glob("build-*"))


def test_a_compiler_that_cannot_be_started(monkeypatch, notices, tmp_path, cache):
    broken = script(tmp_path / "broken", "")
    broken.program.chmod(0o644)
    use(monkeypatch, broken)
    assert build.load(notices.append, cache) is None
    assert len(notices) == 1 and "Permission denied" in notices[0]


def test_where_one_compiler_fails_the_next_one_builds(monkeypatch, notices, tmp_path, cache):
    use(monkeypatch, script(tmp_path / "broken", "exit 1"), REAL[0])
    assert build.load(notices.append, cache).functions.kvant_vector_level() == 3
    assert len(notices) == 1 and "broken failed" in notices[0] and str(REAL[0]) in notices[0]


def test_a_compiler_that_does_not_know_this_cpu_builds_portable_code(monkeypatch, notices, tmp_path, cache):
    old = 'case "$*" in *native*) echo "error: unknown CPU" >&2; exit 1;; *) exec $REAL "$@";; esac'
    use(monkeypatch, script(tmp_path / "old", old))
    library = build.load(notices.append, cache)
    assert library.vector_level == "portable C++" and library.isa == "portable"
    assert len(notices) == 1 and "unknown CPU" in notices[0] and "for portable" in notices[0]


def test_every_instruction_set_has_its_own_library(notices, cache):
    paths = {build.load(notices.append, cache, isa).path for isa in build.ISAS if build.runs_here(isa)}
    assert len(paths) == sum(build.runs_here(isa) for isa in build.ISAS) and notices == []


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch, notices, cache):
    monkeypatch.setattr(build, "_cpu", lambda: b"flags : fpu sse2 avx2")
    with pytest.raises(ConfigError, match="this CPU cannot run avx512"):
        build.load(notices.append, cache, "avx512")
    with pytest.raises(ConfigError, match="native, avx512, avxvnni, avx2, portable, not 'avx3'"):
        build.load(notices.append, cache, "avx3")


@pytest.mark.parametrize("field", ["_cpu", "_version"])
def test_another_cpu_or_compiler_is_another_key(monkeypatch, field):
    here = build._key(REAL[0], build.COMMON)
    assert build._key(REAL[0], build.COMMON) == here != build._key(REAL[0], [*build.COMMON, "-g"])
    monkeypatch.setattr(build, field, lambda *_: b"another")
    assert build._key(REAL[0], build.COMMON) != here


# --- kept files ---------------------------------------------------------------------------------------------------------


def elf_of_another_machine(data: bytes) -> bytes:
    return data[:18] + (0x101).to_bytes(2, "little") + data[20:]


def library_of_another_version(data: bytes, folder: Path) -> bytes:
    (folder / "other.cpp").write_text('extern "C" int kvant_vector_level() { return 1; }\n')
    subprocess.run([*REAL[0].command, "-shared", "-fPIC", "-o", "other.so", "other.cpp"], cwd=folder, check=True)
    return (folder / "other.so").read_bytes()


DAMAGES = {
    "empty": lambda data, _: b"",
    "truncated": lambda data, _: data[: len(data) // 2],
    "zeros": lambda data, _: bytes(len(data)),
    "a bit": lambda data, _: data[:-1] + bytes([data[-1] ^ 1]),
    "another machine": lambda data, _: elf_of_another_machine(data),
    "another version": library_of_another_version,
}


@pytest.mark.parametrize(
    ("damage", "summed"), [*((name, False) for name in DAMAGES), ("another machine", True), ("another version", True)]
)
def test_built_once_kept_and_built_again_when_damaged(notices, tmp_path, cache, damage, summed):
    """`summed`: the sum fits the damaged file, as where a cache was copied from elsewhere."""
    first = build.load(notices.append, cache)
    made = first.path.stat().st_ino
    assert build.load(notices.append, cache).path.stat().st_ino == made
    data = DAMAGES[damage](first.path.read_bytes(), tmp_path)
    first.path.unlink()  # the loaded one stays mapped
    first.path.write_bytes(data)
    if summed:
        build._sum_file(first.path).write_text(hashlib.sha256(data).hexdigest())
    # A fresh process: this one has a library of that name already.
    code = "import sys; from pathlib import Path; from kvant.native import build; build.HERE = Path(sys.argv[1])"
    code += "; print(build.load(print, Path(sys.argv[2])).functions.kvant_vector_level())"
    done = subprocess.run([sys.executable, "-c", code, str(build.HERE), str(cache)], capture_output=True, text=True)
    assert done.stdout == "3\n", done.stdout + done.stderr
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".sha256", ".so"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0" * 64])
def test_a_damaged_sum(notices, cache, content):
    first = build.load(notices.append, cache)
    build._sum_file(first.path).write_bytes(content)
    assert build.load(notices.append, cache) is not None and notices == []
    assert build._intact(first.path)


# --- folders ------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_a_file(notices, cache):
    cache.write_text("in the way")
    assert build.load(notices.append, cache) is not None
    assert len(notices) == 1 and "cannot be used" in notices[0] and "anew every time" in notices[0]


def test_a_folder_that_cannot_be_made_or_written(monkeypatch, notices, tmp_path):
    """Below /proc nobody may write, not even root."""
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    library = build.load(notices.append, Path("/proc/self/fd/kvant"))
    assert library.functions.kvant_vector_level() == 3
    assert len(notices) == 1 and "cannot be used" in notices[0]
    assert not list(tmp_path.glob("kvant-native-*"))  # loaded, and gone


def test_a_library_kept_in_a_folder_that_is_read_only_now(monkeypatch, notices, cache):
    first = build.load(notices.append, cache)
    monkeypatch.setattr(build, "_compile", None)  # would not be called
    cache.chmod(0o500)
    try:
        assert build.load(notices.append, cache).path == first.path and notices == []
    finally:
        cache.chmod(0o700)


def test_a_temporary_folder_that_is_missing_does_not_matter(monkeypatch, notices, cache):
    """Compilers put their intermediate files where TMPDIR says."""
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    assert build.load(notices.append, cache) is not None and notices == []


# --- several processes --------------------------------------------------------------------------------------------------

LOAD = """
import sys
from pathlib import Path
from kvant.config.compilers import Compiler
from kvant.native import build
build.HERE = Path(sys.argv[1])
build.find_compilers = lambda: (Compiler((sys.argv[3],), Path(sys.argv[3])),)
print(build.load(print, Path(sys.argv[2])).functions.kvant_vector_level(), flush=True)
"""


def start(cache: Path, compiler: Compiler) -> subprocess.Popen:
    command = [sys.executable, "-c", LOAD, str(build.HERE), str(cache), str(compiler.program)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_processes_that_start_together_build_once(tmp_path, cache):
    counting = script(tmp_path / "counting", f'echo once >> {tmp_path}/count; sleep 0.3; exec $REAL "$@"')
    processes = [start(cache, counting) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["3\n"] * 3
    assert (tmp_path / "count").read_text() == "once\n"


def test_a_build_that_is_killed_leaves_nothing_in_the_way(tmp_path, cache):
    slow = script(
        tmp_path / "slow", f'if [ ! -e {tmp_path}/began ]; then touch {tmp_path}/began; sleep 60; fi; exec $REAL "$@"'
    )
    process = start(cache, slow)
    for _ in range(200):
        if (tmp_path / "began").exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, 9)
    process.communicate()
    (left,) = cache.glob("build-*")
    os.utime(left, (0, 0))  # long ago
    assert start(cache, slow).communicate()[0] == "3\n"
    assert not left.exists()


def test_the_library_can_be_called(notices, cache):
    """ctypes knows what every function takes and gives."""
    functions = build.load(notices.append, cache).functions
    assert functions.kvant_create.restype is ctypes.c_void_p and len(functions.kvant_create.argtypes) >= 14
