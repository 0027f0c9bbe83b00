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
from kvant.tokenizer.byte_bpe import LibraryEncoder, library_errors
from kvant.tokenizer.parts import Parts
from kvant.tokenizer.vocabulary import Roles, Spelling, TokenKind, Vocabulary, declared_ends

if TYPE_CHECKING:
    import tokenizers


MAX_TOKENS = 1 << 22  # sixteen times Gemma's vocabulary; a table of all ids is made
PROBE = "".join(map(chr, range(9, 127))) + " é我😀"  # text that every tokenizer of a language model can encode


def read_directory(folder: Path) -> Parts:
    """Raises ModelNotFoundError, CheckpointError or UnsupportedError, each naming the file."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = "; convert tokenizer.model to tokenizer.json first" if (folder / "tokenizer.model").is_file() else ""
        raise ModelNotFoundError(f"{folder} holds no tokenizer.json{hint}")
    with library_errors(CheckpointError, f"{path} cannot be read"):
        backend = Tokenizer.from_file(str(path))
    encoder = LibraryEncoder(backend)  # first of all: it switches off cutting and padding, which a file may ask for
    with library_errors(CheckpointError, f"{path} is no tokenizer that works"):
        encoder.encode(PROBE, at_start=True)
        adds = backend.encode("").ids[:1]  # what its post-processor puts in front
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    spelling, leading_space = _decoding(backend, path)
    tokens, kinds = _tokens(backend, spelling, path)
    roles = _roles(config, tokens, kinds, adds, leading_space)
    added = [
        AddedToken(token.content, number, token.special, token.lstrip, token.rstrip, token.single_word)
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special or not token.normalized  # the others are found in normalised text, by the library
    ]
    vocabulary = Vocabulary(tokens=tokens, kinds=kinds, spelling=spelling, roles=roles)
    return Parts(vocabulary, encoder, added, _templates(folder, config))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {str(error)[:100]}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


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


def _tokens(backend: "tokenizers.Tokenizer", spelling: Spelling, path: Path) -> tuple[list[str], list[int]]:
    ids = backend.get_vocab(with_added_tokens=True)
    size = max((*ids.values(), *backend.get_added_tokens_decoder()), default=-1) + 1
    if size > MAX_TOKENS:
        raise CheckpointError(f"{path} has a token of id {size - 1}; at most {MAX_TOKENS} tokens are accepted")
    tokens, kinds = [""] * size, [int(TokenKind.UNUSED)] * size
    for token, number in ids.items():
        is_byte = spelling is Spelling.SENTENCEPIECE and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[number], kinds[number] = token, int(TokenKind.BYTE if is_byte else TokenKind.NORMAL)
    for number, added in backend.get_added_tokens_decoder().items():
        tokens[number] = added.content
        kinds[number] = int(TokenKind.CONTROL if added.special else TokenKind.USER_DEFINED)
    return tokens, kinds


def _roles(config: Mapping[str, Any], tokens: list[str], kinds: list[int], adds: list[int], leading_space: bool) -> Roles:
    ids = {token: number for number, token in enumerate(tokens)}
    named = {name: _named_token(config, name, ids) for name in ("bos_token", "eos_token", "unk_token")}
    for number in (named["bos_token"], named["eos_token"]):
        if number is not None:
            kinds[number] = int(TokenKind.CONTROL)
    bos = named["bos_token"]
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = adds == [bos]
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
    if not isinstance(token, str) or token not in ids:
        raise CheckpointError(f"the tokenizer's {name} {str(token)[:80]!r} is not in its vocabulary")
    return ids[token]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja, else `chat_template` in tokenizer_config.json: one text, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": _text(path)}
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping) and {"name", "template"} <= entry.keys()]
        return {str(entry["name"]): str(entry["template"]) for entry in named}
    return {}
