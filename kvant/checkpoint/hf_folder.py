"""A Hugging Face folder: config.json, safetensors, and what surrounds them (generation config, tokenizer, chat template).

Files of many ages are met, so every question has several places where its answer may stand: end tokens in three files, the
chat template in three more. They are all looked at.
"""

from pathlib import Path
from typing import Any

from kvant.checkpoint import names
from kvant.checkpoint.checkpoint import Checkpoint, FileTensors, TokenizerSource
from kvant.checkpoint.dummy import DummyTensors
from kvant.checkpoint.safetensors import read_folder, read_json
from kvant.config.formats import StoredTensor
from kvant.errors import CheckpointError, UnsupportedError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = f"; name the file itself: {ggufs[0]}" if ggufs else "; a model folder holds config.json and safetensors"
        raise CheckpointError(f"{folder} has no config.json{remedy}")
    config = _config(folder / "config.json")
    stored = read_folder(folder)
    skipped = {name for name in stored if name.endswith(names.HARMLESS_SUFFIXES)} | _tied_head(stored, config)
    tensors = FileTensors({name: tensor for name, tensor in stored.items() if name not in skipped})
    return _checkpoint(folder, folder, config, tensors, tuple(sorted(skipped)))


def open_dummy(path: Path) -> Checkpoint:
    """Random weights for the config in `path`, a config.json or its folder. A tokenizer beside it is used."""
    path = path / "config.json" if path.is_dir() else path
    config = _config(path)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    tensors = DummyTensors(dtype, names.NORM_OFFSETS.get(config["architectures"][0], 0.0))
    return _checkpoint(path, path.parent, config, tensors, needs_tokenizer=False)


def _checkpoint(
    path: Path,
    folder: Path,
    config: dict[str, Any],
    tensors: FileTensors | DummyTensors,
    skipped: tuple[str, ...] = (),
    needs_tokenizer: bool = True,
) -> Checkpoint:
    generation = _optional_json(folder / "generation_config.json")
    tokenizer = _optional_json(folder / "tokenizer_config.json")
    ends = _end_tokens(folder, config, generation, tokenizer)
    config["eos_token_id"] = list(ends)
    # A model that learned from texts means nothing without its tokenizer; only random weights can do with bytes.
    reads_tokenizer = needs_tokenizer or (folder / "tokenizer.json").is_file()
    return Checkpoint(
        path=path,
        config=config,
        tensors=tensors,
        tokenizer_source=TokenizerSource(kind="hf", folder=folder) if reads_tokenizer else TokenizerSource(kind="none"),
        generation_config=generation,
        chat_template=_chat_template(folder, tokenizer),
        end_token_ids=ends,
        skipped=skipped,
    )


def _config(path: Path) -> dict[str, Any]:
    """config.json with the defaults of its family filled in."""
    config = read_json(path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{path} names no architecture (key 'architectures'); it is no model's config")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedError(
            f"{path}: weights quantised with {str(method)[:40]!r} are not built here; use the unquantised model"
        )
    for key, neutral in names.HF_NEUTRAL.items():
        if config.get(key) is not None and config[key] not in neutral:
            raise UnsupportedError(f"{path}: {key} = {str(config[key])[:40]} is not built here (see docs/models.md)")
    architecture = architectures[0]
    _refuse_partial_rotary(path, config, architecture)
    # transformers 5 keeps everything about positions in `rope_parameters`; defaults must not overrule it.
    taken = {"rope_theta", "rope_local_base_freq"} if config.get("rope_parameters") else set()
    taken |= {"sliding_window_pattern"} if config.get("_sliding_window_pattern") else set()
    taken |= names.HF_UNREAD.get(architecture, frozenset())
    defaults = names.HF_DEFAULTS.get(architecture, {})
    known = {key: value for key, value in config.items() if key not in names.HF_UNREAD.get(architecture, ())}
    return {**{key: value for key, value in defaults.items() if key not in taken}, **known}


def _refuse_partial_rotary(path: Path, config: dict[str, Any], architecture: str) -> None:
    """Where a class turns whole heads, a factor that says otherwise must not be passed over."""
    for table in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        factor = table.get("partial_rotary_factor") if isinstance(table, dict) else None
        if factor not in (None, 1.0) and architecture not in names.HF_PARTIAL_ROTARY:
            raise UnsupportedError(
                f"{path}: partial_rotary_factor = {str(factor)[:40]} is not built here for {architecture[:40]} "
                "(see docs/models.md)"
            )


def _tied_head(stored: dict[str, StoredTensor], config: dict[str, Any]) -> set[str]:
    """A tied model may still bring its head: as a copy it is superfluous, as a matrix of its own it counts."""
    if not config.get("tie_word_embeddings") or HEAD not in stored or EMBEDDING not in stored:
        return set()
    head, embedding = stored[HEAD], stored[EMBEDDING]
    if head.format == embedding.format and head.shape == embedding.shape and (head.raw == embedding.raw).all():
        return {HEAD}
    config["tie_word_embeddings"] = False
    return set()


# --- end tokens and templates -------------------------------------------------------------------------------------------


def _end_tokens(folder: Path, config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Every id that any of the files calls the end: a number, a list of numbers, or a text to look up."""
    ids: list[int] = []
    for source in (config, generation):
        ends = source.get("eos_token_id")
        ids += ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{folder}: eos_token_id is {str(ids)[:80]}, not a token id or a list of them")
    text = tokenizer.get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    found = _id_of(folder, tokenizer, text) if isinstance(text, str) else None
    return tuple(sorted({*ids} if found is None else {*ids, found}))


def _id_of(folder: Path, tokenizer: dict[str, Any], text: str) -> int | None:
    """The id of a special token, from the smallest file that knows it."""
    declared = tokenizer.get("added_tokens_decoder")
    for number, token in (declared if isinstance(declared, dict) else {}).items():
        if isinstance(token, dict) and token.get("content") == text and number.isdecimal():
            return int(number)
    added = _optional_json(folder / "tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") == text and isinstance(token.get("id"), int):
            return int(token["id"])
    return None


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    """A file of its own wins over the tokenizer's config, as in transformers; of several templates, the default one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from None
    template = _optional_json(folder / "chat_template.json").get("chat_template") or tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
