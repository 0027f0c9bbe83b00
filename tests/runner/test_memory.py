"""The plan's bytes are those of the tensors that are made: weights and KV blocks, to the byte."""

import json

import pytest
import torch

from kvant.config.engine import EngineConfig
from kvant.config.hardware import Gpu, Hardware
from kvant.config.resolve import resolve
from kvant.engine.create import plan
from kvant.runner.factory import create_runner, open_model
from tests.tiny_folder import GEMMA, LLAMA

MACHINE = Hardware(
    cpu_name="Fast 9000",
    cpu_flags=frozenset({"avx512_bf16"}),
    num_cpus=2,
    num_cores=2,
    memory_total=8 << 30,
    memory_available=6 << 30,
    compiler=None,
    gpus=(Gpu(name="Fast GPU", memory_total=80 << 30, memory_free=79 << 30, compute_capability=(9, 0)),),
    torch_cuda="13.0",
)
TIED = {**LLAMA, "tie_word_embeddings": True, "attention_bias": True}
QWEN = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return f"dummy:{folder}"


def tensors(value, seen):
    """Every tensor reachable from a network."""
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, (list, tuple)):
        for item in value:
            tensors(item, seen)
    elif type(value).__module__.startswith("kvant") and hasattr(value, "__dict__"):
        for item in vars(value).values():
            tensors(item, seen)
    return seen


@pytest.mark.parametrize("config", [LLAMA, TIED, QWEN, GEMMA], ids=["llama", "tied, biased", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_blocks_to_the_byte(tmp_path, config, dtype):
    name = write(tmp_path, config)
    opened, resolved = plan(EngineConfig(model=name, dtype=dtype, device="cpu", max_num_seqs=3), MACHINE)
    runner = create_runner(resolved, opened, 256).runner
    sizes = {part.name: part.num_bytes for part in resolved.memory}
    assert sum(tensors(runner.model, {}).values()) == sizes["weights"]
    assert runner.storage.num_bytes == sum(size for name, size in sizes.items() if name.startswith("KV blocks"))
    assert runner.storage.num_bytes == resolved.kv_bytes


def test_all_parts_fill_what_is_allowed_on_a_gpu(tmp_path):
    opened = open_model(write(tmp_path, LLAMA))
    resolved = resolve(
        EngineConfig(gpu_memory_utilization=0.5), opened.config, MACHINE, opened.weight_bytes("torch", "bfloat16")
    )
    total = sum(part.num_bytes for part in resolved.memory)
    allowed = 0.5 * (80 << 30) - (1 << 30)
    assert allowed - resolved.groups[0].block_bytes(2) < total <= allowed
    assert all(part.num_bytes > 0 and part.what for part in resolved.memory)
