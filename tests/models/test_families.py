"""Each family against transformers in fp32 on tiny random models: whole prompts, chunks, decoding, mixed batches, windows."""

import pytest
import torch

from kvant.attention.reference import ReferenceAttention
from kvant.attention.sdpa import SDPAAttention
from kvant.config.model import ModelConfig
from kvant.models.registry import FAMILIES
from tests.models import cases
from tests.models.cases import gemma3, reference, tokens
from tests.network import Harness

TOLERANCE = 3e-5  # fp32 sums in another order; logits are of size 1 to 5


@pytest.fixture(scope="module", params=cases.CASES)
def pair(request):
    """(transformers model, our model) with the same random weights."""
    return cases.pair(request.param)


def test_every_registered_family_has_a_case(request):
    classes = {cases.CASES[name]().model_type for name in cases.CASES}
    assert len(classes) == len(FAMILIES)


@pytest.mark.parametrize("attention", [SDPAAttention, ReferenceAttention])
def test_prefill_and_decode(pair, attention):
    hf, ours = pair
    ids = tokens(41, 1)
    expected = reference(hf, ids)
    harness = Harness(ours, attention=attention)
    assert torch.allclose(harness.logits([("a", ids[:30], 0)]), expected[:30], atol=TOLERANCE, rtol=1e-4)
    for position in range(30, 41):  # beyond gemma's window of 9
        got = harness.logits([("a", ids[position : position + 1], position)])
        assert torch.allclose(got[0], expected[position], atol=TOLERANCE, rtol=1e-4), position


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 40])
def test_R47_chunked_prefill_sees_exactly_the_window(pair, chunk):
    hf, ours = pair
    ids = tokens(40, 2)
    harness = Harness(ours)
    parts = [harness.logits([("a", ids[p : p + chunk], p)]) for p in range(0, 40, chunk)]
    assert torch.allclose(torch.cat(parts), reference(hf, ids), atol=TOLERANCE, rtol=1e-4)


def test_mixed_batch_equals_each_alone(pair):
    hf, ours = pair
    harness = Harness(ours)
    whole = {name: tokens(length, seed) for seed, (name, length) in enumerate([("a", 20), ("b", 33), ("c", 5), ("d", 12)])}
    harness.logits([("a", whole["a"][:19], 0), ("b", whole["b"][:10], 0)])
    rows = [("a", whole["a"][19:], 19), ("b", whole["b"][10:], 10), ("c", whole["c"], 0), ("d", whole["d"][:1], 0)]
    got = harness.logits(rows)
    expected = torch.cat(
        [
            reference(hf, whole["a"])[19:],
            reference(hf, whole["b"])[10:],
            reference(hf, whole["c"]),
            reference(hf, whole["d"])[:1],
        ]
    )
    assert torch.allclose(got, expected, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("window", [0, None])
def test_R47_a_null_or_zero_window_is_full_attention(window):
    config = ModelConfig.from_dict({**gemma3().to_dict(), "architectures": ["Gemma3ForCausalLM"], "sliding_window": window})
    assert [config.window(layer) for layer in range(7)] == [None] * 7
    assert len(config.cache_groups()) == 1


def test_layer_groups_follow_the_windows():
    config = ModelConfig.from_dict({**gemma3().to_dict(), "architectures": ["Gemma3ForCausalLM"]})
    groups = {group.name: group.layers for group in config.cache_groups()}
    assert groups == {"sliding9": (0, 1, 2, 3, 4, 6), "full": (5,)}


def test_R45_head_dim_is_not_hidden_size_over_heads():
    _, ours = cases.pair("llama-head-dim")
    attention = ours.model.layers[0].self_attn
    assert attention.qkv_proj.wants()["q_proj.weight"] == (6 * 24, 48)
