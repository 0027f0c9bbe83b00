"""TemplateText: a string that remembers which of its characters the chat template itself wrote.

A message may spell `<|im_end|>`; only the template may *mean* it. So trust is what is tracked, not distrust: the literals of
a template (and bos_token, eos_token) are TemplateText, everything else that reaches the output is content. An operation
that is not listed here loses the spans, and the text counts as content: it fails closed.

    '<|im_start|>' + role + '\\n' + content          the template's literals and what it joined them with
    [0 ......... 12)      [16, 17)                   written: spans of the template's own characters
                   user            <|im_end|>        content: can never become a control token

Values stay ordinary strings for the template's logic (`'<think>' in content`, slices, comparisons), because content is
not wrapped at all. Rejected: sentinels around content (they break trim, slices and comparisons) and rendering twice
with neutralised content (conditionals on content then take another path).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """Characters [start, stop) of a text."""

    start: int
    stop: int


class TemplateText(str):
    """Text with the spans that the template wrote, in order and disjoint. `TemplateText(text)` alone trusts nothing."""

    __slots__ = ("_written",)
    _written: tuple[Span, ...]

    def __new__(cls, text: str, written: tuple[Span, ...] = ()) -> "TemplateText":
        self = super().__new__(cls, text)
        self._written = written
        return self

    def __str__(self) -> str:
        return self  # str() of a subclass would otherwise drop the spans

    def __getitem__(self, key: object) -> str:
        """Slices of step 1 keep their spans; everything else is content."""
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            return cut(self, start, max(start, stop))
        return super().__getitem__(key)  # type: ignore[index]


def literal(text: str) -> TemplateText:
    """Text written by the template, every character of it."""
    return TemplateText(text, (Span(0, len(text)),) if text else ())


def written_spans(text: str) -> tuple[Span, ...]:
    return text._written if isinstance(text, TemplateText) else ()


def content_spans(text: str) -> tuple[Span, ...]:
    """The complement of the written spans: what came from messages, tools, or through an untracked operation."""
    spans, position = [], 0
    for start, stop in written_spans(text):
        if position < start:
            spans.append(Span(position, start))
        position = stop
    if position < len(text):
        spans.append(Span(position, len(text)))
    return tuple(spans)


def concat(parts: Iterable[str]) -> str:
    """The parts in a row, neighbouring spans merged."""
    parts = list(parts)
    spans: list[Span] = []
    offset = 0
    for part in parts:
        for start, stop in written_spans(part):
            start, stop = start + offset, stop + offset
            if spans and spans[-1].stop == start:
                spans[-1] = Span(spans[-1].start, stop)
            else:
                spans.append(Span(start, stop))
        offset += len(part)
    return _tracked("".join(parts), spans)


def cut(text: str, start: int, stop: int) -> str:
    """text[start:stop] for 0 <= start <= stop <= len(text)."""
    written = written_spans(text)
    spans: list[Span] = []
    for index in range(bisect_right(written, start, key=lambda span: span.stop), len(written)):
        first, last = written[index]
        if first >= stop:
            break
        spans.append(Span(max(first, start) - start, min(last, stop) - start))
    return _tracked(str.__getitem__(text, slice(start, stop)), spans)


def strip(text: str, chars: str | None = None, *, left: bool = True, right: bool = True) -> str:
    start = len(text) - len(text.lstrip(chars)) if left else 0
    stop = len(text.rstrip(chars)) if right else len(text)
    return cut(text, start, max(start, stop))


def join(separator: str, parts: Iterable[str]) -> str:
    def interleaved() -> Iterator[str]:
        for index, part in enumerate(parts):
            if index:
                yield separator
            yield part

    return concat(interleaved())


def split(text: str, separator: str | None = None, limit: int = -1, *, from_right: bool = False) -> list[str]:
    """str.split and str.rsplit: the pieces are found again one after the other, so each keeps its spans."""
    pieces = str.rsplit(text, separator, limit) if from_right else str.split(text, separator, limit)
    located, position = [], 0
    for piece in pieces:
        position = text.index(piece, position) if separator is None else position
        located.append(cut(text, position, position + len(piece)))
        position += len(piece) + (len(separator) if separator is not None else 0)
    return located


def replace(text: str, old: str, new: str, limit: int = -1) -> str:
    if not old or not (written_spans(text) or written_spans(new)):
        return str.replace(text, old, new, limit)
    return join(new, split(text, old, limit))


def recased(text: str, changed: str) -> str:
    """`changed` is `text` in other letters. Where a letter became two (ß, ŉ), positions are lost and with them the trust."""
    return TemplateText(changed, written_spans(text)) if len(changed) == len(text) else changed


def repeat(text: str, times: int) -> str:
    """text * times. Only text that the template wrote alone keeps its spans."""
    repeated = str.__mul__(text, times)
    return literal(repeated) if all_written(text) else repeated


def all_written(text: str) -> bool:
    return written_spans(text) == (Span(0, len(text)),)


def _tracked(text: str, spans: list[Span]) -> str:
    return TemplateText(text, tuple(spans)) if spans else text
