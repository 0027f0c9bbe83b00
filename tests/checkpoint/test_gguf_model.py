"""A GGUF in Hugging Face's terms: names, conventions and config, against the rules by which such files are made."""

import re

import numpy as np
import pytest

from kvant.checkpoint.open import open_checkpoint
from kvant.checkpoint.store import find_model
from kvant.config.model import ModelConfig
from kvant.errors import CheckpointError, KvantError, UnsupportedError
from kvant.quantization.gguf import dequantize
from tests.checkpoint.files import TYPE_IDS, Tensor, Typed, f32_tensor, gguf_bytes
from tests.checkpoint.test_rope_factors import converted

RNG = np.random.default_rng(0)
HIDDEN, FFN, HEADS, KV_HEADS, SIZE, LAYERS, VOCAB = 96, 64, 6, 2, 24, 2, 40  # SIZE is not HIDDEN / HEADS


def metadata(family: str = "llama", **changes) -> dict:
    values = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": SIZE,
        "attention.value_length": SIZE,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5e5,
    }
    values.update(changes)
    head = {"general.architecture": family, "tokenizer.ggml.tokens": ["x"] * VOCAB, "tokenizer.ggml.eos_token_id": 2}
    return head | {f"{family}.{key}": value for key, value in values.items() if value is not None}


def hf_weights(family: str = "llama", head: bool = False) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names and in its conventions."""
    shapes = {
        "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * SIZE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    if family == "gemma3":
        shapes |= {"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)}
        shapes |= {"pre_feedforward_layernorm": (HIDDEN,), "post_feedforward_layernorm": (HIDDEN,)}
    weights = {f"model.layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    weights |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    weights |= {"lm_head.weight": (VOCAB, HIDDEN)} if head else {}
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}


# Written anew from llama.cpp's gguf-py/gguf/tensor_mapping.py, so that a slip in names.py shows.
LLAMA_NAMES = [
    (r"model\.embed_tokens", "token_embd"), (r"model\.norm", "output_norm"), (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.self_attn\.q_proj", r"blk.\1.attn_q"),
    (r"model\.layers\.(\d+)\.self_attn\.k_proj", r"blk.\1.attn_k"),
    (r"model\.layers\.(\d+)\.self_attn\.v_proj", r"blk.\1.attn_v"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.mlp\.gate_proj", r"blk.\1.ffn_gate"),
    (r"model\.layers\.(\d+)\.mlp\.up_proj", r"blk.\1.ffn_up"),
    (r"model\.layers\.(\d+)\.mlp\.down_proj", r"blk.\1.ffn_down"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk.\1.attn_norm"),
]  # fmt: skip
NAMES = {
    "llama": LLAMA_NAMES + [(r"model\.layers\.(\d+)\.post_attention_layernorm", r"blk.\1.ffn_norm")],
    "gemma3": LLAMA_NAMES + [
        (r"model\.layers\.(\d+)\.self_attn\.q_norm", r"blk.\1.attn_q_norm"),
        (r"model\.layers\.(\d+)\.self_attn\.k_norm", r"blk.\1.attn_k_norm"),
        (r"model\.layers\.(\d+)\.post_attention_layernorm", r"blk.\1.post_attention_norm"),
        (r"model\.layers\.(\d+)\.pre_feedforward_layernorm", r"blk.\1.ffn_norm"),
        (r"model\.layers\.(\d+)\.post_feedforward_layernorm", r"blk.\1.post_ffw_norm"),
    ],
}  # fmt: skip


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def convert(family: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face's weights as llama.cpp's converter would name and store them."""
    out = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        [gguf] = [re.sub(pattern, to, stem) for pattern, to in NAMES[family] if re.fullmatch(pattern, stem)]
        if family == "llama" and stem.endswith(("q_proj", "k_proj")):
            weight = permuted(weight, HEADS if stem.endswith("q_proj") else KV_HEADS)
        if family == "gemma3" and stem.endswith("norm"):
            weight = weight + np.float32(1)
        out[f"{gguf}.{kind}"] = weight
    return out


def opened(tmp_path, keys: dict, tensors: list[Tensor]):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors))
    return open_checkpoint(path)


