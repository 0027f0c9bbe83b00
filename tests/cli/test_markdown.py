"""Markdown as it arrives: the same result however it is cut, marks gone where they mean something, everything else kept."""

import random
from itertools import pairwise

import pytest
from rich.style import Style
from rich.text import Text

from kvant.cli.markdown import CODE, EMPHASIS, HEADING, HELD, MarkdownStream

DOCUMENT = """# A title
Some **bold** and *italic* and ***both***, `code *x*` and ``a`b``. 2 * 3 * 4 = 24; snake_case_name and _so_.
- one **b**
* two
  - nested
1. first
22) more
> quoted *x*
---
| a | b |
|---|---|
| 1 | 2 |
An unclosed **thing here
escaped \\*not\\* and \\n and a path C:\\

```python
def f(x):  # **not bold**
    return x
```
~~~
plain
~~~
`start` of line, https://example.org/a_b_c [text](http://x.y/z)
**Bold** start 🙂 日本語 **強調** end"""


def render(document: str, *cuts: int) -> Text:
    pieces = []
    stream = MarkdownStream(pieces.append)
    places = [0, *cuts, len(document)]
    for start, stop in pairwise(places):
        stream.add(document[start:stop])
    stream.finish()
    return Text().join(pieces)


def style_of(text: Text, words: str) -> Style:
    """The style of all of `words`, which must be one."""
    start = text.plain.index(words)
    styles = {at: [span.style for span in text.spans if span.start <= at < span.end] for at in range(start, start + len(words))}
    combined = {str(Style.combine([Style(), *(s for s in found if isinstance(s, Style))])) for found in styles.values()}
    assert len(combined) == 1, combined
    return Style.parse(combined.pop())


@pytest.mark.parametrize(
    "source, shown",
    [
        ("**a** *b* ***c*** `d`", "a b c d"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("snake_case_name and __init__", "snake_case_name and init"),
        ("a*b", "a*b"),
        ("**open", "**open"),
        ("`open", "`open"),
        ("- a\n* b\n+ c", "• a\n• b\n• c"),
        ("-1 is a number, - is not", "-1 is a number, - is not"),
        ("# Title\n#hashtag", "Title\n#hashtag"),
        ("***", "─" * 40),
        ("**a\nb**", "**a\nb**"),
        ("`` a`b ``", "a`b"),
        ("\\*a\\* \\x \\\\", "*a* \\x \\"),
        ("```python\nx = 1\n```\nend", "x = 1\nend"),
        ("```\n**x**", "**x**"),
        ("~~~\n```\n~~~", "```\n"),
        ("1. a\n2) b\n1234. c", "1. a\n2) b\n1234. c"),
        ("> a", "> a"),
        ("a **b `c*d` e** f", "a b c*d e f"),
        ("", ""),
        ("\n\n", "\n\n"),
        ("   ", "   "),
    ],
)
def test_what_is_shown(source, shown):
    assert render(source).plain == shown


def test_styles():
    text = render(DOCUMENT)
    assert style_of(text, "A title") == HEADING
    assert (
        style_of(text, "bold") == EMPHASIS[2]
        and style_of(text, "italic") == EMPHASIS[1]
        and style_of(text, "both") == EMPHASIS[3]
    )
    assert style_of(text, "code *x*") == CODE and style_of(text, "plain") == CODE
    assert style_of(text, "snake_case_name") == Style() and style_of(text, "a_b_c") == Style()
    assert style_of(text, "強調") == EMPHASIS[2]
    assert style_of(text, "def").color is not None and style_of(text, "return").color is not None


def test_however_it_is_cut_the_result_is_the_same():
    whole = render(DOCUMENT)
    rng = random.Random(5)
    for cuts in [range(1, len(DOCUMENT)), *(sorted(rng.sample(range(1, len(DOCUMENT)), 40)) for _ in range(30))]:
        pieces = render(DOCUMENT, *cuts)
        assert pieces.plain == whole.plain
        for words in ("bold", "code *x*", "A title", "return", "強調"):
            assert style_of(pieces, words) == style_of(whole, words)


def test_plain_words_are_shown_as_they_come():
    shown = []
    stream = MarkdownStream(lambda text: shown.append(text.plain))
    for piece in ("Hel", "lo", " there", ", **wor", "ld**", "!"):
        stream.add(piece)
    assert shown == ["Hel", "lo", " there", ", ", "world", "!"]


def test_what_never_closes_is_not_held_for_long():
    shown = []
    stream = MarkdownStream(lambda text: shown.append(text.plain))
    stream.add("**")
    for _ in range(HELD):
        stream.add("ab")
    assert len("".join(shown)) > HELD
    stream.finish()
    assert "".join(shown) == "**" + "ab" * HELD


def test_a_stranger_s_text_takes_no_time_and_loses_nothing():
    rng = random.Random(1)
    for _ in range(200):
        source = "".join(rng.choice("ab *_`\\#->~1.\n") for _ in range(200))
        text = render(source, *range(1, len(source), 3)).plain
        assert [c for c in text if c in "ab"] == [c for c in source if c in "ab"] or "```" in source or "~~~" in source
    render("*" * 20_000)
    render("`*_" * 5_000, *range(1, 15_000))
