"""ModelConfig: the shape of a model, under Hugging Face's own key names, whatever file it was read from.

A checkpoint reader hands over a plain dict with these keys (a GGUF's metadata is renamed by data in
`checkpoint/names.py`); `ModelConfig.from_dict` checks it and fills in what the families define as defaults. A value that
would change the network and is not built here (an unknown rope type, an unknown activation) is refused by name.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from kvant.errors import CheckpointError, UnsupportedError

ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
MAX_LAYERS = 4096  # some things have an entry per layer: a lying file must not make them long
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts. `rope_type` names the rule; unused numbers keep defaults."""

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0

    @classmethod
    def from_dict(cls, raw: dict[str, Any] | None) -> "RopeScaling":
        if not raw:
            return cls()
        rope_type = raw.get("rope_type", raw.get("type", "default"))  # both spellings occur in the wild
        if rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"rope_scaling type {rope_type!r} is not built here; supported: {', '.join(ROPE_TYPES)} (see docs/models.md)"
            )
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in raw.items() if k in known and k != "rope_type"}, rope_type=rope_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one network. Counts, not bytes; names are those of HF's config.json."""

    architecture: str  # "LlamaForCausalLM", "Gemma3ForCausalLM"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None  # rotary base of sliding layers, where it differs
    rope_scaling: RopeScaling = RopeScaling()
    hidden_activation: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None  # W: a query sees at most W keys, itself included; None: all
    layer_types: tuple[str, ...] = ()
    query_pre_attn_scalar: float | None = None  # scores are scaled by this ** -0.5; None: by head_dim ** -0.5
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    torch_dtype: str = "bfloat16"  # the dtype that the weights were trained or published in
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Builds the config from HF keys. Raises `CheckpointError` for missing or impossible values."""
        values = _with_defaults(raw)
        known = {f.name for f in fields(cls)}
        config = cls(**{k: v for k, v in values.items() if k in known})
        config._check()
        return config

    def window(self, layer: int) -> int | None:
        """The window of layer `layer` in tokens, or None where it sees everything."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def cache_groups(self) -> "tuple[CacheGroup, ...]":
        """The layers of one cache kind and window, in order of their first layer."""
        by_window: dict[int | None, list[int]] = {}
        for layer in range(self.num_hidden_layers):
            by_window.setdefault(self.window(layer), []).append(layer)
        return tuple(
            CacheGroup(
                name="full" if window is None else f"sliding{window}",
                layers=tuple(layers),
                window=window,
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
            )
            for window, layers in by_window.items()
        )

    def _check(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ):
            _check_count(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise CheckpointError(f"the model's {name} must be a positive number, not {str(value)[:40]!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads ({self.num_attention_heads}) is no multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.hidden_activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"activation {self.hidden_activation!r} is not built here; supported: {', '.join(ACTIVATIONS)}"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise CheckpointError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        for kind in self.layer_types:
            if kind not in LAYER_TYPES:
                raise UnsupportedError(f"layer type {kind!r} is not built here; supported: {', '.join(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise CheckpointError("the model has sliding_attention layers but no sliding_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """The layers that share one kind of cache and one window: they have one block pool and one block table together.

    A block holds `block_size` tokens of keys and values for every layer of the group.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    def block_bytes(self, itemsize: int) -> int:
        """Bytes of one block: keys and values of all its layers."""
        return 2 * len(self.layers) * self.block_size * self.num_kv_heads * self.head_dim * itemsize


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise CheckpointError(f"the model's {name} must be a positive whole number, not {str(value)[:40]!r}")


def _with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """HF's own fall-backs, made explicit: absent keys, null values, older spellings."""
    values = {k: v for k, v in raw.items() if v is not None}
    architectures = values.get("architectures")
    if "architecture" not in values:
        if not architectures:
            raise CheckpointError("the model's config names no architecture (key 'architectures')")
        values["architecture"] = architectures[0]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if name not in values:
            raise CheckpointError(f"the model's config lacks {name!r}")
        _check_count(name, values[name])
    if values["num_hidden_layers"] > MAX_LAYERS:
        raise CheckpointError(f"the model claims {values['num_hidden_layers']} layers; at most {MAX_LAYERS} are accepted")
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values.setdefault("max_position_embeddings", 2048)
    values["hidden_activation"] = values.get("hidden_activation", values.get("hidden_act", "silu"))
    # transformers 5 writes {"rope_parameters": {"rope_theta": ..., "rope_type": ...}}, sometimes one per layer type.
    parameters = values.get("rope_parameters")
    if isinstance(parameters, dict):
        full = parameters.get("full_attention", parameters)
        values.setdefault("rope_theta", full.get("rope_theta", 10_000.0))
        values.setdefault("rope_scaling", full)
        if "sliding_attention" in parameters:
            values.setdefault("rope_local_base_freq", parameters["sliding_attention"].get("rope_theta"))
    values["rope_scaling"] = RopeScaling.from_dict(values.get("rope_scaling"))
    # A null or zero window means full attention.
    if not values.get("sliding_window"):
        values["sliding_window"] = None
    for name in ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"):
        if values.get(name) is not None:
            _check_count(name, values[name])
    window = values["sliding_window"]
    if "layer_types" not in values:
        values["layer_types"] = _layer_types(values, window)
    if window is None:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    values["layer_types"] = tuple(values["layer_types"])
    values["torch_dtype"] = str(values.get("torch_dtype", values.get("dtype", "bfloat16"))).removeprefix("torch.")
    eos = values.get("eos_token_id", ())
    values["eos_token_ids"] = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    return values


def _layer_types(values: dict[str, Any], window: int | None) -> list[str]:
    """Gemma 3 gives a period: every `sliding_window_pattern`-th layer is full, the others slide."""
    layers = values["num_hidden_layers"]
    if window is None:
        return ["full_attention"] * layers
    pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern"))
    if not pattern:
        return ["sliding_attention"] * layers
    return ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