def model(tmp_path, family: str = "llama", head: bool = False, **changes):
    weights = convert(family, hf_weights(family, head))
    return opened(tmp_path, metadata(family, **changes), [f32_tensor(name, weight) for name, weight in weights.items()])


# --- tensors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_R42_tensors_are_those_of_hugging_face(tmp_path, family):
    """The same model written in both ways holds the same values, permuted rows and grouped-query heads included."""
    weights = hf_weights(family, head=True)
    stored = convert(family, weights)
    checkpoint = opened(tmp_path, metadata(family), [f32_tensor(name, weight) for name, weight in stored.items()])
    assert checkpoint.tensors.keys() == weights.keys() == checkpoint.tensors.names()
    for name, weight in weights.items():
        # Gemma's 1 + w was rounded when the file was made; taking 1 off again is exact.
        expected = (weight + np.float32(1)) - np.float32(1) if family == "gemma3" and "norm" in name else weight
        np.testing.assert_array_equal(dequantize(checkpoint.tensors[name]), expected, err_msg=name)
        assert checkpoint.tensors.find(name, weight.shape).name == name


@pytest.mark.parametrize("format", ["Q4_1", "Q8_0", "F16"])
def test_R42_packed_rows_stay_packed(tmp_path, format):
    """Rows are moved, not unpacked: the values of the permuted file, row by row."""
    gguf = pytest.importorskip("gguf")
    weights = hf_weights()
    tensors = [f32_tensor(name, weight) for name, weight in convert("llama", weights).items()]
    name = "model.layers.1.self_attn.k_proj.weight"
    raw = gguf.quantize(permuted(weights[name], KV_HEADS), gguf.GGMLQuantizationType[format])
    packed = Tensor("blk.1.attn_k.weight", weights[name].shape, TYPE_IDS[format], raw.tobytes())
    checkpoint = opened(tmp_path, metadata(), [packed if t.name == packed.name else t for t in tensors])
    stored = checkpoint.tensors[name]
    assert stored.format == format and stored.raw.shape == raw.view(np.uint8).shape
    direct = gguf.dequantize(gguf.quantize(weights[name], gguf.GGMLQuantizationType[format]), gguf.GGMLQuantizationType[format])
    np.testing.assert_array_equal(dequantize(stored), direct)


