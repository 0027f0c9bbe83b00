"""Which compilers are found, in which order, and what they are told."""

import sys
from pathlib import Path

import pytest

from kvant.config import compilers
from kvant.config.compilers import Compiler, find_compilers, remedy


def nothing(name=None):
    return None


def test_compilers_of_the_system_come_before_the_package(tmp_path):
    found = find_compilers({"g++": "/bin/g++", "clang++": "/bin/clang++"}.get, lambda: tmp_path)
    assert [str(each) for each in found] == ["/bin/g++", "/bin/clang++", "python -m ziglang c++"]
    assert found[-1].command == (sys.executable, "-m", "ziglang", "c++") and found[-1].program == tmp_path / "zig"
    assert find_compilers(nothing, nothing) == ()


def test_two_names_of_one_program_count_once(tmp_path):
    (tmp_path / "g++").write_text("")
    (tmp_path / "c++").symlink_to(tmp_path / "g++")
    (found,) = find_compilers(lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None, nothing)
    assert str(found) == f"{tmp_path}/c++" and found.program == tmp_path / "g++"


@pytest.mark.parametrize(
    ("machine", "cpu", "gcc", "zig"),
    [
        ("x86_64", "native", ["-march=native"], ["-mcpu=native"]),
        ("x86_64", "baseline", ["-march=x86-64"], ["-mcpu=baseline"]),
        ("AMD64", "x86-64-v3", ["-march=x86-64-v3"], ["-mcpu=x86_64_v3"]),
        ("aarch64", "native", ["-mcpu=native"], ["-mcpu=native"]),
        ("arm64", "baseline", [], ["-mcpu=baseline"]),
        ("riscv64", "baseline", [], ["-mcpu=baseline"]),
    ],
)
def test_targets(monkeypatch, machine, cpu, gcc, zig):
    monkeypatch.setattr(compilers.platform, "machine", lambda: machine)
    assert Compiler(("g++",), Path("/bin/g++")).target(cpu) == gcc
    assert Compiler(("python", "-m", "ziglang", "c++"), Path("/zig")).target(cpu) == zig


def test_features(monkeypatch):
    monkeypatch.setattr(compilers.platform, "machine", lambda: "x86_64")
    assert Compiler(("g++",), Path("g++")).target("x86-64-v3", ("avxvnni",)) == ["-march=x86-64-v3", "-mavxvnni"]
    zig = Compiler(("python", "-m", "ziglang", "c++"), Path("/zig"))
    assert zig.target("x86-64-v4", ("avx512vnni",)) == ["-mcpu=x86_64_v4+avx512vnni"]


def test_the_remedy_names_a_package_that_needs_no_root(monkeypatch):
    assert "apt install g++" in remedy() and "pip install ziglang" in remedy()
    monkeypatch.setattr(compilers.platform, "system", lambda: "Darwin")
    assert "xcode-select --install" in remedy()
