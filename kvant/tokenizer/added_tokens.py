"""Finds the tokens that are matched whole, before any merging: control tokens and user-defined ones.

Leftmost match wins, then the longest, as the `tokenizers` library does it. A control token counts only when none of its
characters lies in a content span: that is how message content stays plain text (R03), and the text around it is still
encoded in one piece, so borders of content never change a merge.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvant.tokenizer.template_text import Span


class AddedToken(NamedTuple):
    """A token matched whole. `lstrip` and `rstrip` swallow white space beside it; `single_word` needs borders of words."""

    text: str
    id: int
    control: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Found(NamedTuple):
    start: int
    stop: int
    id: int


class AddedTokens:
    """All added tokens of one vocabulary, indexed by their first two characters."""

    def __init__(self, tokens: Iterable[AddedToken]):
        self._tokens = {token.text: token for token in tokens if token.text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        starts = sorted({text[:2] for text in self._tokens})
        self._start = re.compile("|".join(map(re.escape, starts))) if starts else None

    def find(self, text: str, content: Sequence[Span] = ()) -> Iterator[Found]:
        """The added tokens of `text` in order; `content` are disjoint spans, in order, in which no control token counts."""
        if self._start is None:
            return
        starts = [span.start for span in content]
        position = 0
        while (candidate := self._start.search(text, position)) is not None:
            token = self._longest(text, candidate.start(), content, starts)
            if token is None:
                position = candidate.start() + 1
                continue
            start, stop = candidate.start(), candidate.start() + len(token.text)
            if token.lstrip:
                start = max(position, len(text[:start].rstrip()))
            if token.rstrip:
                stop += len(text[stop:]) - len(text[stop:].lstrip())
            yield Found(start, stop, token.id)
            position = stop

    def _longest(self, text: str, start: int, content: Sequence[Span], starts: list[int]) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._tokens.get(text[start : start + length])
            if token is None:
                continue
            stop = start + length
            if token.control and content and _overlaps(start, stop, content, starts):
                continue
            if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])):
                continue
            return token
        return None


def _overlaps(start: int, stop: int, content: Sequence[Span], starts: list[int]) -> bool:
    """Whether [start, stop) shares a character with one of the spans."""
    index = bisect_right(starts, stop - 1) - 1  # the last span that begins before stop
    return index >= 0 and content[index].stop > start


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
