from hypothesis import given
from hypothesis import strategies as st

from kvant.tokenizer.added_tokens import AddedToken, AddedTokens
from kvant.tokenizer.template_text import Span

TOKENS = [
    AddedToken(text, number, control=number % 2 == 0) for number, text in enumerate(["<a>", "<", "<ab>", "  ", "    ", "b"])
]


def naive(text: str, content: list[Span]) -> list[tuple[int, int, int]]:
    """Leftmost, then longest; control tokens must not touch content."""
    found, position = [], 0
    inside = {index for span in content for index in range(span.start, span.stop)}
    while position < len(text):
        here = [t for t in TOKENS if text.startswith(t.text, position)]
        here = [t for t in here if not (t.control and inside & set(range(position, position + len(t.text))))]
        if not here:
            position += 1
            continue
        longest = max(here, key=lambda t: len(t.text))
        found.append((position, position + len(longest.text), longest.id))
        position += len(longest.text)
    return found


@given(text=st.text(alphabet="<ab> ", max_size=20), cuts=st.lists(st.integers(0, 20), max_size=6))
def test_leftmost_longest_and_no_control_in_content(text, cuts):
    cuts = sorted({cut for cut in cuts if cut <= len(text)})
    content = [Span(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    assert list(AddedTokens(TOKENS).find(text, content)) == naive(text, content)


def test_no_tokens_at_all():
    assert list(AddedTokens([]).find("text")) == []
    assert list(AddedTokens([AddedToken("", 1, True)]).find("text")) == []
