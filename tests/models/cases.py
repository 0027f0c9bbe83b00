"""Every family as a tiny random model: transformers' own, and ours with its weights. Shared by tests and the parity table.

Configs are small and awkward on purpose: windows that are passed within a test, heads of a size of their own, layers that
differ from each other.
"""

from dataclasses import replace

import torch
import transformers

from kvant.config.model import ModelConfig
from tests.network import from_transformers

VOCAB = 131
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GEMMA = dict(num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=1, head_dim=16, sliding_window=9)

LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0 + 0.1 * i for i in range(4)],
    long_factor=[1.5 + 2.0 * i for i in range(4)],
    original_max_position_embeddings=64,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=5e5,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, rope_theta=1e6)


def llama(**changes):
    return transformers.LlamaConfig(**{**SHAPE, **changes})


def mistral(**changes):
    return transformers.MistralConfig(**{**SHAPE, "sliding_window": 9, **changes})


def qwen2(**changes):
    return transformers.Qwen2Config(**{**SHAPE, **changes})


def qwen3(**changes):
    return transformers.Qwen3Config(**{**SHAPE, "head_dim": 16, **changes})


def phi3(**changes):
    return transformers.Phi3Config(**{**SHAPE, "original_max_position_embeddings": 64, **changes})


def smollm3(**changes):
    return transformers.SmolLM3Config(**{**SHAPE, "num_hidden_layers": 5, **changes})


def gemma2(**changes):
    caps = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=24)  # low enough to bite
    return transformers.Gemma2Config(**{**SHAPE, **GEMMA, **caps, **changes})


def gemma3(**changes):
    return transformers.Gemma3TextConfig(**{**SHAPE, **GEMMA, "query_pre_attn_scalar": 24, **changes})


CASES = {
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-bias": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: llama(head_dim=24),
    "llama-mha": lambda: llama(num_key_value_heads=6),
    "llama3": lambda: llama(rope_parameters=dict(LLAMA3)),
    "llama-linear": lambda: llama(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama-dynamic": lambda: llama(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)),
    "mistral": lambda: mistral(),
    "mistral-no-window": lambda: mistral(sliding_window=None, head_dim=24),
    "qwen2": lambda: qwen2(),
    "qwen2-tied-yarn": lambda: qwen2(tie_word_embeddings=True, rope_parameters=dict(YARN)),
    "qwen2-window": lambda: qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": lambda: qwen3(),
    "qwen3-tied": lambda: qwen3(tie_word_embeddings=True, attention_bias=True),
    "phi3": lambda: phi3(),
    "phi3-window": lambda: phi3(sliding_window=9, num_key_value_heads=6),
    "phi3-longrope": lambda: phi3(rope_parameters=dict(LONGROPE, rope_theta=1e4)),
    "phi3-partial": lambda: phi3(
        num_attention_heads=3, num_key_value_heads=1, rope_parameters=dict(LONGROPE, partial_rotary_factor=0.5, rope_theta=1e4)
    ),
    "smollm3": lambda: smollm3(),
    "smollm3-untied-window": lambda: smollm3(tie_word_embeddings=False, use_sliding_window=True, sliding_window=9),
    "gemma2": lambda: gemma2(),
    "gemma2-two-kv-heads": lambda: gemma2(num_key_value_heads=2),
    "gemma3": lambda: gemma3(),
    "gemma3-two-kv-heads": lambda: gemma3(num_key_value_heads=2),
}

CONTEXT = 64  # what the tests run; at longrope's boundary, so that the short list holds


def pair(name: str):
    """(transformers model, our model) with the same random weights."""
    hf = theirs(CASES[name]())
    return hf, from_transformers(hf, config_of(hf))


def theirs(hf_config, seed: int = 7):
    """A transformers model in fp32 with weights larger than the initialiser's 0.02: every part leaves a mark on the logits."""
    torch.manual_seed(seed)
    hf = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval().float()
    offset = 0.0 if hf_config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (offset if "norm" in name else 0.0))
    return hf


def config_of(hf, context: int = CONTEXT) -> ModelConfig:
    raw = {**hf.config.to_dict(), "architectures": [type(hf).__name__]}
    return replace(ModelConfig.from_dict(raw), context_length=context)


def reference(hf, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([ids])).logits[0].float()


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
