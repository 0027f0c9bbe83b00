"""`kvant doctor` on machines of any kind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvant.checkpoint import store
from kvant.cli.main import run_command
from kvant.config.environment import Environment
from kvant.config.hardware import Gpu
from tests.cli.fake import HARDWARE, FakeLLM, doors

GIB = 1 << 30
H200 = Gpu(name="H200", memory_total=141 * GIB, memory_free=140 * GIB, compute_capability=(9, 0))


@pytest.fixture
def report(capsys, tmp_path):
    def run(hardware=HARDWARE, **changes):
        assert run_command(["doctor"], doors(FakeLLM(), tmp_path, detect=lambda: hardware, **changes)) == 0
        return " ".join(capsys.readouterr().out.split())

    return run


def test_what_is_here(report, tmp_path):
    text = report()
    for part in (
        "processor Fast 9000; 2 cores of 4 hardware threads",
        "features avx2 avx512_bf16",
        "memory 6.0 GiB available of 8.0 GiB",
        "compiler none; the fast path for CPUs needs one",
        "GPU no NVIDIA GPU found",
        "kvant 0.1.0",
        "torch 2.",
        "device: cpu, because no NVIDIA GPU was found",
        "dtype: bfloat16, because this CPU computes in it directly",
        "threads: 2, because this process may use 2 cores",
        f"Models in {tmp_path}/models",
        "not here; kvant pull smollm2-135m",
        "KVANT_OFFLINE is set",
    ):
        assert part in text


def test_compiler_and_gpu(report):
    text = report(replace(HARDWARE, compiler="/usr/bin/g++", gpus=(H200,), torch_cuda="12.8"))
    assert "compiler /usr/bin/g++" in text
    assert "GPU H200; 140.0 GiB free of 141.0 GiB; compute capability 9.0" in text
    assert "device: cuda, because there is a GPU (H200)" in text


def test_a_gpu_that_torch_cannot_use(report):
    assert "install torch with CUDA" in report(replace(HARDWARE, gpus=(H200,)))


def test_online_says_nothing_about_the_network(report, tmp_path):
    assert "KVANT_OFFLINE" not in report(environment=Environment(cache=tmp_path))


def test_with_the_default_model_memory_is_decided_too(report, monkeypatch, tmp_path):
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    monkeypatch.setattr(store, "find_model", lambda name, environment: Path(f"dummy:{tmp_path}/config.json"))
    text = report()
    assert "max_model_len: 8192, the model's own" in text and "kv_cache_memory_bytes: 2.3 GiB, 40% of the memory" in text
    assert "the weights take 256.6 MiB, but only 10.0 MiB" in report(replace(HARDWARE, memory_available=10 << 20))
