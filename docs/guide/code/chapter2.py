"""Chapter 2: tokens. Our own tokenizer, chat prompts that cannot be forged, and text that streams.

python docs/guide/code/chapter2.py [MODEL] [QUESTION]
"""

import codecs
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvant.checkpoint.open import open_checkpoint
from kvant.checkpoint.store import resolve_model
from kvant.config.model import ModelConfig

import chapter1

CONTROL = 3  # the kind of tokens like <|im_end|> in a GGUF file

# --- byte-level BPE ----------------------------------------------------------------------------------

# Python's \d knows the decimal digits; \p{N} of the original patterns also means these: ², ½, Ⅻ ...
OTHER_NUMBERS = "".join(c for c in map(chr, range(sys.maxunicode)) if unicodedata.category(c) in ("Nl", "No"))
DIGIT = rf"[\d{OTHER_NUMBERS}]"
LETTER = rf"[^\W\d_{OTHER_NUMBERS}]"
WORD = re.compile(rf"'s|'t|'re|'ve|'m|'ll|'d| ?{LETTER}+| ?{DIGIT}+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def words(text: str) -> Iterator[str]:
    """Cuts text where no token may reach across, as SmolLM2 does: every digit alone, then GPT-2's words."""
    for piece in re.split(f"({DIGIT})", text):
        yield from WORD.findall(piece)


def byte_alphabet() -> list[str]:
    """GPT-2's spelling: byte b is written as the printable character alphabet[b]."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class ByteBPE:
    def __init__(self, tokens: list[str], merges: list[str]):
        self.ids = {token: number for number, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.alphabet = byte_alphabet()
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in words(text):
            if word not in self.known:  # a text has far fewer different words than words
                self.known[word] = self.merge(word)
            ids += self.known[word]
        return ids

    def merge(self, word: str) -> list[int]:
        """Joins the pair that was learnt first, again and again (Sennrich et al., 2016)."""
        parts = [self.alphabet[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [self.ids[part] for part in parts]


# --- SentencePiece -----------------------------------------------------------------------------------


class SentencePiece:
    """The other common kind (Kudo & Richardson, 2018): "▁" for a space, scores instead of merges."""

    def __init__(self, tokens: list[str], scores: list[float]):
        self.ids = {token: number for number, token in enumerate(tokens)}
        self.scores = scores

    def encode(self, text: str) -> list[int]:
        parts = list(text.replace(" ", "▁"))
        while True:
            joined = ["".join(pair) for pair in pairwise(parts)]
            known = [at for at, part in enumerate(joined) if part in self.ids]
            if not known:
                break
            best = max(known, key=lambda at: self.scores[self.ids[joined[at]]])
            parts[best : best + 2] = [joined[best]]
        return [number for part in parts for number in self.ids_of(part)]

    def ids_of(self, part: str) -> list[int]:
        """A character without a token falls back to its bytes."""
        return [self.ids[part]] if part in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]


# --- control tokens and chats ------------------------------------------------------------------------


class Tokenizer:
    """From a GGUF file's metadata. Control tokens are found only where `control` is allowed."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
        kinds = metadata["tokenizer.ggml.token_type"]
        self.control = {token: i for i, token in enumerate(self.tokens) if kinds[i] == CONTROL}
        self.bpe = ByteBPE(self.tokens, metadata["tokenizer.ggml.merges"])
        self.byte_of = {character: byte for byte, character in enumerate(self.bpe.alphabet)}
        self.ends = frozenset({metadata["tokenizer.ggml.eos_token_id"]})
        self.template = metadata.get("tokenizer.chat_template", "")
        spellings = sorted(self.control, key=len, reverse=True)
        self.border = re.compile("(" + "|".join(map(re.escape, spellings)) + ")")

    def encode(self, text: str, control: bool = True) -> list[int]:
        if not control:
            return self.bpe.encode(text)
        ids: list[int] = []
        for part in self.border.split(text):
            ids += [self.control[part]] if part in self.control else self.bpe.encode(part)
        return ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The template writes around markers; what people wrote is put in their place as plain text."""
        marked = [{**message, "content": f"\ue000{number}\ue001"} for number, message in enumerate(messages)]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        rendered = environment.from_string(self.template).render(messages=marked, add_generation_prompt=True)
        ids: list[int] = []
        for at, part in enumerate(re.split("\ue000(\\d+)\ue001", rendered)):
            is_content = at % 2 == 1
            ids += self.encode(messages[int(part)]["content"], control=False) if is_content else self.encode(part)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes a token adds to the text; control tokens add nothing that a reader sees."""
        spelling = self.tokens[token]
        return b"" if spelling in self.control else bytes(self.byte_of[character] for character in spelling)


# --- ids to text, piece by piece ---------------------------------------------------------------------


class TextStream:
    """A token is bytes, and a character may need bytes of several tokens: text leaves when it is complete."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Iterable[int]) -> str:
        return self.decoder.decode(b"".join(map(self.tokenizer.token_bytes, tokens)))

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


# --- the engine streams ------------------------------------------------------------------------------


class Engine(chapter1.Engine):
    """The step is chapter 1's. What is new happens outside of it."""

    def stream(self, prompt: list[int], max_tokens: int, tokenizer: Tokenizer) -> Iterator[str]:
        text = TextStream(tokenizer)
        sequence = self.add(prompt, max_tokens)
        while not sequence.finished:
            for owner, token in self.step():
                if owner is sequence:
                    yield text.add([token])
        yield text.finish()


def load(name: str) -> tuple[chapter1.Model, Tokenizer]:
    checkpoint = open_checkpoint(resolve_model(name))
    model = chapter1.Model(ModelConfig.from_dict(checkpoint.config), checkpoint.tensors)
    return model, Tokenizer(checkpoint.tokenizer_source.metadata)


def main(name: str = "smollm2-135m", question: str = "What is the capital of France?") -> None:
    model, tokenizer = load(name)
    engine = Engine(model, tokenizer.ends)
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    for text in engine.stream(prompt, 24, tokenizer):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
