"""Messages typed in a terminal: several lines in one, and the history of them.

    > a line                        one message
    > it goes on \\                  a backslash at the end: the next line belongs to it
    . here
    > \"\"\"any number of lines        triple quotes: everything until the next ones
    . \"\"\"

With `readline` (not on Windows) lines are edited, and those of earlier chats come back with the arrow keys.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROMPT, CONTINUED = "> ", ". "
QUOTES = '"""'
HISTORY_LINES = 1000


def read_message(read: Callable[[str], str] = input) -> str:
    """One message. Raises what `read` raises: EOFError, KeyboardInterrupt."""
    text = read(PROMPT)
    if text.strip().startswith(QUOTES):
        return _quoted(text.strip().removeprefix(QUOTES), read)
    lines = [text]
    while _goes_on(lines[-1]):
        lines[-1] = lines[-1].rstrip().removesuffix("\\").rstrip()
        lines.append(read(CONTINUED))
    return "\n".join(lines)


def _goes_on(line: str) -> bool:
    """Whether it ends with a backslash; two of them are a text that ends with backslashes, a Windows path for example."""
    return line.rstrip().endswith("\\") and not line.rstrip().endswith("\\\\")


def _quoted(first: str, read: Callable[[str], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read(CONTINUED))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


@contextmanager
def history(path: Path | None) -> Iterator[None]:
    """Inside, `input` edits lines and remembers them, and `path` keeps them from chat to chat. None: for this chat only."""
    try:
        readline: Any = importlib.import_module("readline")
    except ImportError:  # a system without it: plain lines
        yield
        return
    readline.set_history_length(HISTORY_LINES)
    if path is not None:
        with suppress(OSError):  # the first chat, or a file that cannot be read
            readline.read_history_file(path)
    try:
        yield
    finally:
        if path is not None:
            _keep(readline, path)


def _keep(readline: Any, path: Path) -> None:
    """Writes the history, readable by its owner alone. A folder that cannot be written is no reason to disturb a chat."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)
