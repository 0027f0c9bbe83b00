"""Hugging Face folders as transformers writes them, and as people and older versions leave them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvant.checkpoint.open import open_checkpoint
from kvant.config.model import ModelConfig
from kvant.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from kvant.quantization.gguf import dequantize
from tests.checkpoint.files import write_json

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 40,
    "torch_dtype": "float32",
}
EMBEDDING = np.random.default_rng(0).standard_normal((40, 32)).astype(np.float32)


def folder(tmp_path, config=None, weights=None, **files):
    write_json(tmp_path / "config.json", config or LLAMA)
    save_file(weights or {"model.embed_tokens.weight": EMBEDDING}, tmp_path / "model.safetensors")
    for name, content in files.items():
        write_json(tmp_path / f"{name}.json", content)
    return tmp_path


def test_what_transformers_writes_comes_back(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    shape = {k: v for k, v in LLAMA.items() if k not in ("architectures", "torch_dtype")}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, rope_theta=1234.5, eos_token_id=[3, 4]))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    state = theirs.state_dict()
    assert checkpoint.tensors.keys() == state.keys()
    for name, tensor in state.items():
        np.testing.assert_array_equal(dequantize(checkpoint.tensors[name]), tensor.numpy())
    config = ModelConfig.from_dict(checkpoint.config)
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (16, 1234.5, False)
    assert checkpoint.end_token_ids == config.eos_token_ids == (3, 4)


@pytest.mark.parametrize("old", [False, True], ids=["transformers 5", "leaving out defaults"])
def test_gemma3_configs_of_two_ages(tmp_path, old):
    transformers = pytest.importorskip("transformers")
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4, vocab_size=40)
    theirs = transformers.Gemma3TextConfig(**shape, num_key_value_heads=1, sliding_window=512)
    raw = theirs.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    if old:
        raw = {k: raw[k] for k in (*shape, "architectures", "num_key_value_heads", "sliding_window")}
    config = ModelConfig.from_dict(open_checkpoint(folder(tmp_path, raw)).config)
    assert config.head_dim == 256 and config.hidden_activation == "gelu_pytorch_tanh" and config.tie_word_embeddings
    assert list(config.layer_types) == theirs.layer_types and config.sliding_window == 512
    assert (config.rope_theta, config.rope_local_base_freq, config.query_pre_attn_scalar) == (1e6, 1e4, 256)


def test_gemma3_positions_from_rope_parameters_are_not_overruled(tmp_path):
    raw = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
    raw["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    }
    config = ModelConfig.from_dict(open_checkpoint(folder(tmp_path, raw)).config)
    assert (config.rope_theta, config.rope_local_base_freq, config.rope_scaling.factor) == (7e5, 3e3, 8.0)


def test_R40_a_folder_of_pickles_is_refused(tmp_path):
    write_json(tmp_path / "config.json", LLAMA)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    with pytest.raises(UnsupportedError, match="pickle"):
        open_checkpoint(tmp_path)


# --- tied heads ---------------------------------------------------------------------------------------------------------


def heads(tmp_path, tied: bool, head: np.ndarray | None):
    weights = {"model.embed_tokens.weight": EMBEDDING} | ({} if head is None else {"lm_head.weight": head})
    return open_checkpoint(folder(tmp_path, LLAMA | {"tie_word_embeddings": tied}, weights))


def test_R41_a_tied_head_that_is_a_copy_is_left_out_and_reported(tmp_path):
    checkpoint = heads(tmp_path, True, EMBEDDING)
    assert checkpoint.skipped == ("lm_head.weight",) and "lm_head.weight" not in checkpoint.tensors
    assert checkpoint.config["tie_word_embeddings"]


def test_R41_a_head_that_differs_counts_whatever_the_config_says(tmp_path):
    checkpoint = heads(tmp_path, True, EMBEDDING + 1)
    assert not checkpoint.config["tie_word_embeddings"] and "lm_head.weight" in checkpoint.tensors


def test_R41_no_head_is_invented(tmp_path):
    checkpoint = heads(tmp_path, False, None)
    assert not checkpoint.config.get("tie_word_embeddings") and checkpoint.tensors.find("lm_head.weight", (40, 32)) is None


def test_R39_known_buffers_are_skipped_and_named_others_are_left_over(tmp_path):
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = {"model.embed_tokens.weight": EMBEDDING, buffer: np.ones(8, np.float32), "odd": np.ones(1, np.float32)}
    checkpoint = open_checkpoint(folder(tmp_path, weights=weights))
    assert checkpoint.skipped == (buffer,) and checkpoint.tensors.names() == {"model.embed_tokens.weight", "odd"}


# --- end tokens, templates, tokenizer -----------------------------------------------------------------------------------


def test_R09_end_tokens_are_gathered_from_three_files(tmp_path):
    decoder = {"9": {"content": "<|im_end|>"}, "8": {"content": "<pad>"}}
    checkpoint = open_checkpoint(
        folder(
            tmp_path,
            LLAMA | {"eos_token_id": 2},
            generation_config={"eos_token_id": [2, 7], "temperature": 0.6},
            tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": decoder},
        )
    )
    assert checkpoint.end_token_ids == (2, 7, 9) == ModelConfig.from_dict(checkpoint.config).eos_token_ids
    assert checkpoint.generation_config["temperature"] == 0.6


def test_R09_the_tokenizers_end_token_is_found_in_tokenizer_json(tmp_path):
    files = {"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"added_tokens": [{"id": 5, "content": "</s>"}]}}
    checkpoint = open_checkpoint(folder(tmp_path, **files))
    assert checkpoint.end_token_ids == (5,)
    assert checkpoint.tokenizer_source.kind == "hf" and checkpoint.tokenizer_source.folder == tmp_path


@pytest.mark.parametrize("ends", ["</s>", [1, "2"], True, -1, [None], {"a": 1}])
def test_R09_what_is_no_token_id_is_refused(tmp_path, ends):
    with pytest.raises(CheckpointError, match="eos_token_id"):
        open_checkpoint(folder(tmp_path, LLAMA | {"eos_token_id": ends}))


def test_chat_templates_in_all_their_places(tmp_path):
    assert open_checkpoint(folder(tmp_path)).chat_template is None
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert open_checkpoint(folder(tmp_path, tokenizer_config={"chat_template": several})).chat_template == "D"
    assert open_checkpoint(folder(tmp_path, tokenizer_config={"chat_template": "P"})).chat_template == "P"
    assert open_checkpoint(folder(tmp_path, chat_template={"chat_template": "J"})).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert open_checkpoint(tmp_path).chat_template == "F"


# --- what is wrong ------------------------------------------------------------------------------------------------------


def test_a_missing_place_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(UnsupportedError, match=r"model\.bin is no GGUF file"):
        open_checkpoint(tmp_path / "model.bin")


def test_a_folder_with_a_gguf_says_so(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"no config\.json; name the file itself: .*model\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"architectures": []}', '{"architectures": "x"}', '{"architectures": [3]}']
)
def test_a_broken_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised with 'gptq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path, change, named):
    with pytest.raises(UnsupportedError, match=named):
        open_checkpoint(folder(tmp_path, LLAMA | change))


@pytest.mark.parametrize("key", sorted(set(LLAMA) - {"architectures", "torch_dtype"}))
@pytest.mark.parametrize("value", [0, -3, 1.5, "many", True, [1], 2**40], ids=str)
def test_impossible_sizes_are_refused_by_name(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=key):
        ModelConfig.from_dict(open_checkpoint(folder(tmp_path, json.loads(json.dumps(LLAMA | {key: value})))).config)
