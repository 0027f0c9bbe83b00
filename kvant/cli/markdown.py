"""Markdown, rendered while it arrives: what is shown is final, nothing is ever drawn twice, so nothing flickers.

    arrives   "Some **bo"    "ld** words\n- one"    "\n"
    shown     "Some "        "bold words\n• one"    "\n"          bold in its style, the asterisks gone

What could still become a mark is held back: the first characters of a line, and an emphasis or a piece of code until it closes
(at most `HELD` characters; one that never closes is shown as it was written). Lines are not wrapped and code has no frame,
so what is copied from the terminal is text. Tables and links stay as they are.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from rich.syntax import Syntax

HELD = 240  # characters: longer than what people emphasise, short enough to wait for
CODE, HEADING, MARK = Style(color="cyan"), Style(bold=True, color="magenta"), Style(dim=True)
EMPHASIS = {1: Style(italic=True), 2: Style(bold=True), 3: Style(bold=True, italic=True)}

_FENCE = re.compile(r"\s*(?P<marks>`{3,}|~{3,})\s*(?P<language>[\w+#.-]*)[^`]*")
_RULE = re.compile(r"\s*([-*_])\s*(?:\1\s*){2,}")
_HEADING = re.compile(r"#{1,6}\s+(?=\S)")
_BULLET = re.compile(r"(?P<indent>\s*)[-*+]\s+(?=\S)")
_NUMBER = re.compile(r"\s*\d{1,3}[.)]\s+(?=\S)")
_QUOTE = re.compile(r"\s*>\s?")
# A line that is nothing but this so far may become any of the above.
_UNDECIDED = re.compile(r"\s*(?:#{1,6}\s*|[-+]\s*|(?:[-*_]\s*)+|\d{1,3}(?:[.)]\s*)?|`{1,2}|~{1,2}|`{3}[^`]*`*|~{3}.*)?")
_SPECIAL = re.compile(r"[\\`*_]")


class MarkdownStream:
    """One answer. `write` receives pieces of styled text, to be shown one behind the other."""

    def __init__(self, write: Callable[[Text], None]):
        self._write = write
        self._held = ""  # of the line at hand
        self._in_line = False  # whether its kind is decided, and perhaps some of it shown
        self._style = Style()
        self._before = ""  # the last character shown of the line
        self._fence: str | None = None
        self._syntax: Syntax | None = None

    def add(self, text: str) -> None:
        """Shows what these characters complete."""
        *lines, rest = text.split("\n")
        for line in lines:
            self._held += line
            self._end_line()
        self._held += rest
        if self._held and self._fence is None:
            self._advance(ended=False)

    def finish(self) -> None:
        """Shows what is held back. Ends the stream."""
        if self._fence is None:
            if self._held:
                self._advance(ended=True)
        elif not self._closes(self._held):
            self._write(self._code(self._held))
        self._held = ""

    # --- lines -----------------------------------------------------------------------------------------------------------

    def _end_line(self) -> None:
        if self._fence is not None:
            self._end_code_line()
        elif not self._in_line and (fence := _FENCE.fullmatch(self._held)):
            self._fence = fence["marks"]
            self._syntax = _syntax(fence["language"])
        else:
            self._advance(ended=True)
            self._write(Text("\n"))
        self._held, self._in_line, self._style, self._before = "", False, Style(), ""

    def _end_code_line(self) -> None:
        if self._closes(self._held):
            self._fence = None
        else:
            self._write(self._code(self._held).append("\n"))

    def _closes(self, line: str) -> bool:
        """Whether the line ends the code: as many marks as began it, or more, and nothing else."""
        assert self._fence is not None
        return line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0])

    def _code(self, line: str) -> Text:
        """One line of code. Each is highlighted by itself: a text over several lines loses its colour, nothing else."""
        if self._syntax is None:
            return Text(line, CODE)
        text = self._syntax.highlight(line)
        text.right_crop(len(text) - len(line))
        return text

    def _advance(self, ended: bool) -> None:
        if not self._in_line:
            if not ended and _UNDECIDED.fullmatch(self._held):
                return
            self._begin_line()
        shown, self._held = self._inline(self._held, self._style, ended)
        if shown:
            self._write(shown)
            self._before = shown.plain[-1]

    def _begin_line(self) -> None:
        """Takes the marks from the line's beginning, and shows what stands for them."""
        self._in_line = True
        held = self._held
        if _RULE.fullmatch(held):
            self._held = ""
            self._write(Text("─" * 40, MARK))
        elif match := _HEADING.match(held):
            self._held, self._style = held[match.end() :], HEADING
        elif match := _BULLET.match(held):
            self._held = held[match.end() :]
            self._write(Text(match["indent"]).append("• ", MARK))
        elif match := _NUMBER.match(held) or _QUOTE.match(held):
            self._held = held[match.end() :]
            self._write(Text(match[0], MARK))

    # --- within a line ---------------------------------------------------------------------------------------------------

    def _inline(self, text: str, style: Style, ended: bool) -> tuple[Text, str]:
        """What can be shown of `text`, and what must wait for more."""
        shown, at = Text(), 0
        while (mark := _SPECIAL.search(text, at)) is not None:
            shown.append(text[at : mark.start()], style)
            at = mark.start()
            before = shown.plain[-1:] or self._before
            piece = self._piece(text, at, style, before, ended or len(text) - at > HELD)
            if piece is None:
                return shown, text[at:]
            shown.append_text(piece[0])
            at = piece[1]
        return shown.append(text[at:], style), ""

    def _piece(self, text: str, at: int, style: Style, before: str, ended: bool) -> tuple[Text, int] | None:
        """The styled piece that begins with the mark at `at`, and where it ends; None: more text must come first."""
        if text[at] == "\\":
            if at + 1 == len(text) and not ended:
                return None
            literal = text[at + 1 : at + 2]
            escapes = literal and not literal.isalnum() and not literal.isspace()
            return Text(literal if escapes else "\\", style), at + 2 if escapes else at + 1
        run = len(text) - at - len(text[at:].lstrip(text[at]))
        inside = at + run
        if inside == len(text) and not ended:
            return None
        as_written = Text(text[at:inside], style), inside
        if text[at] == "`":
            closing = re.compile(rf"(?<!`)`{{{run}}}(?!`)").search(text, inside)
        elif run > 3 or text[inside : inside + 1].isspace() or (text[at] == "_" and before.isalnum()):
            return as_written
        else:
            mark, word = re.escape(text[at]), r"(?!\w)" if text[at] == "_" else ""
            closing = re.compile(rf"(?<=[^\s\\{mark}]){mark}{{{run}}}(?!{mark}){word}").search(text, inside + 1)
        if closing is None:
            return as_written if ended else None
        content = text[inside : closing.start()]
        if text[at] == "`":
            return Text(content.strip(" ") or content, style + CODE), closing.end()
        return self._inline(content, style + EMPHASIS[run], ended=True)[0], closing.end()


def _syntax(language: str) -> "Syntax | None":
    if not language:
        return None
    from rich.syntax import Syntax  # and with it the highlighter, which an answer without code does not need

    syntax = Syntax("", language, theme="ansi_dark", background_color="default")
    return syntax if syntax.lexer is not None else None
