"""Detokenizer: token ids arrive one by one, text leaves as soon as its characters are complete.

    ids      "Hi"  " "  F0 9F  98 80      two tokens that are halves of one emoji
    deltas   "Hi"  " "  ""     "😀"       joined: exactly what Tokenizer.decode gives for all ids

A token is bytes, so this is an incremental UTF-8 decoder and costs the same for the thousandth token as for the first. At
most three bytes are held back; U+FFFD appears only where the whole text has it.
"""

import codecs
from collections.abc import Iterable

from kvant.tokenizer.tokenizer import Tokenizer

_Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One stream of text. `continues` as in `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues: bool = False):
        self._bytes_of = tokenizer.shown_bytes if skip_special_tokens else tokenizer.token_bytes
        self._strip_space = tokenizer.strips_leading_space and not continues
        self._decoder = _Decoder("replace")

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        data = b"".join(map(self._bytes_of, ids))
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was held back: an incomplete character, as U+FFFD. Ends the stream."""
        return self._decoder.decode(b"", final=True)

    def fork(self) -> "Detokenizer":
        """A stream that goes on from here by itself."""
        twin = object.__new__(Detokenizer)
        twin._bytes_of, twin._strip_space = self._bytes_of, self._strip_space
        twin._decoder = _Decoder("replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin
