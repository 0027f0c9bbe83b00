"""The memory plan: everything a running engine holds, part by part, before any of it is allocated. Numbers only.

    ├─ others ─┬─ context ─┬─ weights ─┬─ activations ─┬─ sampler ─┬─ log-probabilities ─┬─ KV blocks ─┬─ left alone ─┤
    0                                                                                                 ▲            total
                                                             gpu_memory_utilization x total, on a GPU ┘

The engine's start and `kvant plan` are this one piece of arithmetic. KV blocks get what the other parts leave
(`config/kv_memory.py` divides it), so nothing that is allocated later can find the memory taken.
"""

from typing import NamedTuple

from kvant.config.engine import EngineConfig
from kvant.config.kv_memory import KVPlan
from kvant.config.model import ModelConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

CUDA_CONTEXT = 512 << 20  # what the driver and the libraries take on a GPU before the first tensor
SCORE_ROWS = 128  # prompt positions whose logits exist at the same time: 128 x 49,152 fp32 are 25 MB
# Per logit, at the peak of drawing with every filter in use; tests/sampling/test_memory.py measures it. The native executor
# draws row after row, and holds only the logits and a copy to edit.
SAMPLER_BYTES = {"torch": 57, "native": 8}
# Per logit of a prompt position: itself in fp32, and with torch what the log of the sum of exponentials keeps beside it.
SCORE_BYTES = {"torch": 8, "native": 4}


class Part(NamedTuple):
    """What one thing takes."""

    name: str
    num_bytes: int
    what: str  # how the number comes about


def fixed_parts(config: EngineConfig, model: ModelConfig, executor: str, weight_bytes: int) -> tuple[Part, ...]:
    """Everything but the KV blocks. Of `config` device, dtype, tokens per step and sequences must be decided."""
    weights = Part("weights", weight_bytes, "every matrix and vector of the network")
    step = (_activations(config, model), _sampler(config, model, executor), _logprobs(model, executor))
    if config.device == "cpu":
        return (weights, *step)
    return (Part("context", CUDA_CONTEXT, "the driver and its libraries, before the first tensor"), weights, *step)


def kv_parts(plan: KVPlan) -> tuple[Part, ...]:
    """The KV blocks of every layer group."""
    return tuple(
        Part(
            f"KV blocks, {group.name}" if len(plan.groups) > 1 else "KV blocks",
            blocks * group.block_bytes(plan.itemsize),
            f"{blocks:,} blocks of {group.block_size} tokens, {len(group.layers)} layers",
        )
        for group, blocks in zip(plan.groups, plan.num_blocks, strict=True)
    )


def _activations(config: EngineConfig, model: ModelConfig) -> Part:
    """The widest moment of a layer: two fp32 residual rows and a normalised one, and what the products make of it.

    Attention holds q, k, v, their turned copies and the result; the feed-forward part its gate and up halves and their
    product.
    """
    tokens = _decided(config.max_num_batched_tokens)
    heads, kv_heads = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    widest = max(2 * (heads + 2 * kv_heads) + heads, 3 * model.intermediate_size)
    row = 2 * 4 * model.hidden_size + (model.hidden_size + widest) * ITEMSIZE[config.dtype]
    return Part("activations", tokens * row, f"{tokens:,} tokens in one step")


def _sampler(config: EngineConfig, model: ModelConfig, executor: str) -> Part:
    rows = config.max_num_seqs
    num_bytes = rows * model.vocab_size * SAMPLER_BYTES[executor]
    return Part("sampler", num_bytes, f"logits of {rows} sequences and what filtering and drawing make of them")


def _logprobs(model: ModelConfig, executor: str) -> Part:
    num_bytes = SCORE_ROWS * model.vocab_size * SCORE_BYTES[executor]
    return Part("log-probabilities", num_bytes, f"{SCORE_ROWS} prompt positions scored at a time")


def _decided(value: int | None) -> int:
    assert value is not None, "decided before memory is"
    return value
