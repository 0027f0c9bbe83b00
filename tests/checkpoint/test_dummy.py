"""Random weights: reproducible, of any shape, never zero, and of a size that keeps a network alive."""

import numpy as np
import pytest

from kvant.checkpoint.dummy import DummyTensors
from kvant.checkpoint.open import open_checkpoint
from kvant.config.formats import row_bytes
from kvant.errors import ModelNotFoundError, UnsupportedError
from kvant.quantization.gguf import dequantize
from tests.checkpoint.files import write_json
from tests.checkpoint.test_hf_folder import LLAMA

FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@pytest.mark.parametrize("dtype, format", FORMATS.items())
def test_any_tensor_in_the_models_dtype(dtype, format):
    stored = DummyTensors(dtype).find("model.layers.0.mlp.up_proj.weight", (64, 48))
    assert (stored.format, stored.shape, stored.raw.shape) == (format, (64, 48), (64, row_bytes(format, 48)))
    values = dequantize(stored)
    assert abs(values.mean()) < 0.02 and values.std() == pytest.approx(48**-0.5, rel=0.1)
    assert (values != 0).mean() > 0.99


def test_a_name_gives_the_same_values_and_another_name_others():
    first, second = DummyTensors("float32"), DummyTensors("float32")
    name, shape = "model.layers.0.mlp.up_proj.weight", (8, 8)
    np.testing.assert_array_equal(first.find(name, shape).raw, second.find(name, shape).raw)
    assert (first.find(name, shape).raw != first.find("model.layers.1.mlp.up_proj.weight", shape).raw).any()
    assert (first.find(name, shape).raw != DummyTensors("float32", seed=1).find(name, shape).raw).any()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_multiply_by_about_one_in_either_convention(offset):
    values = dequantize(DummyTensors("float32", offset).find("model.norm.weight", (512,)))
    assert (values + offset).mean() == pytest.approx(1.0, abs=0.05) and values.std() > 0.05


def test_dtypes_round_to_nearest():
    name, shape = "w", (64, 64)
    exact = dequantize(DummyTensors("float32").find(name, shape))
    half = dequantize(DummyTensors("bfloat16").find(name, shape))
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(half, torch.from_numpy(exact).bfloat16().float().numpy())


@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_dummy_is_opened_by_its_config(tmp_path, whole_folder):
    path = write_json(tmp_path / "config.json", LLAMA | {"eos_token_id": 3})
    checkpoint = open_checkpoint(f"dummy:{tmp_path if whole_folder else path}")
    assert checkpoint.config["hidden_size"] == 32 and checkpoint.end_token_ids == (3,)
    assert checkpoint.tensors.names() == set() and checkpoint.tensors.find("x", (2, 2)).format == "F32"
    assert checkpoint.tokenizer_source.kind == "none"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_checkpoint(f"dummy:{path}").tokenizer_source.folder == tmp_path


def test_gemma_norms_of_a_dummy_are_near_one(tmp_path):
    write_json(tmp_path / "config.json", LLAMA | {"architectures": ["Gemma3ForCausalLM"]})
    values = dequantize(open_checkpoint(f"dummy:{tmp_path}").tensors.find("model.norm.weight", (512,)))
    assert abs(values.mean()) < 0.05


def test_what_is_not_there_or_not_built_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        open_checkpoint("dummy:/nowhere/config.json")
    path = write_json(tmp_path / "config.json", LLAMA | {"torch_dtype": "int8"})
    with pytest.raises(UnsupportedError, match=r"'int8'.*bfloat16"):
        open_checkpoint(f"dummy:{path}")


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(3, 7), (70_001,), (40, 4096)])
def test_torch_makes_the_same_bits(dtype, shape, monkeypatch):
    """So that a GPU may make its own weights. Chunks of either side do not matter."""
    torch = pytest.importorskip("torch")
    from kvant.quantization import random

    monkeypatch.setattr(random, "CHUNK", 1000)
    stored = DummyTensors(dtype).find("model.layers.0.mlp.up_proj.weight", shape)
    made = random.make(stored, "cpu", getattr(torch, dtype))
    np.testing.assert_array_equal(made.view(torch.uint8).numpy().reshape(-1), stored.raw.reshape(-1))
    assert stored.num_bytes == stored.raw.size


def test_values_fill_their_interval_evenly():
    stored = DummyTensors("float32").find("w", (1 << 20, 1))
    counts, _ = np.histogram(dequantize(stored), bins=64, range=(-(12**0.5) / 2, 12**0.5 / 2))
    assert counts.sum() == 1 << 20 and abs(counts - (1 << 14)).max() < 5 * (1 << 7)
    values = dequantize(stored)[:, 0]
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.005
