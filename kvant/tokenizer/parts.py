"""What every source of a tokenizer delivers: a vocabulary, an encoder for plain text, the tokens matched whole, templates."""

from typing import NamedTuple, Protocol

from kvant.tokenizer.added_tokens import AddedToken
from kvant.tokenizer.vocabulary import Roles, Spelling, TokenKind, Vocabulary


class Encoder(Protocol):
    """Ids of plain text, which holds no added tokens. `at_start`: the text stands at the beginning of the whole one."""

    def encode(self, text: str, *, at_start: bool) -> list[int]: ...


class Parts(NamedTuple):
    vocabulary: Vocabulary
    encoder: Encoder
    added: list[AddedToken]
    templates: dict[str, str]  # by name; "default" is the one for every day


class ByteEncoder:
    """A token is a byte: for networks of random weights, which have no tokenizer."""

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        return list(text.encode())


def bytes_only() -> Parts:
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [int(TokenKind.BYTE)] * 256
    vocabulary = Vocabulary(tokens=tokens, kinds=kinds, spelling=Spelling.SENTENCEPIECE, roles=Roles())
    return Parts(vocabulary, ByteEncoder(), [], {})
