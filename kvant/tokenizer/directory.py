"""Reads a vocabulary from a folder in Hugging Face layout: tokenizer.json, tokenizer_config.json, special_tokens_map.json.

The `tokenizers` library does the encoding as the file describes it. Asked of it once: its added tokens, how it decodes, and
whether its post-processor puts a BOS in front.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from kvant.tokenizer.added_tokens import AddedToken
from kvant.tokenizer.byte_bpe import LibraryEncoder
from kvant.tokenizer.parts import Parts
from kvant.tokenizer.vocabulary import Roles, Spelling, TokenKind, Vocabulary, declared_ends

if TYPE_CHECKING:
    import tokenizers


def read_directory(folder: Path) -> Parts:
    """Raises ModelNotFoundError, CheckpointError or UnsupportedError, each naming the file."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = "; convert tokenizer.model to tokenizer.json first" if (folder / "tokenizer.model").is_file() else ""
        raise ModelNotFoundError(f"{folder} holds no tokenizer.json{hint}")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    spelling, leading_space = _decoding(backend, path)
    tokens, kinds = _tokens(backend, spelling)
    roles = _roles(backend, config, tokens, kinds, leading_space)
    added = [
        AddedToken(token.content, number, token.special, token.lstrip, token.rstrip, token.single_word)
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special or not token.normalized  # the others are found in normalised text, by the library
    ]
    vocabulary = Vocabulary(tokens=tokens, kinds=kinds, spelling=spelling, roles=roles)
    return Parts(vocabulary, LibraryEncoder(backend), added, _templates(folder, config))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return values


def _decoding(backend: "tokenizers.Tokenizer", path: Path) -> tuple[Spelling, bool]:
    """How tokens spell bytes, and whether decoding takes a space off the front."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    parts = {part["type"]: part for part in state.get("decoders", [state])}
    if "ByteLevel" in parts:
        return Spelling.BYTE_LEVEL, False
    if "Metaspace" in parts:
        return Spelling.SENTENCEPIECE, parts["Metaspace"].get("prepend_scheme", "always") != "never"
    if parts.get("Replace", {}).get("pattern") == {"String": "▁"}:
        return Spelling.SENTENCEPIECE, parts.get("Strip", {}).get("start", 0) > 0
    raise UnsupportedError(f"{path}: decoder {', '.join(parts)} is not built here; supported: ByteLevel and SentencePiece's")


def _tokens(backend: "tokenizers.Tokenizer", spelling: Spelling) -> tuple[list[str], list[int]]:
    ids = backend.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    tokens, kinds = [""] * size, [int(TokenKind.UNUSED)] * size
    for token, number in ids.items():
        is_byte = spelling is Spelling.SENTENCEPIECE and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[number], kinds[number] = token, int(TokenKind.BYTE if is_byte else TokenKind.NORMAL)
    for number, added in backend.get_added_tokens_decoder().items():
        tokens[number] = added.content
        kinds[number] = int(TokenKind.CONTROL if added.special else TokenKind.USER_DEFINED)
    return tokens, kinds


def _roles(
    backend: "tokenizers.Tokenizer", config: Mapping[str, Any], tokens: list[str], kinds: list[int], leading_space: bool
) -> Roles:
    ids = {token: number for number, token in enumerate(tokens)}
    named = {name: _named_token(config, name, ids) for name in ("bos_token", "eos_token", "unk_token")}
    for number in (named["bos_token"], named["eos_token"]):
        if number is not None:
            kinds[number] = int(TokenKind.CONTROL)
    bos = named["bos_token"]
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = backend.encode("").ids[:1] == [bos]  # what its post-processor does
    return Roles(
        bos_id=bos,
        eos_id=named["eos_token"],
        eos_ids=declared_ends(ids, kinds, [named["eos_token"]]),
        unk_id=named["unk_token"],
        add_bos=add_bos and bos is not None,
        leading_space=leading_space,
    )


def _named_token(config: Mapping[str, Any], name: str, ids: Mapping[str, int]) -> int | None:
    token = config.get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return None
    if token not in ids:
        raise CheckpointError(f"the tokenizer's {name} {token!r} is not in its vocabulary")
    return ids[token]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja, else `chat_template` in tokenizer_config.json: one text, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text("utf-8")}
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {str(entry["name"]): str(entry["template"]) for entry in template if {"name", "template"} <= set(entry)}
    return {}
