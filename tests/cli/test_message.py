"""Messages of several lines, and the history that is kept between chats."""

import os
import stat
import sys

import pytest

from kvant.cli.message import history, read_message


@pytest.mark.parametrize(
    "typed, message",
    [
        (["hello"], "hello"),
        ([""], ""),
        (["one \\", "two\\", "three"], "one\ntwo\nthree"),
        (["C:\\folder\\\\"], "C:\\folder\\\\"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one line"""'], "one line"),
        (['"""a \\', 'b"""'], "a \\\nb"),
        (["\\", "x"], "\nx"),
    ],
)
def test_messages(typed, message):
    prompts, lines = [], iter(typed)

    def read(prompt):
        prompts.append(prompt)
        return next(lines)

    assert read_message(read) == message
    assert prompts == ["> "] + [". "] * (len(typed) - 1)


def test_leaving_in_the_middle_leaves():
    def read(prompt):
        if prompt == ". ":
            raise EOFError
        return '"""begin'

    with pytest.raises(EOFError):
        read_message(read)


def test_history_is_kept_for_its_owner_alone(tmp_path):
    readline = pytest.importorskip("readline")
    path = tmp_path / "folder" / "chat_history"
    readline.clear_history()
    with history(path):
        readline.add_history("a question")
    assert "a question" in path.read_text()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    readline.clear_history()
    with history(path):
        assert readline.get_history_item(1) == "a question"
    readline.clear_history()


def test_a_history_that_cannot_be_kept_disturbs_nobody(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with history(tmp_path / "file" / "chat_history"):
        pass
    monkeypatch.setitem(sys.modules, "readline", None)  # Windows
    with history(tmp_path / "chat_history"):
        pass
    assert not (tmp_path / "chat_history").exists()
