"""How files name things, as data: GGUF's keys and tensors against Hugging Face's, and what families leave unsaid.

Everything above this package speaks Hugging Face: config keys as in config.json, tensors as in safetensors. A family whose
GGUF files can be read is one entry of `GGUF_FAMILIES`; the rules that use it are in `gguf_model.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# GGUF key, behind "<architecture>." -> (key of config.json, kind of number)
GGUF_KEYS: Mapping[str, tuple[str, type]] = {
    "block_count": ("num_hidden_layers", int),
    "context_length": ("max_position_embeddings", int),
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.key_length": ("head_dim", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "attention.sliding_window": ("sliding_window", int),
    "rope.freq_base": ("rope_theta", float),
    "rope.freq_base_swa": ("rope_local_base_freq", float),
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
}

# Keys that change the network and are not built here, with the values that change nothing.
GGUF_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "expert_count": (0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "attention.causal": (1,),
}
HF_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (False,),
    "num_local_experts": (0,),
    "num_experts": (0,),
}

# Sampling defaults that a GGUF may carry -> keys of generation_config.json.
GGUF_SAMPLING: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

# All of them end an answer: end of sequence, of turn, of message.
GGUF_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
GGUF_BOS_TOKEN = "tokenizer.ggml.bos_token_id"

# Tensors outside the layers: GGUF's name -> Hugging Face's.
GGUF_OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_BRICKS: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """What one `general.architecture` means.

    `permuted` names the projections whose rows llama.cpp reorders within each head, `norm_offset` what it adds to every
    norm weight, `constants` the config values that it knows by architecture and does not write. `width_scaled` is the
    number of layers of the one size whose scores are scaled by hidden size per head instead of by head size.
    """

    architecture: str  # Hugging Face's class name
    layer: Mapping[str, str]  # names inside blk.<i>. -> names inside model.layers.<i>.
    permuted: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    constants: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False  # whether only a part of a head may turn
    width_scaled: int | None = None


_PRE_NORM = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_STACKED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}  # gate first, then up
_TURNED_IN_PAIRS = frozenset({"self_attn.q_proj", "self_attn.k_proj"})

GGUF_FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(  # Mistral's files say llama too
        architecture="LlamaForCausalLM",
        layer={**_GGUF_BRICKS, **_PRE_NORM},
        permuted=_TURNED_IN_PAIRS,
        constants={"hidden_act": "silu"},
    ),
    "qwen2": GGUFFamily(
        architecture="Qwen2ForCausalLM",
        layer={**_GGUF_BRICKS, **_PRE_NORM},
        constants={"hidden_act": "silu", "attention_bias": False},  # its own biases are no matter of the config
    ),
    "qwen3": GGUFFamily(
        architecture="Qwen3ForCausalLM",
        layer={**_GGUF_BRICKS, **_PRE_NORM, **_HEAD_NORMS},
        constants={"hidden_act": "silu"},
    ),
    "phi3": GGUFFamily(
        architecture="Phi3ForCausalLM",
        layer={**_PRE_NORM, **_STACKED, "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"},
        constants={"hidden_act": "silu"},
        partial_rotary=True,
    ),
    "smollm3": GGUFFamily(
        architecture="SmolLM3ForCausalLM",
        layer={**_GGUF_BRICKS, **_PRE_NORM},
        permuted=_TURNED_IN_PAIRS,
        constants={"hidden_act": "silu", "no_rope_layer_interval": 4},
    ),
    "gemma2": GGUFFamily(
        architecture="Gemma2ForCausalLM",
        layer={**_GGUF_BRICKS, **_SANDWICH},
        norm_offset=1.0,
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        width_scaled=46,  # 27B
    ),
    "gemma3": GGUFFamily(
        architecture="Gemma3ForCausalLM",
        layer={**_GGUF_BRICKS, **_SANDWICH, **_HEAD_NORMS},
        norm_offset=1.0,
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        width_scaled=62,  # 27B
    ),
}

# Defaults of transformers' config classes that differ from ours; config.json files may leave them out.
_QWEN_DEFAULTS = {"use_sliding_window": False, "max_window_layers": 28, "max_position_embeddings": 32_768}
HF_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN_DEFAULTS,
    "Qwen3ForCausalLM": {**_QWEN_DEFAULTS, "head_dim": 128},
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "SmolLM3ForCausalLM": {
        "max_position_embeddings": 32_768,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Gemma2ForCausalLM": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "Gemma3ForCausalLM": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}

# Keys that a config may hold and transformers' class of that name does not read.
HF_UNREAD: Mapping[str, frozenset[str]] = {
    "LlamaForCausalLM": frozenset({"sliding_window", "layer_types"}),
    "MistralForCausalLM": frozenset({"layer_types", "attention_bias", "mlp_bias"}),
    "Qwen2ForCausalLM": frozenset({"attention_bias", "mlp_bias"}),
    "Qwen3ForCausalLM": frozenset({"mlp_bias"}),
    "Phi3ForCausalLM": frozenset({"layer_types", "attention_bias", "mlp_bias"}),
    "Gemma2ForCausalLM": frozenset({"mlp_bias"}),
    "Gemma3ForCausalLM": frozenset({"mlp_bias"}),
}

# Classes that turn a part of each head where `partial_rotary_factor` says so; the others turn all of it.
HF_PARTIAL_ROTARY = frozenset({"Phi3ForCausalLM"})

# What is added to a norm's stored weight before it multiplies: random weights must come near 1 in either convention.
NORM_OFFSETS: Mapping[str, float] = {"Gemma2ForCausalLM": 1.0, "Gemma3ForCausalLM": 1.0}

# Buffers that old exports kept beside the weights; every engine computes them from the config.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".self_attn.masked_bias")
