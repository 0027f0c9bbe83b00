"""Building ends in a working library or in one clear line, whatever the folder and the compiler are like."""

import os
import stat

import pytest

from kvant.native import build


@pytest.fixture
def quick(monkeypatch):
    """Unoptimised: what is built does not matter here."""
    monkeypatch.setattr(build, "COMMON", [flag if flag != "-O3" else "-O0" for flag in build.COMMON])


@pytest.fixture
def notices():
    return []


def test_without_a_compiler_there_is_one_notice(monkeypatch, notices, tmp_path):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.load(notices.append, tmp_path) is None
    assert len(notices) == 1 and "compiler" in notices[0] and "g++" in notices[0]


def test_a_compiler_that_fails_is_reported(monkeypatch, notices, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'step.cpp:1: error: no such machine' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(broken))
    assert build.load(notices.append, tmp_path / "cache") is None
    assert "no such machine" in notices[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_built_once_kept_and_mended_when_damaged(quick, notices, tmp_path):
    first = build.load(notices.append, tmp_path)
    assert first is not None and notices == []
    made = first.path.stat().st_mtime_ns
    assert build.load(notices.append, tmp_path).path.stat().st_mtime_ns == made
    first.path.unlink()  # the loaded one stays mapped
    first.path.write_bytes(b"\x7fELF and then nothing")
    again = build.load(notices.append, tmp_path)
    assert again is not None and again.path.stat().st_size > 10_000
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".sha256", ".so"]


def test_another_cpu_is_another_key(monkeypatch):
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no compiler")
    here = build._key(compiler, build.COMMON)
    monkeypatch.setattr(build, "_cpu", lambda: b"flags: some other machine")
    assert build._key(compiler, build.COMMON) != here


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(quick, notices, tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert build.load(notices.append, tmp_path / "cache") is not None
    assert "cannot be written" in notices[0]


def test_a_folder_that_is_a_file(quick, notices, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    assert build.load(notices.append, tmp_path / "cache") is not None
    assert "cannot be written" in notices[0]
