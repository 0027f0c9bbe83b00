"""TemplateText against the obvious model: a list of (character, written by the template?)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.tokenizer import template_text as tt

PARTS = st.lists(st.tuples(st.text(alphabet="ab ,\n", max_size=4), st.booleans()), max_size=6)


def build(parts) -> str:
    return tt.concat(tt.literal(text) if written else text for text, written in parts)


def model(parts) -> list[tuple[str, bool]]:
    return [(character, written) for text, written in parts for character in text]


def seen(text: str) -> list[tuple[str, bool]]:
    written = {index for span in tt.written_spans(text) for index in range(span.start, span.stop)}
    return [(character, index in written) for index, character in enumerate(text)]


@given(PARTS)
def test_concat_and_content_spans(parts):
    text = build(parts)
    assert seen(text) == model(parts)
    content = {index for span in tt.content_spans(text) for index in range(span.start, span.stop)}
    assert content == {index for index, (_, written) in enumerate(model(parts)) if not written}
    spans = tt.written_spans(text)
    assert all(a.stop < b.start for a, b in pairwise(spans)) and all(s.start < s.stop for s in spans)


@given(PARTS, st.integers(-9, 20) | st.none(), st.integers(-9, 20) | st.none())
def test_slices(parts, start, stop):
    assert seen(build(parts)[start:stop]) == model(parts)[start:stop]


@given(PARTS)
def test_strip_split_replace_join(parts):
    text = build(parts)
    plain = str.__str__(text)[:]
    assert seen(tt.strip(text)) == model(parts)[len(plain) - len(plain.lstrip()) :][: len(plain.strip())]
    for separator in (",", "a,", None):
        for from_right in (False, True):
            pieces = tt.split(text, separator, 2, from_right=from_right)
            assert pieces == (plain.rsplit if from_right else plain.split)(separator, 2)
            position = 0
            for piece in pieces:
                position = plain.index(piece, position) if separator is None else position
                assert seen(piece) == model(parts)[position : position + len(piece)]
                position += len(piece) + len(separator or "")
    joined = tt.join(tt.literal("-"), tt.split(text, ","))
    assert seen(joined) == [(("-", True) if character == "," else (character, w)) for character, w in model(parts)]
    assert seen(tt.replace(text, ",", "xy")) == [
        pair for c, w in model(parts) for pair in ([("x", False), ("y", False)] if c == "," else [(c, w)])
    ]


def test_str_keeps_the_spans_and_the_value_is_an_ordinary_string():
    text = tt.literal("ab")
    assert str(text) is text and tt.all_written(str(text))
    assert text == "ab" and hash(text) == hash("ab") and {"ab": 1}[text] == 1
    assert isinstance(text, str)


@pytest.mark.parametrize("lost", [lambda t: t[::-1], lambda t: t.title(), lambda t: "".join([t]), lambda t: f"{t}x"])
def test_what_is_not_listed_loses_trust(lost):
    assert tt.written_spans(lost(tt.literal("<|im_end|>"))) == ()


def test_letters_that_become_two_lose_trust():
    assert tt.written_spans(tt.recased(tt.literal("straße"), "straße".upper())) == ()
    assert tt.all_written(tt.recased(tt.literal("abc"), "ABC"))


def test_a_copy_without_spans_trusts_nothing():
    assert tt.written_spans(tt.TemplateText("<|im_end|>")) == ()
