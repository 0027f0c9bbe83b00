"""From a GGUF file to Hugging Face's terms: config, names, and the two conventions in which llama.cpp stores weights.

    rows of q and k   llama.cpp turns neighbours (2j, 2j + 1), Hugging Face halves (j, j + H/2): within each head the rows
                      are reordered. Undone by moving whole packed rows; no value is unpacked.
    norms of Gemma    stored as 1 + w, where Hugging Face has w. Undone in fp32, as transformers does, so that both
                      compute with the same bits.

What a GGUF leaves unsaid because llama.cpp knows it by architecture comes from the tables in `names.py`.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvant.checkpoint import names
from kvant.checkpoint.checkpoint import Checkpoint, FileTensors, Repair, TokenizerSource
from kvant.checkpoint.gguf import GGUFFile, read_gguf
from kvant.checkpoint.gguf_keys import Keys, is_whole
from kvant.checkpoint.gguf_rope import FACTOR_TENSORS, read_rope
from kvant.config.formats import StoredTensor
from kvant.errors import CheckpointError, UnsupportedError


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint in the file `path`."""
    file = read_gguf(path)
    family = _family(file)
    config, skipped = _config(file, family)
    ends = _special_tokens(file, config)
    stored = _renamed(file, family)
    metadata = file.metadata
    template = metadata.get("tokenizer.chat_template")
    return Checkpoint(
        path=path,
        config=config,
        tensors=FileTensors(stored, _repairs(stored, config, family)),
        tokenizer_source=TokenizerSource(
            kind="gguf", metadata={key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        ),
        generation_config={hf: metadata[key] for key, hf in names.GGUF_SAMPLING.items() if key in metadata},
        chat_template=template if isinstance(template, str) else None,
        end_token_ids=ends,
        skipped=skipped,
    )


def _family(file: GGUFFile) -> names.GGUFFamily:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{file.path.name} names no general.architecture; it is no model")
    if architecture not in names.GGUF_FAMILIES:
        raise UnsupportedError(
            f"{file.path.name}: the GGUF architecture {architecture[:40]!r} is not built here; "
            f"supported: {', '.join(sorted(names.GGUF_FAMILIES))} (see docs/models.md)"
        )
    return names.GGUF_FAMILIES[architecture]


# --- metadata -> config -------------------------------------------------------------------------------------------------


def _config(file: GGUFFile, family: names.GGUFFamily) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config under Hugging Face's keys, and the tensors that are of no use to any network."""
    keys = Keys(file)
    for key, neutral in names.GGUF_NEUTRAL.items():
        value = keys.get(key, float)
        if value is not None and value not in neutral:
            raise UnsupportedError(f"{file.path.name}: {keys.prefix + key} = {value:g} is not built here")
    config: dict[str, Any] = {"architectures": [family.architecture], **family.constants}
    for key, (hf, kind) in names.GGUF_KEYS.items():
        value = keys.get(key, kind)
        if value is not None:
            config[hf] = value
    _require(file, config)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["vocab_size"] = _vocab_size(file, keys)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    bias = any(re.fullmatch(r"blk\.\d+\.attn_(q|k|v|output)\.bias", name) for name in file.tensors)
    config.setdefault("attention_bias", bias)
    config["mlp_bias"] = any(re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.bias", name) for name in file.tensors)
    size = keys.get("attention.value_length", int)
    if size not in (None, config["head_dim"]):
        raise UnsupportedError(
            f"{file.path.name}: values of another size ({size}) than keys ({config['head_dim']}) are not built here"
        )
    _layer_pattern(file, keys, config)
    if family.width_scaled is not None:
        # llama.cpp's own test for the one size whose query scale is not head_dim.
        deep = config["num_hidden_layers"] == family.width_scaled
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if deep else config["head_dim"]
    return config, read_rope(file, keys, config, family.partial_rotary)


def _require(file: GGUFFile, config: dict[str, Any]) -> None:
    for key, (hf, _) in names.GGUF_KEYS.items():
        if hf in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads") and not config.get(hf):
            raise CheckpointError(f"{file.path.name} does not say its {key}; it is no complete model")


def _vocab_size(file: GGUFFile, keys: Keys) -> int:
    """The rows of the embedding; the metadata's own count is often missing, and no help where it differs."""
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return keys.get("vocab_size", int) or 0


def _special_tokens(file: GGUFFile, config: dict[str, Any]) -> tuple[int, ...]:
    """Puts the beginning and end tokens into `config`; returns the end tokens."""
    keys = [key for key in (*names.GGUF_END_TOKENS, names.GGUF_BOS_TOKEN) if key in file.metadata]
    for key in keys:
        if not is_whole(file.metadata[key]):
            raise CheckpointError(f"{file.path.name}: {key} is {str(file.metadata[key])[:40]!r}, not a token id")
    ends = sorted({file.metadata[key] for key in keys if key != names.GGUF_BOS_TOKEN})
    config["eos_token_id"] = ends
    config["bos_token_id"] = file.metadata.get(names.GGUF_BOS_TOKEN)
    return tuple(ends)


def _layer_pattern(file: GGUFFile, keys: Keys, config: dict[str, Any]) -> None:
    """Newer files give the period of the full layers, or say for every layer whether it slides."""
    pattern = file.metadata.get(keys.prefix + "attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = keys.get("attention.sliding_window_pattern", int)


# --- tensors ------------------------------------------------------------------------------------------------------------


def _renamed(file: GGUFFile, family: names.GGUFFamily) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for name, tensor in file.tensors.items():
        if name in FACTOR_TENSORS:  # used up by the config
            continue
        hf = _hf_name(name, family)
        if hf in stored:
            raise CheckpointError(f"{file.path.name} holds {hf} twice, under different names")
        stored[hf] = StoredTensor(hf, tensor.format, tensor.shape, tensor.raw)
    return stored


def _hf_name(name: str, family: names.GGUFFamily) -> str:
    """Hugging Face's name; what is unknown keeps its own, so that the loader reports it as left over."""
    stem, _, kind = name.rpartition(".")
    if stem in names.GGUF_OUTER:
        return f"{names.GGUF_OUTER[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    if match and match[2] in family.layer:
        return f"model.layers.{match[1]}.{family.layer[match[2]]}.{kind}"
    return name


def _repairs(stored: dict[str, StoredTensor], config: dict[str, Any], family: names.GGUFFamily) -> dict[str, Repair]:
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    repairs: dict[str, Repair] = {}
    for name in stored:
        brick = re.sub(r"^model\.layers\.\d+\.", "", name).rpartition(".")[0]
        if brick in family.permuted:
            repairs[name] = partial(_halves, heads=heads[brick])
        elif family.norm_offset and brick.endswith("norm"):
            repairs[name] = partial(_without_offset, offset=family.norm_offset)
    return repairs


def _halves(stored: StoredTensor, heads: int) -> StoredTensor:
    """Rows from pairs to halves, head by head: [heads, H/2, 2] -> [heads, 2, H/2]. A bias's values are its rows."""
    rows = stored.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {stored.name!r} has {rows} rows, which do not make {heads} heads of even size")
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    raw = stored.raw.reshape(rows, -1)[order].reshape(stored.raw.shape)
    return StoredTensor(stored.name, stored.format, stored.shape, raw)


def _without_offset(stored: StoredTensor, offset: float) -> StoredTensor:
    if stored.format != "F32":
        raise UnsupportedError(f"norm {stored.name!r} is stored as {stored.format}; norms are expected in F32")
    values = stored.raw.view("<f4") - np.float32(offset)
    return StoredTensor(stored.name, "F32", stored.shape, values.view(np.uint8))
