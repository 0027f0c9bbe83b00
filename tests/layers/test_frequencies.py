"""Rotary frequencies against transformers' own functions, digit by digit, and as angles of late positions."""

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvant.config.model import ModelConfig
from kvant.errors import CheckpointError, UnsupportedError
from kvant.layers.frequencies import frequencies

LATE = (0, 1, 63, 64, 4095, 8191, 32_768, 131_071)
SIZES = {"64": (768, 12, 64), "96": (768, 8, 96), "128": (1024, 8, 128), "own": (768, 8, 80)}


def divisors(count: int, top: float) -> list[float]:
    return [1.0 + (top - 1.0) * (i / count) ** 2 for i in range(count)]


# name: (rope_scaling, theta, max_position_embeddings, other keys of the config)
SCALINGS = {
    "default": ({"rope_type": "default"}, 1e4, 2048, {}),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 1e4, 8192, {}),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.5}, 1e4, 4096, {}),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}, 5e5, 131_072, {},
    ),
    "llama3.2": (
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}, 5e5, 131_072, {},
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 1e6, 131_072, {}),
    "yarn-betas": (
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 24.0, "beta_slow": 2.0,
         "truncate": False}, 1e4, 65_536, {},
    ),
    "yarn-mscale": (
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.1},
        1e4, 163_840, {},
    ),
    "yarn-attention": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
        1e4, 16_384, {},
    ),
    "longrope": ({"rope_type": "longrope", "original_max_position_embeddings": 4096, "lists": True}, 1e4, 131_072, {}),
    "longrope-factors": (
        {"rope_type": "longrope", "original_max_position_embeddings": 4096, "lists": True, "factor": 8.0,
         "attention_factor": 1.5}, 1e4, 131_072, {},
    ),
    "longrope-outside": (
        {"rope_type": "longrope", "lists": True}, 1e4, 131_072, {"original_max_position_embeddings": 4096},
    ),
}  # fmt: skip


