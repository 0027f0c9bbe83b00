"""Each family against transformers in fp32 on tiny random models: whole prompts, chunks, decoding, mixed batches, windows."""

import pytest
import torch

from kvant.attention import sdpa
from kvant.attention.reference import ReferenceAttention
from kvant.attention.sdpa import SDPAAttention
from kvant.config.model import ModelConfig
from kvant.models.registry import FAMILIES
from tests.models import cases
from tests.models.cases import gemma3, reference, tokens
from tests.network import Harness, from_transformers

TOLERANCE = 3e-5  # fp32 sums in another order; logits are of size 1 to 5


@pytest.fixture(scope="module", params=cases.CASES)
def pair(request):
    """(transformers model, our model) with the same random weights."""
    return cases.pair(request.param)


def test_every_registered_family_has_a_case():
    kinds = {make().model_type.removesuffix("_text") for make in cases.CASES.values()}
    assert kinds == set(FAMILIES.values())


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


# --- positions ----------------------------------------------------------------------------------------------------------

LONG = {**cases.LONGROPE, "original_max_position_embeddings": 32, "rope_theta": 1e4}
BEYOND = {
    "longrope": lambda: cases.phi3(original_max_position_embeddings=32, rope_parameters=dict(LONG)),
    "longrope-partial": lambda: cases.phi3(
        num_attention_heads=3, num_key_value_heads=1, original_max_position_embeddings=32,
        rope_parameters={**LONG, "partial_rotary_factor": 0.5},
    ),
    "dynamic": lambda: cases.llama(
        max_position_embeddings=32, rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
    ),
    "yarn": lambda: cases.qwen2(rope_parameters={**cases.YARN, "original_max_position_embeddings": 32}),
    "llama3": lambda: cases.llama(rope_parameters={**cases.LLAMA3, "original_max_position_embeddings": 32}),
    "linear": lambda: cases.mistral(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("chunk", [7, 80])
def test_R44_texts_beyond_the_trained_context(name, chunk):
    """80 tokens where the model was trained in 32: what chooses by length in transformers chooses by the context here."""
    hf = cases.theirs(BEYOND[name]())
    ours = from_transformers(hf, cases.config_of(hf, context=80))
    ids = tokens(80, 5)
    harness = Harness(ours)
    got = torch.cat([harness.logits([("a", ids[p : p + chunk], p)]) for p in range(0, 80, chunk)])
    assert torch.allclose(got, reference(hf, ids), atol=TOLERANCE, rtol=1e-4)


def test_R44_dynamic_scaling_allows_a_longer_context():
    hf_config = BEYOND["dynamic"]()
    config = ModelConfig.from_dict({**hf_config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert (config.max_position_embeddings, config.longest_context) == (32, 128)


# --- Gemma 2 ------------------------------------------------------------------------------------------------------------

# What a reader of Gemma 2's description may forget, as the config or the network that forgets it.
FORGOTTEN = {
    "attention's cap": lambda ours: [setattr(a, "rule", a.rule._replace(soft_cap=None)) for a in attentions(ours)],
    "the final cap": lambda ours: setattr(ours.lm_head, "cap", None),
    "the query scale": lambda ours: [setattr(a, "rule", a.rule._replace(scale=16**-0.5)) for a in attentions(ours)],
    "the embedding's scale": lambda ours: setattr(ours.model.embed_tokens, "scale", None),
    "the norms' offset": lambda ours: setattr(ours.model.norm, "weight", ours.model.norm.weight - 1),
    "the second norms": lambda ours: [setattr(x, "post_feedforward_layernorm", lambda y: y) for x in ours.model.layers],
}


def attentions(ours):
    return [layer.self_attn for layer in ours.model.layers]


@pytest.fixture(scope="module")
def gemma2():
    hf = cases.theirs(cases.gemma2())
    return hf, tokens(41, 6), reference(hf, tokens(41, 6))


@pytest.mark.parametrize("attention", [SDPAAttention, ReferenceAttention])
def test_R46_gemma_2_beyond_its_window(gemma2, attention):
    """Prefill of four windows, then decoding, through caps that bite (2 and 3 where published models have 50 and 30)."""
    hf, ids, expected = gemma2
    config = cases.config_of(hf)
    assert [config.window(layer) for layer in range(4)] == [9, None, 9, None]
    harness = Harness(from_transformers(hf, config), attention=attention)
    got = [harness.logits([("a", ids[:36], 0)])] + [harness.logits([("a", ids[p : p + 1], p)]) for p in range(36, 41)]
    assert torch.allclose(torch.cat(got), expected, atol=TOLERANCE, rtol=1e-4)
    assert expected.abs().max() < 3.0


def test_R46_capped_scores_are_computed_in_parts(gemma2, monkeypatch):
    monkeypatch.setattr(sdpa, "CAPPED_QUERIES", 4)
    hf, ids, expected = gemma2
    got = Harness(from_transformers(hf, cases.config_of(hf))).logits([("a", ids, 0)])
    assert torch.allclose(got, expected, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("what", FORGOTTEN)
def test_R46_every_detail_of_gemma_2_counts(gemma2, what):
    """The comparison above sees each of them: forgotten, it moves the logits by a hundred times the tolerance."""
    hf, ids, expected = gemma2
    ours = from_transformers(hf, cases.config_of(hf))
    FORGOTTEN[what](ours)
    assert (Harness(ours).logits([("a", ids, 0)]) - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("window", [None, 10])
def test_R46_the_alternating_window_counts(gemma2, window):
    """Without windows, and with one key more than there should be."""
    hf, ids, expected = gemma2
    raw = {**hf.config.to_dict(), "architectures": ["Gemma2ForCausalLM"], "sliding_window": window}
    got = Harness(from_transformers(hf, ModelConfig.from_dict(raw))).logits([("a", ids, 0)])
    assert torch.allclose(got[:9], expected[:9], atol=TOLERANCE, rtol=1e-4)
    assert (got[9:] - expected[9:]).abs().max() > 100 * TOLERANCE
