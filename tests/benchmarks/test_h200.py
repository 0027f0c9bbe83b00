"""The GPU benchmark on a CPU: its plain path, its checkpoint, and how results are merged and failures kept apart."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import h200
from benchmarks.checkpoint import write
from benchmarks.plain import agreement, last_logits
from kvant import LLM, SamplingParams
from kvant.bench.ceilings import Measured
from kvant.bench.report import Row
from kvant.bench.workload import uniform
from kvant.config.model import ModelConfig
from kvant.planning.shape import matrices
from kvant.planning.work import Ceilings
from tests.tiny_folder import LLAMA

QWEN = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "tie_word_embeddings": True}
SCALED = {
    **LLAMA,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture(params=[QWEN, SCALED], ids=["qwen3", "llama"])
def shape(request, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(request.param))
    return path


def test_the_plain_path_and_the_engine_agree(shape):
    llm = LLM(f"dummy:{shape}", dtype="float32", device="cpu")
    prompts = [list(prompt) for prompt in uniform(4, 40, 1, 272).prompts]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    agreed = agreement(shape, prompts, [output.token_ids[0] for output in outputs], "cpu")
    assert agreed.num_equal == 4 and agreed.largest_gap == 0 and agreed.holds
    expected = last_logits(shape, torch.tensor(prompts), "cpu").log_softmax(-1)
    for row, output in zip(expected, outputs, strict=True):
        for token, found in output.logprobs[0].items():
            assert found.logprob == pytest.approx(float(row[token]), abs=2e-4)


def test_wrong_tokens_do_not_agree(shape):
    prompts = [list(prompt) for prompt in uniform(4, 40, 1, 272).prompts]
    wrong = last_logits(shape, torch.tensor(prompts), "cpu").argmin(-1).tolist()
    assert not agreement(shape, prompts, wrong, "cpu").holds


def test_the_checkpoint_is_the_dummy(shape, tmp_path):
    """Several shards; every id can be drawn, and the answers are those of the weights by recipe."""
    folder = tmp_path / "folder"
    num_bytes = write(shape, folder, "cpu", shard_bytes=30_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > num_bytes
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    prompts = [list(prompt) for prompt in uniform(3, 20, 1, 272).prompts]
    tokens = []
    for name in (str(folder), f"dummy:{shape}"):
        llm = LLM(name, device="cpu", dtype="float32")
        assert llm.engine.runner.vocab_size == 272
        tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "name, linears, head", [("qwen3-0.6b", 0.440, 0.156), ("llama-3.2-1b", 0.973, 0.263), ("llama-3-8b", 6.979, 0.525)]
)
def test_the_shapes_are_the_public_ones(name, linears, head):
    """Billions of values, as published."""
    config = ModelConfig.from_dict(json.loads((h200.SHAPES / f"{name}.json").read_text()))
    found = matrices(config, None, "torch", "bfloat16")
    assert sum(m.num_bytes for m in found if not m.is_head) / 2e9 == pytest.approx(linears, abs=1e-3)
    assert sum(m.num_bytes for m in found if m.is_head) / 2e9 == pytest.approx(head, abs=1e-3)


def test_a_scenario_that_fails_does_not_disturb_the_others(tmp_path, monkeypatch, capsys):
    def fails():
        raise h200.CheckFailed("something else")

    def hangs():
        while True:
            pass

    def works():
        return h200.Result(Row("", 0.5, "ms", 0.25, 0.5, 0.1), "checked")

    monkeypatch.setattr(h200, "torch_ceilings", lambda *_: Measured(Ceilings(4e12, 7e14), "by hand"))
    listed = [("decode-attention", fails), ("gpu-idle-256", hangs), ("nano/qwen3-0.6b", works)]
    monkeypatch.setattr(h200, "jobs", lambda *_: iter(listed))
    monkeypatch.setattr(h200, "LONGEST", 0.2)
    file = tmp_path / "h200.json"
    file.write_text(json.dumps({"rows": [{"scenario": "one-stream/qwen3-0.6b", "value": 1}]}))
    failed = h200.measure(list(h200.SCENARIOS), file, tmp_path, 60, "abc")
    assert [line.partition(":")[0] for line in failed] == ["decode-attention", "gpu-idle-256"]
    assert "something else" in failed[0] and "TimeoutError" in failed[1]
    kept, row = json.loads(file.read_text())["rows"]
    assert kept == {"scenario": "one-stream/qwen3-0.6b", "value": 1}, "what was not measured anew stays"
    assert row["scenario"] == "nano/qwen3-0.6b" and row["fraction"] == 0.5 and row["check"] == "checked"
    assert {"unit", "floor", "spread", "card", "versions", "commit", "date"} <= set(row) and row["commit"] == "abc"


def test_nothing_begins_when_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(h200, "torch_ceilings", lambda *_: Measured(Ceilings(4e12, 7e14), "by hand"))
    monkeypatch.setattr(h200, "jobs", lambda *_: iter([("decode-attention", pytest.fail)]))
    (line,) = h200.measure(["decode-attention"], tmp_path / "h200.json", tmp_path, 5, None)
    assert "not begun" in line and not (tmp_path / "h200.json").exists()


def test_every_scenario_has_a_job():
    listed = [name for name, _ in h200.jobs(Measured(Ceilings(1, 1), ""), Path("/"))]
    assert sorted(listed) == sorted(h200.SCENARIOS) and len(set(listed)) == 14
