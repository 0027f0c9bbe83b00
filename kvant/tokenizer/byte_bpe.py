"""Encoders of the `tokenizers` library: BPE built from a GGUF vocabulary, on bytes (GPT-2) or on characters (Gemma 4), and
whatever a tokenizer.json holds.

The library sees only the text between added tokens; those are found by `added_tokens.py`, which knows about content.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvant.errors import KvantError, RequestError
from kvant.tokenizer.pretokenizers import PreTokenizer
from kvant.tokenizer.vocabulary import TokenKind

if TYPE_CHECKING:
    import tokenizers


class LibraryEncoder:
    """A tokenizer of the library, asked for ids of plain text and for nothing else."""

    def __init__(self, backend: "tokenizers.Tokenizer"):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # a control token it knows is plain text to it: here is only content
        self._backend = backend
        self._later = backend if not _spaces_the_first_word_only(backend) else _without_first_space(backend)

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Raises RequestError for a text that this tokenizer has no ids for (there are such, without bytes or <unk>)."""
        backend = self._backend if at_start else self._later
        with library_errors(RequestError, "the model's tokenizer cannot encode this text"):
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids


@contextmanager
def library_errors(kind: type[KvantError], what: str) -> Iterator[None]:
    """Turns whatever the library raises into `kind`: bare Exceptions, and panics of Rust, which are no Exceptions at all."""
    try:
        yield
    except (KvantError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {' '.join(str(error).split())[:200] or type(error).__name__}") from error


def byte_level_bpe(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], pre: PreTokenizer) -> LibraryEncoder:
    """Byte-level BPE from a GGUF vocabulary: the text is cut by `pre`, its bytes become characters, and those are merged."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    backend = Tokenizer(models.BPE(_mergeable(tokens, kinds), _pairs(merges), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_only])
    return LibraryEncoder(backend)


def character_bpe(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], unk_id: int | None) -> LibraryEncoder:
    """BPE with SentencePiece's spelling: "▁" for a space, bytes for characters without a token. Lines are merged apart."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = _mergeable(tokens, kinds)
    unknown = None if unk_id is None else tokens[unk_id]
    if unknown is not None and unk_id is not None:
        vocabulary[unknown] = unk_id
    backend = Tokenizer(models.BPE(vocabulary, _pairs(merges), byte_fallback=True, unk_token=unknown, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")  # no token mixes line ends with anything else
    return LibraryEncoder(backend)


def _mergeable(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Control and user-defined tokens stay out: merging can never make one."""
    whole = frozenset(map(int, (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)))
    return {token: number for number, token, kind in zip(range(len(tokens)), tokens, kinds, strict=True) if kind not in whole}


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _spaces_the_first_word_only(backend: "tokenizers.Tokenizer") -> bool:
    """Metaspace with prepend_scheme "first" (Llama 2 and Mistral since 2024): a later piece must not get a space."""
    return backend.pre_tokenizer is not None and b'"prepend_scheme":"first"' in backend.pre_tokenizer.__getstate__()


def _without_first_space(backend: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    for part in state["pre_tokenizer"].get("pretokenizers", [state["pre_tokenizer"]]):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
    later = Tokenizer.from_str(json.dumps(state))
    later.encode_special_tokens = True
    return later
