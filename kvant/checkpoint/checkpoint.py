"""Checkpoint: a model's files, read but not yet used, all of it under Hugging Face's names.

    .gguf file ─────┐
    HF folder ──────┼──open_checkpoint──▶ Checkpoint(config, tensors, tokenizer_source, ...)
    dummy:CONFIG ───┘

`tensors` is where weights come from, either a file's (`FileTensors`) or random ones (`DummyTensors`); both answer
`find(name, shape)` and `names()`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvant.checkpoint.dummy import DummyTensors
from kvant.config.formats import StoredTensor

Repair = Callable[[StoredTensor], StoredTensor]


class FileTensors(Mapping[str, StoredTensor]):
    """The tensors of a file by Hugging Face name.

    Some are stored in another convention than Hugging Face's (reordered rows, a shifted norm). Their repairs run when a
    tensor is asked for: opening a file stays free of copies.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], repairs: Mapping[str, Repair] | None = None):
        self._stored = stored
        self._repairs = repairs or {}

    def __getitem__(self, name: str) -> StoredTensor:
        stored = self._stored[name]
        return self._repairs[name](stored) if name in self._repairs else stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored. Reads none of them."""
        return sum(stored.num_bytes for stored in self._stored.values())

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor | None:
        """The tensor `name`, or None. The shape is the caller's to check."""
        return self.get(name)

    def names(self) -> set[str]:
        """Every name the file holds and a network is expected to consume."""
        return set(self._stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """Where the tokenizer is described: in a GGUF's `tokenizer.*` metadata, in a folder's files, or nowhere."""

    kind: Literal["gguf", "hf", "none"]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `open_checkpoint` found. `config` has the keys of config.json, whatever the file; nothing is invented.

    `config["tie_word_embeddings"]` says whether the head is the embedding; `end_token_ids` are all that any of the files
    names, `config["eos_token_id"]` among them. `skipped` are tensors left out because they are known to be harmless.
    """

    path: Path
    config: dict[str, Any]
    tensors: FileTensors | DummyTensors
    tokenizer_source: TokenizerSource
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    end_token_ids: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()
