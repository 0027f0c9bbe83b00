"""A transformers model as the GGUF file that llama.cpp's converter would make of it.

Names of tensors and keys come from the public gguf package, an oracle that our tables were not made from; what the converter
does to values (rows of q and k in pairs, norms of Gemma, divisors as tensors) is written anew here.
"""

import math
from pathlib import Path

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
IN_PAIRS = ("llama", "mistral", "smollm3")


def write_gguf(path: Path, hf) -> Path:
    """Writes `hf`, whose weights are fp32, to `path`."""
    kind = hf.config.model_type
    arch = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _shape(writer, hf.config)
    _window(writer, hf.config)
    _rope(writer, hf.config)
    table = gguf.get_tensor_name_map(arch, hf.config.num_hidden_layers)
    for name, tensor in hf.state_dict().items():
        if name == "lm_head.weight" and hf.config.tie_word_embeddings:
            continue
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, _converted(name, tensor, hf.config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _shape(writer, config) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type != "phi3":
        writer.add_key_length(head_dim(config))
        writer.add_value_length(head_dim(config))
    writer.add_token_list(["x"] * config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id)


def _window(writer, config) -> None:
    if config.model_type == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    elif config.model_type in ("mistral", "gemma2", "gemma3_text") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _rope(writer, config) -> None:
    if config.model_type == "gemma2":
        return  # the converter writes nothing: llama.cpp knows it
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    size = int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type in ("llama", "mistral", "phi3", "smollm3"):
        writer.add_rope_dimension_count(size)
    kind = rope["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3(rope, size))
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0)
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
    else:
        assert kind == "default", f"GGUF has no words for {kind}"


def _llama3(rope: dict, size: int) -> np.ndarray:
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    divisors = []
    for i in range(0, size, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / size)
        share = (low / wave - 1) / (low / high - 1)
        divisors.append(1 if wave < high else rope["factor"] if wave > low else 1 / ((1 - share) / rope["factor"] + share))
    return np.array(divisors, np.float32)


def _converted(name: str, tensor: torch.Tensor, config) -> np.ndarray:
    values = tensor.float().numpy()
    kind = config.model_type
    if kind in IN_PAIRS and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if kind.startswith("gemma") and "norm" in name:
        values = values + np.float32(1)
    return np.ascontiguousarray(values)