def test_R42_biases_are_permuted_too(tmp_path):
    bias = np.arange(HEADS * SIZE, dtype=np.float32)
    tensors = [f32_tensor(name, weight) for name, weight in convert("llama", hf_weights()).items()]
    checkpoint = opened(tmp_path, metadata(), [*tensors, f32_tensor("blk.0.attn_q.bias", permuted(bias, HEADS))])
    assert checkpoint.config["attention_bias"] and not checkpoint.config["mlp_bias"]
    np.testing.assert_array_equal(dequantize(checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"]), bias)


@pytest.mark.parametrize("head", [False, True])
def test_R41_a_head_of_its_own_is_reported(tmp_path, head):
    checkpoint = model(tmp_path, head=head)
    assert checkpoint.config["tie_word_embeddings"] is not head
    assert ("lm_head.weight" in checkpoint.tensors) is head


def test_R39_unknown_tensors_keep_their_names_and_are_left_over(tmp_path):
    tensors = [f32_tensor(name, weight) for name, weight in convert("llama", hf_weights()).items()]
    strange = [f32_tensor("blk.0.attn_strange.weight", np.ones(4)), f32_tensor("extra", np.ones(4))]
    names = opened(tmp_path, metadata(), tensors + strange).tensors.names()
    assert {"blk.0.attn_strange.weight", "extra"} <= names


def test_two_tensors_of_one_meaning_are_refused(tmp_path):
    tensors = [f32_tensor("output_norm.weight", np.ones(4)), f32_tensor("model.norm.weight", np.ones(4))]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight twice"):
        opened(tmp_path, metadata(), tensors)


def test_rows_that_are_no_heads_are_refused_when_asked_for(tmp_path):
    checkpoint = opened(tmp_path, metadata(), [f32_tensor("blk.0.attn_q.weight", np.ones((9, HIDDEN)))])
    with pytest.raises(CheckpointError, match="9 rows"):
        checkpoint.tensors.find("model.layers.0.self_attn.q_proj.weight", (96, HIDDEN))


# --- config -------------------------------------------------------------------------------------------------------------


def test_R45_head_size_comes_from_the_metadata(tmp_path):
    config = ModelConfig.from_dict(model(tmp_path).config)
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (SIZE, HEADS, KV_HEADS)
    assert config.head_dim != config.hidden_size // config.num_attention_heads


def test_R45_without_it_heads_share_the_hidden_size(tmp_path):
    changes = {"attention.key_length": None, "attention.value_length": None, "attention.head_count": 4}
    assert ModelConfig.from_dict(model(tmp_path, **changes).config).head_dim == HIDDEN // 4


def test_llama_config(tmp_path):
    config = ModelConfig.from_dict(model(tmp_path).config)
    assert config.architecture == "LlamaForCausalLM" and config.hidden_activation == "silu"
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (LAYERS, HIDDEN, FFN)
    assert (config.vocab_size, config.max_position_embeddings, config.rope_theta) == (VOCAB, 128, 5e5)
    assert config.rms_norm_eps == np.float32(1e-5)
    assert config.sliding_window is None and not config.attention_bias and config.rope_scaling.rope_type == "default"


def test_gemma3_constants_that_no_file_holds(tmp_path):
    config = ModelConfig.from_dict(model(tmp_path, "gemma3", **{"block_count": 7, "attention.sliding_window": 9}).config)
    assert config.architecture == "Gemma3ForCausalLM" and config.hidden_activation == "gelu_pytorch_tanh"
    assert config.layer_types == ("sliding_attention",) * 5 + ("full_attention", "sliding_attention")
    assert (config.rope_theta, config.rope_local_base_freq) == (5e5, 1e4)
    assert config.query_pre_attn_scalar == SIZE and config.tie_word_embeddings and config.window(0) == 9


def test_gemma3_27b_scales_its_queries_differently(tmp_path):
    changes = {"block_count": 62, "attention.sliding_window": 9, "attention.head_count": 4}
    assert model(tmp_path, "gemma3", **changes).config["query_pre_attn_scalar"] == HIDDEN // 4


def test_gemma3_layer_pattern_in_newer_files(tmp_path):
    changes = {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False], "rope.freq_base_swa": 2e4}
    config = ModelConfig.from_dict(model(tmp_path, "gemma3", **changes).config)
    assert config.layer_types == ("sliding_attention", "full_attention") and config.rope_local_base_freq == 2e4
    changes["attention.sliding_window_pattern"] = 2
    assert ModelConfig.from_dict(model(tmp_path, "gemma3", **changes).config).layer_types[1] == "full_attention"


def test_R44_rope_factors_become_a_scaling_or_are_reported_as_skipped(tmp_path):
    tensors = [f32_tensor(name, weight) for name, weight in convert("llama", hf_weights()).items()]
    checkpoint = opened(tmp_path, metadata(), [*tensors, f32_tensor("rope_freqs.weight", converted(SIZE, 5e5, 8.0))])
    scaling = ModelConfig.from_dict(checkpoint.config).rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    assert checkpoint.skipped == () and "rope_freqs.weight" not in checkpoint.tensors
    plain = opened(tmp_path, metadata(), [*tensors, f32_tensor("rope_freqs.weight", np.ones(SIZE // 2))])
    assert ModelConfig.from_dict(plain.config).rope_scaling.rope_type == "default"
    assert plain.skipped == ("rope_freqs.weight",) and "rope_freqs.weight" not in plain.tensors


def test_R44_linear_scaling_and_unknown_kinds(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    scaling = ModelConfig.from_dict(model(tmp_path, **linear).config).rope_scaling
    assert (scaling.rope_type, scaling.factor) == ("linear", 4.0)
    with pytest.raises(UnsupportedError, match=r"'ntk'.*supported: default, linear"):
        ModelConfig.from_dict(model(tmp_path, **{**linear, "rope.scaling.type": "ntk"}).config)


def test_equal_lists_count_as_numbers(tmp_path):
    assert model(tmp_path, **{"attention.head_count_kv": [KV_HEADS] * LAYERS}).config["num_key_value_heads"] == KV_HEADS


REFUSED = {
    "no architecture": ({"general.architecture": 3}, CheckpointError, "general.architecture"),
    "other architecture": ({"general.architecture": "mamba"}, UnsupportedError, r"'mamba'.*gemma3, llama.*docs/models\.md"),
    "no layers": ({"llama.block_count": 0}, CheckpointError, "block_count"),
    "text for a number": ({"llama.block_count": "two"}, CheckpointError, "block_count"),
    "truth for a number": ({"llama.block_count": True}, CheckpointError, "block_count"),
    "not a number": ({"llama.rope.freq_base": float("nan")}, CheckpointError, "freq_base"),
    "heads by layer": ({"llama.attention.head_count_kv": [1, 2]}, UnsupportedError, "differs between layers"),
    "experts": ({"llama.expert_count": 8}, UnsupportedError, "expert_count"),
    "partial rotary": ({"llama.rope.dimension_count": SIZE // 2}, UnsupportedError, "partial rotary"),
    "other values": ({"llama.attention.value_length": SIZE * 2}, UnsupportedError, "values of another size"),
    "bad end token": ({"tokenizer.ggml.eos_token_id": "two"}, CheckpointError, "eos_token_id"),
}


@pytest.mark.parametrize("change, kind, named", REFUSED.values(), ids=REFUSED.keys())
def test_what_would_compute_something_else_is_refused_by_name(tmp_path, change, kind, named):
    with pytest.raises(kind, match=named):
        opened(tmp_path, metadata() | change, [])


@pytest.mark.parametrize("key", sorted(metadata()))
@pytest.mark.parametrize("value", [0, -1, 2**40, 1e30, "x", True, [1, 2], [], float("inf")], ids=str)
def test_R37_no_metadata_value_leads_to_a_foreign_error(tmp_path, key, value):
    kind = Typed(11, value) if isinstance(value, int) and not isinstance(value, bool) else value
    try:
        ModelConfig.from_dict(opened(tmp_path, metadata() | {key: kind}, []).config)
    except KvantError as error:
        assert "\n" not in str(error)


# --- what surrounds the weights -----------------------------------------------------------------------------------------


def test_R09_every_end_token_of_the_metadata_counts(tmp_path):
    keys = metadata() | {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5, "tokenizer.ggml.bos_token_id": 1}
    checkpoint = opened(tmp_path, keys, [])
    config = ModelConfig.from_dict(checkpoint.config | {"vocab_size": VOCAB})
    assert checkpoint.end_token_ids == config.eos_token_ids == (2, 5, 7) and config.bos_token_id == 1


def test_tokenizer_template_and_sampling_defaults(tmp_path):
    keys = metadata() | {"tokenizer.chat_template": "{{ x }}", "general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    checkpoint = opened(tmp_path, keys, [])
    assert checkpoint.chat_template == "{{ x }}" and checkpoint.generation_config == {"temperature": 0.5, "top_k": 40}
    assert checkpoint.tokenizer_source.kind == "gguf"
    assert checkpoint.tokenizer_source.metadata["tokenizer.ggml.tokens"] == ["x"] * VOCAB
    assert opened(tmp_path, metadata(), []).chat_template is None


@pytest.mark.model
def test_real_models_say_what_they_are():
    smol, gemma = (open_checkpoint(find_model(alias)) for alias in ("smollm2-135m", "gemma3-270m"))
    config = ModelConfig.from_dict(smol.config)
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim, config.vocab_size) == (30, 576, 64, 49152)
    assert smol.end_token_ids == (2,) and smol.chat_template and len(smol.tensors) == 272 and config.rope_theta == 1e5
    config = ModelConfig.from_dict(gemma.config)
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim, config.sliding_window) == (18, 640, 256, 512)
    assert config.query_pre_attn_scalar == 256 and config.layer_types.count("full_attention") == 3
    assert gemma.end_token_ids == (1,) and gemma.chat_template is None and len(gemma.tensors) == 236
    assert all(name.startswith("model.") for checkpoint in (smol, gemma) for name in checkpoint.tensors)
