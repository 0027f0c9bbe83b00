"""Screen: which words go where. Answers go to stdout as they are; everything about them goes elsewhere, or is dim.

    stdout     the answer, and nothing else where it is a pipe
    stderr     notices, errors, progress, numbers

Styles appear on a terminal only, and never with NO_COLOR. The library that makes them is imported there only: a pipe gets its
answer 20 ms earlier without it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# A model may write anything: an escape sequence in its answer must not move the cursor or retitle the window.
_UNPRINTABLE = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t")


class Screen:
    """The two streams of this process, looked up when they are used, so that redirecting them works at any time."""

    def __init__(self, color: bool = True):
        self.color = color

    @property
    def talks(self) -> bool:
        """Whether somebody can type questions and read the answers."""
        return sys.stdin.isatty() and sys.stdout.isatty()

    @property
    def shows_numbers(self) -> bool:
        return sys.stdout.isatty() and sys.stderr.isatty()

    def answer(self, text: str) -> None:
        """A piece of an answer, at once."""
        sys.stdout.write(text.translate(_UNPRINTABLE) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    @contextmanager
    def rendering(self, markdown: bool) -> Iterator[Callable[[str], None]]:
        """What an answer is written with: as it is, or rendered where a terminal can show styles."""
        console = self.console(sys.stdout) if markdown and self._styles(sys.stdout) else None
        if console is None or console.color_system is None:
            yield self.answer
            return
        from kvant.cli.markdown import MarkdownStream

        stream = MarkdownStream(lambda text: console.print(text, end=""))
        try:
            yield lambda text: stream.add(text.translate(_UNPRINTABLE))
        finally:
            stream.finish()

    def line(self, text: str = "", style: str = "") -> None:
        """A line on stdout."""
        self._print(sys.stdout, (text, style))

    def aside(self, text: str) -> None:
        """A dim line on stderr."""
        self._print(sys.stderr, (text, "dim"))

    def notice(self, text: str) -> None:
        self._print(sys.stderr, ("notice: ", "yellow"), (text, ""))

    def error(self, text: str) -> None:
        """One line, whatever the message holds."""
        self._print(sys.stderr, ("error: ", "bold red"), (" ".join(text.split()), ""))

    def rule(self, text: str) -> None:
        """The head of a section on stdout."""
        self.line(text, "bold")

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Shows that something goes on. On a terminal only."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.text import Text

        with self.console(sys.stderr).status(Text(text, "dim")):
            yield

    def console(self, stream: TextIO) -> "Console":
        """A console on `stream` that styles nothing unless it is a terminal that wants colours."""
        from rich.console import Console

        system = "auto" if self._styles(stream) else None
        return Console(file=stream, color_system=system, highlight=False, soft_wrap=True)

    def _styles(self, stream: TextIO) -> bool:
        return self.color and stream.isatty()

    def _print(self, stream: TextIO, *parts: tuple[str, str]) -> None:
        """One line of (text, style) parts."""
        if not self._styles(stream):
            stream.write("".join(text for text, _ in parts) + "\n")
            stream.flush()
            return
        from rich.text import Text

        self.console(stream).print(Text.assemble(*parts), soft_wrap=True)


def columns(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
