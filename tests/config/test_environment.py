"""What the process's variables mean."""

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


def test_a_user_without_a_home(monkeypatch):
    def homeless():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="KVANT_CACHE"):
        read_environment({})


def test_a_childs_variables(monkeypatch):
    monkeypatch.setenv("KVANT_OFFLINE", "1")
    assert child_environment(A="b")["KVANT_OFFLINE"] == "1" and child_environment(A="b")["A"] == "b"
