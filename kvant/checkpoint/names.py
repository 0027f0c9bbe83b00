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
    "rope.scaling.attn_factor": (0.0, 1.0),
    "attention.causal": (1,),
}
HF_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0,),
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
    norm weight, `constants` the config values that it knows by architecture and does not write.
    """

    architecture: str  # Hugging Face's class name
    layer: Mapping[str, str]  # names inside blk.<i>. -> names inside model.layers.<i>.
    permuted: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    constants: Mapping[str, Any] = field(default_factory=dict)


GGUF_FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(
        architecture="LlamaForCausalLM",
        layer={**_GGUF_BRICKS, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        permuted=frozenset({"self_attn.q_proj", "self_attn.k_proj"}),
        constants={"hidden_act": "silu"},
    ),
    "gemma3": GGUFFamily(
        architecture="Gemma3ForCausalLM",
        layer={
            **_GGUF_BRICKS,
            "attn_norm": "input_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    ),
}

# Defaults of transformers' config classes that differ from ours; older config.json files leave them out.
HF_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma3ForCausalLM": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}

# What is added to a norm's stored weight before it multiplies: random weights must come near 1 in either convention.
NORM_OFFSETS: Mapping[str, float] = {"Gemma3ForCausalLM": 1.0}

# Buffers that old exports kept beside the weights; every engine computes them from the config.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".self_attn.masked_bias")
