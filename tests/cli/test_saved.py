"""Conversations in files."""

import json
from datetime import datetime

import pytest

from kvant.cli.saved import file_named, load, save
from kvant.errors import RequestError

TURNS = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "日本\n**x**"}]


@pytest.mark.parametrize("system, turns", [("", []), ("", TURNS), ("be kind", TURNS * 2)])
def test_what_is_saved_is_loaded(tmp_path, system, turns):
    path = tmp_path / "chat.json"
    save(path, "smollm2-135m", system, turns)
    assert load(path) == (system, turns)
    assert "hé" in path.read_text(encoding="utf-8") or not turns
    save(path, "smollm2-135m", system, turns)  # a conversation may be saved again


def test_a_name_without_words_suits_every_system(tmp_path):
    path = file_named("", datetime(2026, 1, 2, 3, 4, 5))
    assert path.name == "chat-2026-01-02-030405.json" and not set(path.name) & set('<>:"/\\|?*')
    assert file_named("~/x.json", datetime.now()).is_absolute()


def test_other_files_are_never_overwritten(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(RequestError, match="exists and holds no conversation"):
        save(path, "m", "", TURNS)
    assert path.read_text() == "years of work"
    with pytest.raises(RequestError, match="cannot write"):
        save(tmp_path / "no" / "chat.json", "m", "", TURNS)


@pytest.mark.parametrize(
    "content, message",
    [
        ("no json", "holds no conversation"),
        ("[" * 100_000, "holds no conversation"),
        ("[]", "holds no conversation"),
        ({"messages": []}, "holds no conversation"),
        ({"kvant_chat": 1}, "is damaged"),
        ({"kvant_chat": 1, "messages": ["x"]}, "is damaged"),
        ({"kvant_chat": 1, "messages": [{"role": "user", "content": 3}]}, "is damaged"),
        ({"kvant_chat": 1, "messages": TURNS[:1]}, "must alternate"),
        ({"kvant_chat": 1, "messages": TURNS[::-1]}, "must alternate"),
    ],
)
def test_what_cannot_be_loaded(tmp_path, content, message):
    path = tmp_path / "chat.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(RequestError, match=message):
        load(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(RequestError, match="cannot read"):
        load(tmp_path / "chat.json")
