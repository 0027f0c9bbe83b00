"""What the process's variables mean."""

import tempfile
from pathlib import Path

import pytest

from kvant.config.environment import child_environment, read_environment
from kvant.errors import ConfigError


def test_the_cache_folder():
    assert read_environment({}).cache == Path.home() / ".cache" / "kvant"
    assert read_environment({"XDG_CACHE_HOME": "/x"}).cache == Path("/x/kvant")
    assert read_environment({"XDG_CACHE_HOME": "relative"}).cache == Path.home() / ".cache" / "kvant"
    assert read_environment({"XDG_CACHE_HOME": "/x", "KVANT_CACHE": "/y"}).cache == Path("/y")
    assert read_environment({"KVANT_CACHE": "~/z"}).cache == Path.home() / "z"
    assert read_environment({"KVANT_CACHE": "z"}).cache == Path.cwd() / "z"


@pytest.mark.parametrize(
    "text, offline", [("1", True), ("true", True), ("yes", True), ("0", False), ("", False), ("No", False)]
)
def test_offline(text, offline):
    assert read_environment({"KVANT_OFFLINE": text}).offline is offline


def test_color():
    assert read_environment({}).color and read_environment({"NO_COLOR": ""}).color
    assert not read_environment({"NO_COLOR": "0"}).color


def test_a_user_without_a_home(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = read_environment({}).cache
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert read_environment({}).cache == folder
    folder.chmod(0o777)  # somebody else could lay a program there
    with pytest.raises(ConfigError, match="KVANT_CACHE"):
        read_environment({})


def test_instruction_set():
    assert read_environment({}).isa == read_environment({"KVANT_ISA": ""}).isa == "native"
    assert read_environment({"KVANT_ISA": "avx2"}).isa == "avx2"


def test_a_childs_variables(monkeypatch):
    monkeypatch.setenv("KVANT_OFFLINE", "1")
    assert child_environment(A="b")["KVANT_OFFLINE"] == "1" and child_environment(A="b")["A"] == "b"


@pytest.mark.parametrize("text, limit", [("", 8 << 30), ("0", 0), ("0.5", 1 << 29), ("-3", 0), ("2", 2 << 30)])
def test_the_limit_of_packed_weights(text, limit):
    environment = read_environment({"KVANT_CACHE": "/y", "KVANT_PACKED_GIB": text})
    assert environment.packed_limit == limit and environment.packed == Path("/y/packed")


@pytest.mark.parametrize("text", ["much", "1 GiB", "inf", "nan"])
def test_a_limit_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match=r"KVANT_PACKED_GIB must be a number of GiB"):
        read_environment({"KVANT_PACKED_GIB": text})
