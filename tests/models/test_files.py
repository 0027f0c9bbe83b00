"""Every family from both kinds of file: a folder as transformers saves it, a GGUF as llama.cpp's converter makes it."""

import json
from dataclasses import replace

import pytest
import torch

from kvant.checkpoint.open import open_checkpoint
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.models.load import build, load_weights, placement
from tests.models import cases
from tests.models.converter import write_gguf
from tests.network import Harness

IDS = cases.tokens(40, 3)
# What a GGUF has no words for: a base that grows with the text; windows that llama.cpp does not apply.
NOT_IN_GGUF = {"llama-dynamic", "qwen2-window", "smollm3-untied-window"}
# What it can say only in the published models' way: Llama 3's divisors, Gemma's query scale.
AS_PUBLISHED = {
    "llama3": lambda: cases.llama(rope_parameters={**cases.LLAMA3, "original_max_position_embeddings": 8192}),
    "gemma2": lambda: cases.gemma2(query_pre_attn_scalar=16),
    "gemma2-two-kv-heads": lambda: cases.gemma2(query_pre_attn_scalar=16, num_key_value_heads=2),
    "gemma3": lambda: cases.gemma3(query_pre_attn_scalar=16),
    "gemma3-two-kv-heads": lambda: cases.gemma3(query_pre_attn_scalar=16, num_key_value_heads=2),
}


@pytest.fixture(scope="module", params=cases.CASES)
def saved(request):
    """(name, transformers model, its logits)"""
    return made(request.param)


@pytest.fixture(scope="module", params=[name for name in cases.CASES if name not in NOT_IN_GGUF])
def convertible(request):
    return made(request.param)


def made(name: str):
    hf = cases.theirs((AS_PUBLISHED.get(name) or cases.CASES[name])())
    return name, hf, cases.reference(hf, IDS)


def logits(path, context: int = cases.CONTEXT) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    model = build(replace(ModelConfig.from_dict(checkpoint.config), context_length=context), Mesh())
    load_weights(model, checkpoint.tensors, placement("cpu", torch.float32))
    return Harness(model).logits([("a", IDS, 0)])


def test_R41_R42_R45_safetensors_give_reference_logits(saved, tmp_path):
    _, hf, expected = saved
    hf.save_pretrained(tmp_path)
    assert torch.allclose(logits(tmp_path), expected, atol=3e-5, rtol=1e-4)


def test_R41_R42_R45_gguf_gives_reference_logits(convertible, tmp_path):
    _, hf, expected = convertible
    got = logits(write_gguf(tmp_path / "model.gguf", hf))
    # rms_norm_eps and the attention factor are fp32 in a GGUF, and 1 + w was rounded once.
    assert torch.allclose(got, expected, atol=1e-4, rtol=1e-3), (got - expected).abs().max()


def in_older_spelling(config: dict) -> dict:
    """config.json as transformers 4 wrote it: `rope_theta` and `rope_scaling` by themselves, no lists of layers."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types", "no_rope_layers")}
    rope = dict(config["rope_parameters"])
    if "sliding_attention" in rope:  # Gemma 3
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    kind = rope.pop("rope_type")
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    old["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
    old["torch_dtype"] = old.pop("dtype", "float32")
    return old


def test_R44_configs_of_an_older_age_give_the_same_network(saved, tmp_path):
    _, hf, expected = saved
    hf.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(in_older_spelling(json.loads(path.read_text()))))
    assert torch.allclose(logits(tmp_path), expected, atol=3e-5, rtol=1e-4)


def test_configs_that_leave_out_what_their_class_fills_in(saved, tmp_path):
    """Every key at the value that transformers' config class has for it is taken out."""
    name, hf, expected = saved
    defaults = type(hf.config)().to_dict()
    shape = {"architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"}
    keep = shape | {"num_hidden_layers", "num_key_value_heads", "rope_parameters"}
    hf.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k in keep or v != defaults.get(k)}
    if not name.startswith(("qwen2-window", "smollm3")):
        config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    assert torch.allclose(logits(tmp_path), expected, atol=3e-5, rtol=1e-4)


def test_windows_that_are_declared_and_not_used(tmp_path):
    """Qwen's configs name a window and switch it off; Llama's class does not read one."""
    for config in (cases.qwen2(), cases.qwen3(), cases.llama()):
        hf = cases.theirs(config)
        hf.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**in_older_spelling(json.loads(path.read_text())), "sliding_window": 5}))
        assert torch.allclose(logits(tmp_path), cases.reference(hf, IDS), atol=3e-5, rtol=1e-4)
