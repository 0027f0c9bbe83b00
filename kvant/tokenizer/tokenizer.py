"""Tokenizer: text to ids and ids to bytes, the same ids whatever file the vocabulary came in.

    text ──AddedTokens──▶ control and user-defined tokens, whole
             │
             └─ what lies between ──encoder──▶ ids        byte-level BPE or SentencePiece
    ids ──Vocabulary──▶ bytes ──UTF-8──▶ text

Two rules. A token id stands for fixed bytes, so text is decoded by joining bytes; there is no second decoder. Control tokens
are found only where control is allowed: everywhere in a raw prompt (unless `parse_special=False`), in a chat only where the
template wrote. There is exactly one BOS: it is added when the model wants one and the ids do not begin with it already.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from kvant.errors import RequestError, TemplateError
from kvant.tokenizer.added_tokens import AddedTokens
from kvant.tokenizer.chat_template import ChatTemplate, Message
from kvant.tokenizer.directory import read_directory
from kvant.tokenizer.gguf import read_metadata
from kvant.tokenizer.parts import Parts, bytes_only
from kvant.tokenizer.template_text import Span
from kvant.tokenizer.vocabulary import TokenKind


class Source(Protocol):
    """Where a checkpoint says its tokenizer is described."""

    @property
    def kind(self) -> str:
        """ "gguf" (in `metadata`), "hf" (in `folder`) or "none"."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def folder(self) -> Path | None: ...


class Tokenizer:
    """One model's tokenizer. Immutable and safe to share between threads."""

    def __init__(self, parts: Parts):
        self._vocabulary = parts.vocabulary
        self._encoder = parts.encoder
        self._added = AddedTokens(parts.added)
        self._templates = {name: ChatTemplate(text, *self._border_tokens()) for name, text in parts.templates.items()}
        self._bytes: dict[int, bytes] = {}  # of the ids seen so far
        roles = parts.vocabulary.roles
        self.bos_id, self.eos_ids, self.unk_id = roles.bos_id, roles.eos_ids, roles.unk_id
        self.add_bos, self.strips_leading_space = roles.add_bos, roles.leading_space

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From a GGUF file's metadata. Raises UnsupportedError for a tokenizer or pre-tokeniser that is not built here."""
        return cls(read_metadata(metadata))

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """From a folder in Hugging Face layout with a tokenizer.json."""
        return cls(read_directory(Path(path)))

    @classmethod
    def from_source(cls, source: Source) -> "Tokenizer":
        """From wherever a checkpoint has it. Random weights have no tokenizer: for them a token is a byte."""
        if source.kind == "gguf":
            return cls.from_gguf(source.metadata)
        if source.folder is not None:
            return cls.from_directory(source.folder)
        return cls(bytes_only())

    # --- what it knows ---------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """How many ids it knows. A model's head may have more rows; those are padding."""
        return len(self._vocabulary)

    @cached_property
    def num_drawable(self) -> int:
        """Ids from here on are never drawn: padding at the vocabulary's end, which files fill with tokens marked unused."""
        kinds, count = self._vocabulary.kinds, self.vocab_size
        while count > 1 and kinds[count - 1] == TokenKind.UNUSED:
            count -= 1
        return count

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text: control tokens and the unknown token. `skip_special_tokens` leaves them out."""
        unknown = () if self.unk_id is None else (self.unk_id,)
        return frozenset((*self._vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN), *unknown))

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._templates.get("default")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None for an id it does not have."""
        return self._vocabulary.tokens[token_id] if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self._vocabulary.ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token contributes to the text; for a special token its spelling, beyond the vocabulary b""."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.bytes_of(token_id)
        return known

    def shown_bytes(self, token_id: int) -> bytes:
        """`token_bytes` of what a reader sees with `skip_special_tokens`: special tokens contribute nothing."""
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    # --- encode ----------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Ids of `text`. `add_bos=None` does what the model wants; a text that begins with BOS does not get a second one.

        Raises RequestError for text that is not Unicode (half a surrogate pair), and for a BOS that the model does not have.
        """
        if add_bos and self.bos_id is None:
            raise RequestError("add_bos: this model's vocabulary has no BOS token", param="add_bos")
        content = () if parse_special else (Span(0, len(text)),)
        return self._with_bos(self._encode(text, content), self.add_bos if add_bos is None else add_bos)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation, rendered by the model's chat template; message content stays plain text.

        Raises TemplateError when the model has no template, or the template refuses the conversation.
        """
        template = self._templates.get("tool_use" if tools else "default") or self.chat_template
        if template is None:
            raise TemplateError(
                "this model has no chat template; send it a plain prompt (completion), or use an instruction-tuned model",
                param="messages",
            )
        rendered = template.render(messages, add_generation_prompt, tools, **variables)
        return self._with_bos(self._encode(rendered.text, rendered.content), self.add_bos)

    def _encode(self, text: str, content: Sequence[Span]) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode at character {error.start}: half a surrogate pair") from None
        ids: list[int] = []
        position = 0
        for start, stop, token in self._added.find(text, content):
            if position < start:
                ids += self._encoder.encode(text[position:start], at_start=position == 0)
            ids.append(token)
            position = stop
        if position < len(text):
            ids += self._encoder.encode(text[position:], at_start=position == 0)
        return ids

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        if not wanted or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    # --- decode ----------------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        A vocabulary that spells a space before the first word (Llama 2) gets it taken off again, unless the ids continue
        another text (`continues=True`).
        """
        contribution = self.shown_bytes if skip_special_tokens else self.token_bytes
        data = b"".join(map(contribution, ids))
        if self.strips_leading_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def _border_tokens(self) -> tuple[str, str]:
        """The spellings of BOS and of the first-named end token, for chat templates."""
        roles, tokens = self._vocabulary.roles, self._vocabulary.tokens
        bos = "" if roles.bos_id is None else tokens[roles.bos_id]
        return bos, "" if roles.eos_id is None else tokens[roles.eos_id]
