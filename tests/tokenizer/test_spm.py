"""The SentencePiece encoder against the definition: join the best-scoring neighbours, leftmost first, until none is a token."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.tokenizer.spm import SentencePieceEncoder
from kvant.tokenizer.vocabulary import TokenKind

WORDS = ["▁", "a", "b", "c", ">", "ab", "aa", "▁a", "aab", "bc", "▁ab", "abc", "▁▁", ">▁a", "a▁", "aaa", "ca"]
SCORES = [0.0] * 5 + [-3.0, -2.0, -4.0, -5.0, -1.0, -6.0, -7.0, -2.5, -8.0, -9.0, -2.0, -2.0]


def encoder(*, with_bytes: bool, unk: int | None = 0) -> tuple[SentencePieceEncoder, list[str]]:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    tokens = ["<unk>", *WORDS, *bytes_]
    kinds = [TokenKind.UNKNOWN, *[TokenKind.NORMAL] * len(WORDS), *[TokenKind.BYTE] * len(bytes_)]
    return SentencePieceEncoder(tokens, [0.0, *SCORES, *[0.0] * len(bytes_)], kinds, unk, False), tokens


def definition(text: str) -> list[str]:
    scores = dict(zip(WORDS, SCORES, strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], n) for n, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(st.text(alphabet="abc> ", max_size=30))
@settings(max_examples=400, deadline=None)
def test_equals_the_definition_on_the_whole_text(text):
    """The text is cut at words for speed; tokens that reach across ("a▁", ">▁a") must still be found."""
    spm, tokens = encoder(with_bytes=True)
    assert [tokens[number] for number in spm.encode(text, at_start=True)] == definition(text)


def test_characters_without_a_token_are_their_bytes():
    spm, tokens = encoder(with_bytes=True)
    assert [tokens[number] for number in spm.encode("aé", at_start=True)] == ["a", "<0xC3>", "<0xA9>"]


def test_without_bytes_neighbouring_unknowns_are_one():
    spm, tokens = encoder(with_bytes=False)
    assert [tokens[number] for number in spm.encode("aéča", at_start=True)] == ["a", "<unk>", "a"]
    spm, _ = encoder(with_bytes=False, unk=None)
    assert spm.encode("é", at_start=True) == []


def test_spelled_bytes_and_controls_are_text():
    spm, tokens = encoder(with_bytes=True)
    ids = spm.encode("<0x41>", at_start=True)
    assert len(ids) == 6 and tokens.index("<0x41>") not in ids
