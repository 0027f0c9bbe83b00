"""ModelConfig: the shape of a model, under Hugging Face's own key names, whatever file it was read from.

A checkpoint reader hands over a plain dict with these keys (a GGUF's metadata is renamed by data in
`checkpoint/names.py`); `ModelConfig.from_dict` checks it and fills in what the families define as defaults. A value that
would change the network and is not built here (an unknown rope type, an unknown activation) is refused by name.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from kvant.config.rope import RopeScaling
from kvant.errors import CheckpointError, UnsupportedError

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
MAX_LAYERS = 4096  # some things have an entry per layer: a lying file must not make them long
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one network. Counts, not bytes; names are those of HF's config.json."""

    architecture: str  # "LlamaForCausalLM", "Gemma3ForCausalLM": a key of models/registry.py
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int  # how much of a head turns: all of it, but for Phi-4-mini and a few others
    vocab_size: int
    max_position_embeddings: int
    context_length: int | None = None  # longest context that will be run, where the engine has decided it
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None  # rotary base of sliding layers, where it differs
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hidden_activation: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None  # W: a query sees at most W keys, itself included; None: all
    layer_types: tuple[str, ...] = ()
    no_rope_layers: tuple[int, ...] = ()  # HF's name, and its meaning: 1 where a layer turns, 0 where it has no positions
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
        known = {f.name for f in fields(cls)} - {"context_length"}
        config = cls(**{k: v for k, v in values.items() if k in known})
        config._check()
        return config

    def window(self, layer: int) -> int | None:
        """The window of layer `layer` in tokens, or None where it sees everything."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def turns(self, layer: int) -> bool:
        """Whether layer `layer` gives queries and keys their positions."""
        return not self.no_rope_layers or bool(self.no_rope_layers[layer])

    @property
    def longest_context(self) -> int:
        """The most positions that make sense: with dynamic scaling more than the model was trained in."""
        dynamic = self.rope_scaling.rope_type == "dynamic"
        return int(self.max_position_embeddings * self.rope_scaling.factor) if dynamic else self.max_position_embeddings

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
        self._check_values()
        self._check_rotary()
        self._check_layers()
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads ({self.num_attention_heads}) is no multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.hidden_activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"activation {str(self.hidden_activation)[:40]!r} is not built here; supported: {', '.join(ACTIVATIONS)} "
                "(see docs/models.md)"
            )

    def _check_values(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise CheckpointError(f"the model's {name} must be true or false, not {str(value)[:40]!r}")
        for name, least in _NUMBERS.items():
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and least < value < 1e15):
                raise CheckpointError(f"the model's {name} must be a number above {least}, not {str(value)[:40]!r}")

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise CheckpointError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        for kind in self.layer_types:
            if kind not in LAYER_TYPES:
                raise UnsupportedError(
                    f"layer type {str(kind)[:40]!r} is not built here; supported: {', '.join(LAYER_TYPES)} (see docs/models.md)"
                )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise CheckpointError("the model has sliding_attention layers but no sliding_window")
        if self.no_rope_layers and len(self.no_rope_layers) < self.num_hidden_layers:
            raise CheckpointError(f"no_rope_layers has {len(self.no_rope_layers)} entries for {self.num_hidden_layers} layers")

    def _check_rotary(self) -> None:
        for name in ("head_dim", "rotary_dim"):
            if getattr(self, name) % 2:
                raise CheckpointError(f"{name} must be even for rotary embeddings, not {getattr(self, name)}")
        if self.rotary_dim > self.head_dim:
            raise CheckpointError(f"heads of {self.head_dim} values cannot turn {self.rotary_dim} of them")
        scaling = self.rope_scaling
        if scaling.rope_type == "dynamic" and self.rotary_dim < 4:
            raise CheckpointError(f"dynamic rope_scaling needs heads that turn at least 4 values, not {self.rotary_dim}")
        for divisors in (scaling.short_factor, scaling.long_factor):
            if divisors and len(divisors) != self.rotary_dim // 2:
                raise CheckpointError(
                    f"rope_scaling holds {len(divisors)} divisors for the {self.rotary_dim // 2} frequencies of a head"
                )


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


_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rotary_dim",
    "vocab_size",
    "max_position_embeddings",
)
# What must be a number, and above what. A base of 1 would turn every pair alike.
_NUMBERS = {
    "rms_norm_eps": 0,
    "rope_theta": 1,
    "rope_local_base_freq": 1,
    "query_pre_attn_scalar": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
}


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
        values["architecture"] = architectures[0] if isinstance(architectures, (list, tuple)) else architectures
    if not isinstance(values["architecture"], str):
        raise CheckpointError(f"the model's architecture is {str(values['architecture'])[:40]!r}, not the name of a class")
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
    _rope_defaults(values)
    _window_defaults(values)
    values["torch_dtype"] = str(values.get("torch_dtype", values.get("dtype", "bfloat16"))).removeprefix("torch.")
    eos = values.get("eos_token_id", ())
    values["eos_token_ids"] = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    return values


def _rope_defaults(values: dict[str, Any]) -> None:
    """Base, scaling and turning part; older files have `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`."""
    full = _table(values, "rope_parameters")
    if "full_attention" in full or "sliding_attention" in full:  # one table per layer type
        nearby = _table(full, "sliding_attention")
        full = _table(full, "full_attention")
        if nearby.get("rope_type", "default") != "default":
            raise UnsupportedError("sliding layers with a rope_scaling of their own are not built here (see docs/models.md)")
        if nearby.get("rope_theta") is not None:
            values.setdefault("rope_local_base_freq", nearby["rope_theta"])
    scaling = _table(values, "rope_scaling") or full
    for key in ("rope_theta", "partial_rotary_factor"):
        inside = scaling.get(key, full.get(key))
        if inside is not None:
            values[key] = inside
    part = values.get("partial_rotary_factor", 1.0)
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
        raise CheckpointError(f"the model's partial_rotary_factor must be between 0 and 1, not {str(part)[:40]!r}")
    _check_count("head_dim", values["head_dim"])
    _check_count("max_position_embeddings", values["max_position_embeddings"])
    values.setdefault("rotary_dim", int(values["head_dim"] * part))
    original = values.get("original_max_position_embeddings")
    values["rope_scaling"] = RopeScaling.from_dict(scaling, values["max_position_embeddings"], original)
    interval = values.get("no_rope_layer_interval")
    if interval and "no_rope_layers" not in values:
        _check_count("no_rope_layer_interval", interval)
        values["no_rope_layers"] = [int((layer + 1) % interval != 0) for layer in range(values["num_hidden_layers"])]
    values["no_rope_layers"] = tuple(_list(values, "no_rope_layers"))


def _window_defaults(values: dict[str, Any]) -> None:
    """A null or zero window means full attention, and so does a window that is declared but switched off."""
    if not values.get("sliding_window") or values.get("use_sliding_window") is False:
        values["sliding_window"] = None
    for name in ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"):
        if values.get(name) is not None:
            _check_count(name, values[name])
    first = values.get("max_window_layers", 0)
    if isinstance(first, bool) or not isinstance(first, int):
        raise CheckpointError(f"the model's max_window_layers must be a whole number, not {str(first)[:40]!r}")
    if values["sliding_window"] is None:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    elif "layer_types" not in values:
        values["layer_types"] = [
            "sliding_attention" if _slides(values, layer) else "full_attention" for layer in range(values["num_hidden_layers"])
        ]
    values["layer_types"] = tuple(_list(values, "layer_types"))


def _slides(values: dict[str, Any], layer: int) -> bool:
    """Which layers slide where the file does not list them: each family has its own way of saying it."""
    if pattern := values.get("sliding_window_pattern", values.get("_sliding_window_pattern")):
        return bool((layer + 1) % pattern)  # Gemma: a period, of which the last layer is full
    if values.get("use_sliding_window") and values["no_rope_layers"]:
        return not values["no_rope_layers"][layer]  # SmolLM3: the layers without positions
    if values.get("use_sliding_window") and "max_window_layers" in values:
        return bool(layer >= values["max_window_layers"])  # Qwen: the layers from there on
    return True


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"the model's {name} is {str(value)[:40]!r}, not a table of keys")
    return value


def _list(values: dict[str, Any], name: str) -> list[Any]:
    value = values.get(name) or ()
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"the model's {name} is {str(value)[:40]!r}, not a list")
    return list(value)
