"""Reads a vocabulary from a GGUF file's metadata (keys `tokenizer.ggml.*`). Files are distrusted: sizes and ids are checked.

model "gpt2"    tokens, merges and the name of a pre-tokeniser      byte-level BPE      byte_bpe.py, pretokenizers.py
model "llama"   tokens and scores                                   SentencePiece       spm.py
model "gemma4"  tokens in SentencePiece's spelling, and merges      BPE on characters   byte_bpe.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import CheckpointError, UnsupportedError
from kvant.tokenizer.added_tokens import AddedToken
from kvant.tokenizer.byte_bpe import byte_level_bpe, character_bpe, library_errors
from kvant.tokenizer.parts import Encoder, Parts
from kvant.tokenizer.pretokenizers import pre_tokenizer
from kvant.tokenizer.spm import SentencePieceEncoder
from kvant.tokenizer.vocabulary import Roles, Spelling, TokenKind, Vocabulary, declared_ends

PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama", "gemma4")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_metadata(metadata: Mapping[str, Any]) -> Parts:
    """Raises CheckpointError for what is malformed and UnsupportedError for what is not built here."""
    model = metadata.get(PREFIX + "model")
    if model not in MODELS:
        raise UnsupportedError(
            f"tokenizer model {str(model)[:40]!r} (tokenizer.ggml.model) is not built here; "
            f"supported: {', '.join(MODELS)} (see docs/models.md)"
        )
    tokens = _array(metadata, "tokens")
    kinds = _kinds(metadata, tokens)
    spelling = Spelling.BYTE_LEVEL if model == "gpt2" else Spelling.SENTENCEPIECE
    roles = _roles(metadata, tokens, kinds)
    vocabulary = Vocabulary(tokens=tokens, kinds=kinds, spelling=spelling, roles=roles)
    encoder = _encoder(metadata, model, vocabulary)
    whole = vocabulary.of_kind(TokenKind.CONTROL, TokenKind.USER_DEFINED)
    added = [AddedToken(tokens[number], number, kinds[number] == TokenKind.CONTROL) for number in whole]
    return Parts(vocabulary, encoder, added, _templates(metadata))


def _encoder(metadata: Mapping[str, Any], model: str, vocabulary: Vocabulary) -> Encoder:
    tokens, kinds, roles = vocabulary.tokens, vocabulary.kinds, vocabulary.roles
    if model == "llama":
        scores = _array(metadata, "scores", len(tokens))
        return SentencePieceEncoder(tokens, scores, kinds, roles.unk_id, roles.leading_space)
    pre = pre_tokenizer(metadata.get(PREFIX + "pre")) if model == "gpt2" else None
    merges = _array(metadata, "merges")
    with library_errors(CheckpointError, "the file's merges do not fit its tokens"):
        if pre is None:
            return character_bpe(tokens, kinds, merges, roles.unk_id)
        return byte_level_bpe(tokens, kinds, merges, pre)


def _array(metadata: Mapping[str, Any], name: str, length: int | None = None) -> Sequence[Any]:
    values = metadata.get(PREFIX + name)
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise CheckpointError(f"the file's tokenizer lacks {PREFIX}{name}, or it is not a list")
    if length is not None and len(values) != length:
        raise CheckpointError(f"{PREFIX}{name} has {len(values)} entries for {length} tokens")
    return values


def _kinds(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """Kinds of all tokens. The begin and end tokens are control tokens whatever the file says."""
    if PREFIX + "token_type" in metadata:
        kinds = list(_array(metadata, "token_type", len(tokens)))
    else:
        kinds = [int(TokenKind.NORMAL)] * len(tokens)
    for name in ("bos_token_id", *END_KEYS):
        number = _id(metadata, name, len(tokens))
        if number is not None:
            kinds[number] = int(TokenKind.CONTROL)
    byte = int(TokenKind.BYTE)  # comparing with the enumeration's member takes ten times as long
    for number, kind in enumerate(kinds):
        if kind == byte and not _is_byte(tokens[number]):
            reads = str(tokens[number])[:40]
            raise CheckpointError(f"token {number} is marked as a byte but reads {reads!r} instead of <0xNN>")
    return kinds


def _roles(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Roles:
    scored = metadata[PREFIX + "model"] == "llama"
    bos = _id(metadata, "bos_token_id", len(tokens))
    named = [_id(metadata, name, len(tokens)) for name in END_KEYS]
    return Roles(
        bos_id=bos,
        eos_id=named[0],
        eos_ids=declared_ends(dict(zip(tokens, range(len(tokens)), strict=True)), kinds, named),
        unk_id=_id(metadata, "unknown_token_id", len(tokens)),
        # llama.cpp's own defaults where the file is silent.
        add_bos=bos is not None and bool(metadata.get(PREFIX + "add_bos_token", _adds_bos(metadata))),
        leading_space=scored and bool(metadata.get(PREFIX + "add_space_prefix", True)),
    )


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    if metadata[PREFIX + "model"] != "gpt2":
        return True
    return pre_tokenizer(metadata.get(PREFIX + "pre")).add_bos


def _id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    number = metadata.get(PREFIX + name)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < vocab_size:
        raise CheckpointError(f"{PREFIX}{name} is {str(number)[:40]!r}, which is no token of the file's {vocab_size}")
    return number


def _is_byte(token: str) -> bool:
    digits = token[3:5]
    return (
        len(token) == 6
        and token.startswith("<0x")
        and token.endswith(">")
        and all(c in "0123456789abcdefABCDEF" for c in digits)
    )


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and named variants under `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    found = {name[len(key) + 1 :] or "default": text for name, text in metadata.items() if name.startswith(key)}
    return {name: text for name, text in found.items() if isinstance(text, str)}
