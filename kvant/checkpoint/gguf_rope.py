"""What a GGUF file says about positions, in Hugging Face's terms.

rope.dimension_count       how much of a head turns
rope.scaling.*             linear and yarn: type, factor, original context, yarn's own numbers
rope_freqs                 llama3: a tensor of divisors, from which the scaling is recovered (`rope_factors.py`)
rope_factors_long, _short  longrope: the two lists of divisors as tensors; no type needs to stand in the metadata
"""

from typing import Any

from kvant.checkpoint.gguf import GGUFFile
from kvant.checkpoint.gguf_keys import Keys
from kvant.checkpoint.rope_factors import llama3_scaling
from kvant.errors import CheckpointError, UnsupportedError

LLAMA3, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (LLAMA3, LONG, SHORT)

# Keys of yarn -> keys of `rope_scaling`.
YARN_KEYS = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}


def read_rope(file: GGUFFile, keys: Keys, config: dict[str, Any], partial: bool) -> tuple[str, ...]:
    """Puts what turns, and how it is stretched, into `config`. Returns the tensors that say nothing.

    `partial`: whether the family may turn a part of each head only.
    """
    config["rotary_dim"] = _rotary_dim(keys, config["head_dim"], partial)
    declared = _declared(keys, config)
    by_length = _longrope(file, keys, config)
    by_vector = _llama3(file, config)
    found = [scaling for scaling in (declared, by_length, by_vector) if scaling]
    if len(found) > 1:
        kinds = " and ".join(scaling["rope_type"] for scaling in found)
        raise UnsupportedError(f"{file.path.name} stretches positions twice ({kinds}), which is not built here")
    if keys.get("rope.scaling.attn_factor", float) not in (None, 0.0, 1.0) and not by_length:
        raise UnsupportedError(f"{file.path.name}: {keys.prefix}rope.scaling.attn_factor is not built here without longrope")
    if found:
        config["rope_scaling"] = found[0]
    return (LLAMA3,) if LLAMA3 in file.tensors and not by_vector else ()


def _rotary_dim(keys: Keys, head_dim: int, partial: bool) -> int:
    count = keys.get("rope.dimension_count", int)
    count = head_dim if count is None else count
    if count != head_dim and not partial:
        raise UnsupportedError(
            f"{keys.file.path.name}: {keys.prefix}rope.dimension_count is {count} with heads of {head_dim}; "
            "partial rotary is not built here for this architecture"
        )
    return int(count)


def _declared(keys: Keys, config: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling that the metadata names. An unknown type keeps its name: `ModelConfig` refuses it and says what there is."""
    kind = keys.file.metadata.get(keys.prefix + "rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", float) or keys.get("rope.scale_linear", float)
    if kind == "none" and keys.get("rope.scale_linear", float) not in (None, 0.0, 1.0):
        kind = "linear"
    if kind in ("none", "longrope"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor or 1.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _original(keys, config)
        scaling |= {hf: keys.get(key, float) for key, hf in YARN_KEYS.items()}
        scaling["mscale"] = 1.0  # the only one that llama.cpp knows
        if keys.get("rope.scaling.yarn_ext_factor", float) not in (None, 1.0):
            raise UnsupportedError(f"{keys.file.path.name}: yarn with an extrapolation factor other than 1 is not built here")
    return scaling


def _longrope(file: GGUFFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any] | None:
    declared = file.metadata.get(keys.prefix + "rope.scaling.type") == "longrope"
    if not declared and LONG not in file.tensors and SHORT not in file.tensors:
        return None
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": _original(keys, config),
        "attention_factor": keys.get("rope.scaling.attn_factor", float),
        "long_factor": _factors(file, LONG, config),
        "short_factor": _factors(file, SHORT, config),
    }


def _llama3(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any] | None:
    if LLAMA3 not in file.tensors:
        return None
    return llama3_scaling(_vector(file, LLAMA3, config), config.get("rope_theta", 10_000.0))


def _original(keys: Keys, config: dict[str, Any]) -> int | None:
    return keys.get("rope.scaling.original_context_length", int) or config.get("max_position_embeddings")


def _factors(file: GGUFFile, name: str, config: dict[str, Any]) -> list[float]:
    return [float(factor) for factor in _vector(file, name, config)]


def _vector(file: GGUFFile, name: str, config: dict[str, Any]) -> Any:
    """One fp32 for each pair that turns."""
    if name not in file.tensors:
        raise CheckpointError(f"{file.path.name} stretches positions by longrope but lacks {name}")
    stored = file.tensors[name]
    if stored.format != "F32" or stored.shape != (config["rotary_dim"] // 2,):
        raise CheckpointError(f"{file.path.name}: {name} is {stored.format} {list(stored.shape)}, not one fp32 per pair")
    return stored.raw.view("<f4")[0]
