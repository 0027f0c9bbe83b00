"""The plain path: Llama and Qwen 3 in fp32, eagerly, a layer's weights at a time. What a benchmark's answers are held against.

    x = embed(ids);  x += attention(norm(x));  x += mlp(norm(x));  logits of the last position

Written from the papers, sharing nothing with the engine but the weights: those of a `dummy:` model, by recipe, so that 8 B
parameters in fp32 need the memory of one layer only.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvant.checkpoint.dummy import DummyTensors
from kvant.config.model import ModelConfig
from kvant.layers.frequencies import frequencies
from kvant.quantization.random import make


class Agreement(NamedTuple):
    """First tokens of an engine against the plain path's."""

    num_equal: int
    num_prompts: int
    largest_gap: float  # of a token that is not the plain path's: how far below its best logit, in standard deviations

    @property
    def holds(self) -> bool:
        """Equal but for near-ties: bf16 moves a logit of random weights by a hundredth of their spread."""
        return 2 * self.num_equal > self.num_prompts and self.largest_gap < 0.1


@torch.inference_mode()
def last_logits(config_file: Path, prompts: Tensor, device: str) -> Tensor:
    """`prompts` [S, T] -> fp32 logits [S, V] of what follows."""
    raw = json.loads(config_file.read_text())
    config = ModelConfig.from_dict(raw)
    weights = _Weights(raw, config, device)
    head_dim, kv_heads = config.head_dim, config.num_key_value_heads
    angles = torch.arange(prompts.shape[1], device=device)[:, None] * frequencies_of(config, device)  # [T, H / 2]
    x = weights("model.embed_tokens.weight", config.vocab_size, config.hidden_size)[prompts]
    for layer in range(config.num_hidden_layers):
        part = weights.of_layer(layer)
        h = _norm(x, part("input_layernorm.weight", config.hidden_size), config.rms_norm_eps)
        q, k, v = (
            (h @ part(f"self_attn.{name}_proj.weight", heads * head_dim, config.hidden_size).T)
            .unflatten(-1, (heads, head_dim))
            .transpose(1, 2)
            for name, heads in (("q", config.num_attention_heads), ("k", kv_heads), ("v", kv_heads))
        )
        if config.architecture == "Qwen3ForCausalLM":
            q = _norm(q, part("self_attn.q_norm.weight", head_dim), config.rms_norm_eps)
            k = _norm(k, part("self_attn.k_norm.weight", head_dim), config.rms_norm_eps)
        a = F.scaled_dot_product_attention(_turned(q, angles), _turned(k, angles), v, is_causal=True, enable_gqa=True)
        a = a.transpose(1, 2).flatten(2)
        x = x + a @ part("self_attn.o_proj.weight", config.hidden_size, a.shape[-1]).T
        h = _norm(x, part("post_attention_layernorm.weight", config.hidden_size), config.rms_norm_eps)
        size = (config.intermediate_size, config.hidden_size)
        gate, up = F.silu(h @ part("mlp.gate_proj.weight", *size).T), h @ part("mlp.up_proj.weight", *size).T
        x = x + (gate * up) @ part("mlp.down_proj.weight", *size[::-1]).T
    last = _norm(x[:, -1], weights("model.norm.weight", config.hidden_size), config.rms_norm_eps)
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return last @ weights(name, config.vocab_size, config.hidden_size).T


def agreement(config_file: Path, prompts: list[list[int]], tokens: list[int], device: str) -> Agreement:
    """How the first `tokens` [S] of an engine's answers to `prompts`, all of one length, agree with the plain path."""
    logits = last_logits(config_file, torch.tensor(prompts, device=device), device)
    chosen = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    gaps = (logits.max(-1).values - chosen) / logits.std(-1)
    return Agreement(int((gaps == 0).sum()), len(prompts), float(gaps.max()))


def frequencies_of(config: ModelConfig, device: str) -> Tensor:
    """Angles per position [H / 2]; the scaling rules are tested against transformers elsewhere."""
    values = frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
    return torch.as_tensor(values, dtype=torch.float32, device=device)


class _Weights:
    """Weights by name, made when they are asked for."""

    def __init__(self, raw: dict[str, Any], config: ModelConfig, device: str, prefix: str = ""):
        self.source = DummyTensors(str(raw.get("torch_dtype", "bfloat16")))
        self.raw, self.config, self.device, self.prefix = raw, config, device, prefix

    def of_layer(self, layer: int) -> "_Weights":
        return _Weights(self.raw, self.config, self.device, f"model.layers.{layer}.")

    def __call__(self, name: str, *shape: int) -> Tensor:
        return make(self.source.find(self.prefix + name, shape), self.device, torch.float32)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [S, N, T, H]: halves turned against each other (Su et al., 2021)."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
