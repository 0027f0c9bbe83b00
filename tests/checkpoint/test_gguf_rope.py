"""What a GGUF says about positions, and what is refused there."""

import numpy as np
import pytest

from kvant.config.model import ModelConfig
from kvant.errors import CheckpointError, UnsupportedError
from tests.checkpoint.files import f32_tensor
from tests.checkpoint.test_gguf_model import SIZE, metadata, opened
from tests.checkpoint.test_rope_factors import converted

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
LONG = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25, "rope.dimension_count": SIZE}
LISTS = [
    f32_tensor("rope_factors_long.weight", np.arange(2, 2 + SIZE // 2)),
    f32_tensor("rope_factors_short.weight", np.ones(SIZE // 2)),
]


def config(tmp_path, family: str, tensors=(), **changes) -> ModelConfig:
    return ModelConfig.from_dict(opened(tmp_path, metadata(family, **changes), list(tensors)).config | {"vocab_size": 40})


def test_R44_yarn_as_transformers_advises(tmp_path):
    scaling = config(tmp_path, "qwen2", **YARN).rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 32)
    assert scaling.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1) and (scaling.beta_fast, scaling.beta_slow) == (
        32,
        1,
    )


def test_R44_yarns_own_numbers(tmp_path):
    more = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_attn_factor": 1.5}
    scaling = config(tmp_path, "qwen3", **YARN, **more).rope_scaling
    assert (scaling.beta_fast, scaling.beta_slow, scaling.attention_factor) == (16.0, 2.0, 1.5)
    scaling = config(tmp_path, "llama", **YARN, **{"rope.scaling.yarn_log_multiplier": 1.0}).rope_scaling
    assert scaling.attention_factor == 1.0  # mscale and mscale_all_dim cancel each other


def test_R44_longrope_is_two_tensors(tmp_path):
    checkpoint = opened(tmp_path, metadata("phi3", **LONG), LISTS)
    scaling = ModelConfig.from_dict(checkpoint.config | {"vocab_size": 40}).rope_scaling
    assert (scaling.rope_type, scaling.original_max_position_embeddings, scaling.factor) == ("longrope", 32, 4.0)
    assert scaling.long_factor == tuple(range(2, 2 + SIZE // 2)) and scaling.short_factor == (1.0,) * (SIZE // 2)
    assert scaling.attention_factor == 1.25
    assert checkpoint.skipped == () and not checkpoint.tensors.names()


def test_R44_longrope_without_its_factor_takes_the_papers(tmp_path):
    changes = {**LONG, "rope.scaling.attn_factor": None, "rope.scaling.type": "longrope"}
    factor = config(tmp_path, "phi3", LISTS, **changes).rope_scaling.attention_factor
    assert factor == pytest.approx(np.sqrt(1 + np.log(4) / np.log(32)))


def test_R44_a_part_of_each_head_turns_in_phi(tmp_path):
    assert config(tmp_path, "phi3", **{"rope.dimension_count": 12}).rotary_dim == 12
    assert config(tmp_path, "phi3").rotary_dim == SIZE


REFUSED = {
    "one list": ("phi3", LONG, LISTS[:1], CheckpointError, "lacks rope_factors_short"),
    "no lists": ("phi3", {**LONG, "rope.scaling.type": "longrope"}, [], CheckpointError, "lacks rope_factors_long"),
    "wrong length": ("phi3", {**LONG, "rope.dimension_count": 12}, LISTS, CheckpointError, "not one fp32 per pair"),
    "stretched twice": (
        "llama", YARN, [f32_tensor("rope_freqs.weight", converted(SIZE, 5e5, 8.0))], UnsupportedError, "twice .yarn and llama3",
    ),
    "yarn's extrapolation": (
        "llama", {**YARN, "rope.scaling.yarn_ext_factor": 0.5}, [], UnsupportedError, "extrapolation factor",
    ),
    "a factor of no scaling": ("llama", {"rope.scaling.attn_factor": 2.0}, [], UnsupportedError, "attn_factor"),
    "a part of a head": ("qwen2", {"rope.dimension_count": 12}, [], UnsupportedError, "partial rotary"),
    "more than a head": ("phi3", {"rope.dimension_count": 2 * SIZE}, [], CheckpointError, "cannot turn"),
    "an odd part": ("phi3", {"rope.dimension_count": 11}, [], CheckpointError, "rotary_dim must be even"),
    "no part": ("phi3", {"rope.dimension_count": 0}, [], CheckpointError, "rotary_dim"),
}  # fmt: skip


@pytest.mark.parametrize("family, changes, tensors, kind, named", REFUSED.values(), ids=REFUSED)
def test_R44_what_would_turn_otherwise_is_refused(tmp_path, family, changes, tensors, kind, named):
    with pytest.raises(kind, match=named):
        config(tmp_path, family, tensors, **changes)


def test_R46_gemma_2_constants_that_older_files_leave_out(tmp_path):
    found = config(tmp_path, "gemma2", **{"rope.freq_base": None, "block_count": 4})
    assert (found.attn_logit_softcapping, found.final_logit_softcapping) == (50.0, 30.0)
    assert [found.window(layer) for layer in range(4)] == [4096, None, 4096, None]
    assert (found.query_pre_attn_scalar, found.rope_theta) == (SIZE, 1e4)
    given = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "attention.sliding_window": 9}
    found = config(tmp_path, "gemma2", **given)
    assert (found.attn_logit_softcapping, found.final_logit_softcapping, found.window(0)) == (20.0, 10.0, 9)


def test_R46_gemma_2_27b_scales_its_queries_differently(tmp_path):
    deep = config(tmp_path, "gemma2", **{"block_count": 46, "attention.head_count": 4})
    assert deep.query_pre_attn_scalar == deep.hidden_size // 4


def test_smollm3_has_layers_without_positions(tmp_path):
    found = config(tmp_path, "smollm3", block_count=8)
    assert [found.turns(layer) for layer in range(8)] == [True, True, True, False] * 2