def raw_config(scaling: dict, theta: float, longest: int, size, **more) -> dict:
    hidden, heads, head_dim = size
    scaling = dict(scaling)
    if scaling.pop("lists", False):
        scaling |= {"short_factor": divisors(head_dim // 2, 3.0), "long_factor": divisors(head_dim // 2, 60.0)}
    return {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim,
        "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8, "rope_theta": theta,
        "max_position_embeddings": longest, "rope_scaling": scaling, **more,
    }  # fmt: skip


def ours(raw: dict, context: int) -> tuple[np.ndarray, float]:
    config = ModelConfig.from_dict({**raw, "architectures": ["LlamaForCausalLM"]})
    scaling = config.rope_scaling
    return frequencies(config.rotary_dim, config.rope_theta, scaling, context), scaling.attention_factor


def theirs(raw: dict, context: int) -> tuple[np.ndarray, float]:
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    config = transformers.LlamaConfig(**raw)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        function = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters
        inverse, factor = function(config)
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=context)
    return inverse.numpy(), factor


def in_older_spelling(raw: dict) -> dict:
    """`type` for `rope_type`, and "su" for what it was called first."""
    scaling = dict(raw["rope_scaling"])
    kind = scaling.pop("rope_type")
    return {**raw, "rope_scaling": {**scaling, "type": "su" if kind == "longrope" else kind}}


def in_newer_spelling(raw: dict) -> dict:
    """Everything in `rope_parameters`."""
    rest = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_theta")}
    return {**rest, "rope_parameters": {**raw["rope_scaling"], "rope_theta": raw["rope_theta"]}}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", SCALINGS)
def test_R44_frequencies_are_those_of_transformers(name, size):
    scaling, theta, longest, more = SCALINGS[name]
    raw = raw_config(scaling, theta, longest, size, **more)
    for context in (100, longest, 3 * longest if name == "dynamic" else longest):
        expected, factor = theirs(raw, context)
        for spelling in (raw, in_older_spelling(raw), in_newer_spelling(raw)):
            got, our_factor = ours(spelling, context)
            assert got.dtype == np.float32 and our_factor == pytest.approx(factor, rel=1e-12)
            # Places in the last digit: torch's fp32 power is not rounded correctly everywhere.
            assert np.abs(got.view(np.int32) - expected.view(np.int32)).max() <= 4, (name, context)


@pytest.mark.parametrize("name", SCALINGS)
def test_R44_late_positions_turn_as_in_transformers(name):
    scaling, theta, longest, more = SCALINGS[name]
    raw = raw_config(scaling, theta, longest, SIZES["128"], **more)
    (expected, factor), (got, our_factor) = theirs(raw, longest), ours(raw, longest)
    for position in LATE:
        angles = torch.tensor(position, dtype=torch.float32) * torch.from_numpy(expected)
        our_angles = torch.tensor(position, dtype=torch.float32) * torch.from_numpy(got)
        # Two units in the last place of the largest angle; an error of the rule would be thousands of times larger.
        assert (our_angles - angles).abs().max() <= 2.5e-7 * max(1, position)
        assert torch.allclose(our_angles.cos() * our_factor, angles.cos() * factor, atol=2.5e-7 * max(4, position))


def test_R44_the_scalings_differ_from_each_other():
    """What the comparison above would not see: a rule that does nothing."""
    found = {}
    for name, (scaling, _, longest, more) in SCALINGS.items():
        got, factor = ours(raw_config(scaling, 1e4, longest, SIZES["64"], **more), 3 * longest)
        found[name] = (*got.tolist(), factor)
    same = [(a, b) for a in found for b in found if a < b and found[a] == found[b]]
    assert same == [("longrope", "longrope-outside")]


def test_R44_the_context_that_will_be_run_chooses_longropes_list():
    scaling, theta, longest, more = SCALINGS["longrope"]
    raw = raw_config(scaling, theta, longest, SIZES["64"], **more)
    short, edge, beyond = (ours(raw, context)[0] for context in (100, 4096, 4097))
    assert np.array_equal(short, edge) and not np.array_equal(edge, beyond)


def test_R44_a_partial_head_turns_its_part():
    raw = raw_config({"rope_type": "default"}, 1e4, 2048, SIZES["128"], partial_rotary_factor=0.75)
    config = ModelConfig.from_dict({**raw, "architectures": ["Phi3ForCausalLM"]})
    assert config.rotary_dim == 96
    expected = 1.0 / 1e4 ** (np.arange(0, 96, 2) / 96)
    np.testing.assert_allclose(frequencies(96, 1e4, config.rope_scaling, 2048), expected, rtol=1e-6)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["ntk", "mrope", "proportional", "", 3, None, ["yarn"]])
def test_R44_an_unknown_type_is_refused_with_what_there_is(spelling, where, kind):
    raw = raw_config({}, 1e4, 2048, SIZES["64"], architectures=["LlamaForCausalLM"])
    raw[where] = {spelling: kind, "factor": 2.0}
    with pytest.raises(UnsupportedError, match=r"rope_scaling type .* supported: default, .*llama3 \(see docs/models\.md\)"):
        ModelConfig.from_dict(raw)


WRONG = {
    "linear without its factor": {"rope_type": "linear"},
    "no number": {"rope_type": "linear", "factor": "four"},
    "truth": {"rope_type": "linear", "factor": True},
    "negative": {"rope_type": "dynamic", "factor": -2.0},
    "infinite": {"rope_type": "yarn", "factor": float("inf")},
    "not a number": {"rope_type": "yarn", "factor": 4.0, "attention_factor": float("nan")},
    "zero context": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": -1},
    "llama3's ends": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
    "no lists": {"rope_type": "longrope", "factor": 4.0},
    "short list": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [1.0] * 32},
    "text in a list": {"rope_type": "longrope", "factor": 4.0, "short_factor": ["a"] * 32, "long_factor": [1.0] * 32},
    "zero in a list": {"rope_type": "longrope", "factor": 4.0, "short_factor": [0.0] * 32, "long_factor": [1.0] * 32},
    "not a table": ["linear", 4.0],
}


@pytest.mark.parametrize("scaling", WRONG.values(), ids=WRONG)
def test_R44_numbers_that_make_no_sense_are_refused(scaling):
    raw = raw_config({}, 1e4, 2048, SIZES["64"], architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError):
        ModelConfig.from_dict({**raw, "rope_scaling": scaling})
