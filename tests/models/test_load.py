"""Loading: the same model from every kind of file gives reference logits; a file that does not fit is refused by name."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from kvant.checkpoint.open import open_checkpoint
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.errors import CheckpointError, UnsupportedError
from kvant.models.load import build, load_weights, placement
from tests.checkpoint.files import f32_tensor, gguf_bytes
from tests.checkpoint.test_gguf_model import FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, SIZE, VOCAB, convert, hf_weights, metadata
from tests.network import Harness

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=SIZE,
    max_position_embeddings=128,
)
FAMILIES = ("llama", "gemma3")


def hf_config(family: str, tied: bool):
    if family == "llama":
        return transformers.LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=tied)
    return transformers.Gemma3TextConfig(
        **SHAPE, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=tied, sliding_window=16, query_pre_attn_scalar=SIZE
    )


def reference(config, weights: dict[str, np.ndarray], ids: list[int]) -> torch.Tensor:
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    hf.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()}, strict=False)
    hf.tie_weights()
    with torch.inference_mode():
        return hf(torch.tensor([ids])).logits[0]


def folder(path, config, weights: dict[str, np.ndarray]):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [_class_of(config)]}))
    save_file({name: torch.from_numpy(weight) for name, weight in weights.items()}, path / "model.safetensors")
    return path


def gguf(path, family: str, weights: dict[str, np.ndarray]):
    keys = metadata(family, **({"attention.sliding_window": 16} if family == "gemma3" else {}))
    tensors = [f32_tensor(name, weight) for name, weight in convert(family, weights).items()]
    path.write_bytes(gguf_bytes(keys, tensors))
    return path


def logits(path, ids: list[int]) -> torch.Tensor:
    return Harness(loaded(path)).logits([("a", ids, 0)])


def loaded(path):
    checkpoint = open_checkpoint(path)
    model = build(ModelConfig.from_dict(checkpoint.config), Mesh())
    load_weights(model, checkpoint.tensors, placement("cpu", torch.float32))
    return model


def _class_of(config) -> str:
    return "LlamaForCausalLM" if config.model_type == "llama" else "Gemma3ForCausalLM"


IDS = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_R41_R42_R45_both_kinds_of_file_give_reference_logits(tmp_path, family, tied):
    """Permuted rows, grouped-query heads, heads of a size of their own, a head that is the embedding or is not."""
    weights = hf_weights(family, head=not tied)
    config = hf_config(family, tied)
    expected = reference(config, weights, IDS)
    for path in (folder(tmp_path / "hf", config, weights), gguf(tmp_path / "model.gguf", family, weights)):
        got = logits(path, IDS)
        assert torch.allclose(got, expected, atol=2e-3, rtol=1e-4), (path, (got - expected).abs().max())


def test_R41_an_untied_model_without_a_head_is_refused(tmp_path):
    path = folder(tmp_path / "hf", hf_config("llama", tied=False), hf_weights("llama"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        loaded(path)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_R39_a_missing_tensor_is_named(tmp_path, lost):
    weights = {name: weight for name, weight in hf_weights("llama").items() if name != lost}
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        loaded(folder(tmp_path / "hf", hf_config("llama", tied=True), weights))


def test_R39_a_tensor_that_nothing_uses_is_named(tmp_path):
    weights = hf_weights("llama") | {"model.layers.0.mlp.extra_proj.weight": np.zeros((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"does not use.*extra_proj"):
        loaded(folder(tmp_path / "hf", hf_config("llama", tied=True), weights))


def test_R39_a_bias_that_the_config_does_not_declare_is_named(tmp_path):
    weights = hf_weights("llama") | {"model.layers.0.self_attn.q_proj.bias": np.zeros(HEADS * SIZE, np.float32)}
    with pytest.raises(CheckpointError, match=r"does not use.*q_proj\.bias"):
        loaded(folder(tmp_path / "hf", hf_config("llama", tied=True), weights))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    weights = hf_weights("llama") | {"model.norm.weight": np.zeros(HIDDEN + 1, np.float32)}
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight \(\[{HIDDEN + 1}\] instead of \[{HIDDEN}\]\)"):
        loaded(folder(tmp_path / "hf", hf_config("llama", tied=True), weights))


def test_an_unknown_architecture_is_named_with_what_there_is():
    config = ModelConfig.from_dict({**SHAPE, "architectures": ["MambaForCausalLM"]})
    with pytest.raises(UnsupportedError, match=r"Mamba.*Gemma3ForCausalLM, LlamaForCausalLM.*docs/models\.md"):
        build(config, Mesh())


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_make_a_network_that_computes(tmp_path, family):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_config(family, True).to_dict() | {"architectures": [_class_of(hf_config(family, True))]}))
    got = logits(f"dummy:{path}", IDS)
    assert torch.isfinite(got).all() and got.std() > 1e-3


def test_R48_an_fp16_run_reports_values_that_do_not_fit():
    """Activations beyond 65,504 become infinite in fp16; the row is reported, not turned into words."""
    from kvant.sampling.sampler import finite

    weight = torch.full((4, 4), 300.0, dtype=torch.float16)
    logits_ = torch.nn.functional.linear(torch.full((1, 4), 300.0, dtype=torch.float16), weight).float()
    assert finite(logits_).tolist() == [False]
