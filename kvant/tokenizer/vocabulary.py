"""Vocabulary: what each id means. Which bytes it stands for, which kind it is, and which ids have a role.

    kind          in text                                bytes
    NORMAL        found by the merges                    its characters, decoded by the vocabulary's spelling
    BYTE          falls in for characters without one    one byte, <0x0A>
    USER_DEFINED  always found, whole                    its characters
    CONTROL       found only where control is allowed    its characters, when shown at all

Two spellings exist: byte-level (GPT-2: 256 printable characters stand for the bytes) and SentencePiece ("▁" is a space).
Numbers of the kinds are GGUF's (llama_token_type).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cache


class TokenKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"


# What chat models write when their turn or their text is over. Where the vocabulary has one of these as a control token, it
# ends generation although the file names another one: files that name a single end token are common (R09).
END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<eos>",
    "</s>", "<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>", "<EOT>", "<|return|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The ids that mean something to the engine, and what is done at the borders of a text."""

    bos_id: int | None = None
    eos_id: int | None = None  # the one the file names first: what chat templates call eos_token
    eos_ids: frozenset[int] = frozenset()
    unk_id: int | None = None
    add_bos: bool = False
    leading_space: bool = False  # the first word was spelled with a space that the text does not have


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Vocabulary:
    """`tokens[id]` and `kinds[id]`, the kinds as plain integers of TokenKind. Ids without a token are "" and UNUSED."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    spelling: Spelling
    roles: Roles
    ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        ids.pop("", None)
        object.__setattr__(self, "ids", ids)

    def __len__(self) -> int:
        return len(self.tokens)

    def of_kind(self, *kinds: TokenKind) -> list[int]:
        wanted = frozenset(map(int, kinds))
        return [number for number, kind in enumerate(self.kinds) if kind in wanted]

    def bytes_of(self, number: int) -> bytes:
        """The exact bytes the token stands for; nothing for ids beyond the vocabulary (padding rows of a head)."""
        if not 0 <= number < len(self.tokens):
            return b""
        token, kind = self.tokens[number], self.kinds[number]
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED):
            return token.encode()
        if kind == TokenKind.BYTE:
            return bytes([int(token[3:5], 16)])
        if self.spelling is Spelling.SENTENCEPIECE:
            return token.replace("▁", " ").encode()
        table = byte_of_character()
        if kind == TokenKind.USER_DEFINED or any(character not in table for character in token):
            return token.encode()
        return bytes(table[character] for character in token)


def declared_ends(tokens: dict[str, int], kinds: Sequence[int], named: Sequence[int | None]) -> frozenset[int]:
    """The end tokens a file names and those that its vocabulary has under a well-known name."""
    known = (tokens[name] for name in END_TOKENS if name in tokens and kinds[tokens[name]] == TokenKind.CONTROL)
    return frozenset(known) | frozenset(number for number in named if number is not None)


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}
