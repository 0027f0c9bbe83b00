"""Measurements of a tiny model, on both executors: every number is there, and the parts of a step make a step."""

import json

import pytest

from kvant.bench.latency import latency
from kvant.bench.profile import covered, part_of, profile, profile_prompts
from kvant.bench.running import run
from kvant.bench.startup import start_once, startup
from kvant.bench.target import open_target
from kvant.bench.throughput import throughput
from kvant.bench.workload import uniform
from kvant.config.engine import EngineConfig
from kvant.config.sampling import SamplingParams
from kvant.errors import ConfigError, GenerationError
from tests.tiny_folder import LLAMA


def silent(text):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture(scope="module", params=["native", "torch"])
def target(request, folder):
    dtype = "auto" if request.param == "native" else "float32"
    target = open_target(EngineConfig(model=f"dummy:{folder}", dtype=dtype, device="cpu", threads=1, max_num_seqs=4), silent)
    assert target.runner.executor == request.param
    return target


def test_the_machine_is_measured(target):
    assert 1e8 < target.ceilings.bandwidth < 1e13 and target.ceilings.compute > 1e8
    assert len(target.describe()) == 2 and target.measured.how


def test_latency(target):
    rows = latency(target, uniform(2, 8, 20, 256), 2, silent)
    assert [row.unit for row in rows] == ["ms", "tok/s", "ms", "tok/s"]
    assert rows[2].scenario == "decode, 2 streams" and rows[2].note == "per step, tokens 3 to 20"
    assert rows[3].value == pytest.approx(2 / (rows[2].value / 1e3))
    assert all(0 < row.fraction < 1 for row in rows), "nothing is faster than its floor"


def test_throughput(target):
    rows = throughput(target, uniform(6, 8, 5, 256), 1, silent)
    assert rows[1].value == pytest.approx(6 * 5 / rows[0].value)
    assert rows[2].value == pytest.approx(6 * 13 / rows[0].value)
    assert all(0 < row.fraction < 1 for row in rows)


@pytest.mark.parametrize("take_apart", [profile, profile_prompts])
def test_the_parts_of_a_step_make_a_step(target, take_apart):
    rows = take_apart(target, uniform(2, 30, 9, 256), silent)
    step = rows[-1]
    parts = [row for row in rows[:-1] if not row.scenario.startswith("all of")]
    assert step.scenario == "step" and step.value > 0 and step.floor > 0
    assert parts[-1].scenario == "everything else"
    assert sum(row.value for row in parts) >= 0.99 * step.value
    if target.runner.executor == "native":
        assert {"gate_proj + up_proj", "down_proj", "q_proj + k_proj + v_proj", "o_proj", "head", "attention"} <= {
            row.scenario for row in parts
        }


def test_time_that_any_kernel_covers():
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2), (6, 6.5), (9, 10)]) == 3 + 2 + 1


@pytest.mark.parametrize("num, output_len, message", [(2, 1, "at least 2"), (5, 9, "max_num_seqs of 4")])
def test_what_cannot_be_measured_is_refused(target, num, output_len, message):
    with pytest.raises(ConfigError, match=message):
        latency(target, uniform(num, 8, output_len, 256), 1, silent)


def test_an_answer_of_another_length_is_no_measurement(target, monkeypatch):
    work = uniform(1, 8, 5, 256)
    monkeypatch.setattr(type(work), "params", lambda self: [SamplingParams(max_tokens=4, ignore_eos=True)])
    with pytest.raises(GenerationError, match="4 tokens instead of 5"):
        run(target.llm, work)


def test_startup_counts_from_before_the_process(folder):
    rows = startup(EngineConfig(model=f"dummy:{folder}", device="cpu", threads=1), 1, silent)
    whole, *parts = rows
    assert sum(row.value for row in parts) == pytest.approx(whole.value, rel=1e-3)
    assert whole.floor < whole.value


def test_a_start_that_fails_says_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = EngineConfig(model=f"dummy:{tmp_path}", device="cpu")
    (tmp_path / "config.json").unlink()
    with pytest.raises(GenerationError, match=r"a start failed.*names no config"):
        start_once(config)


@pytest.mark.parametrize(
    "kernel, part",
    [
        ("_paged_decode_kernel", "attention"),
        ("_one_row_kernel", "products"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("_add_rms_norm_kernel", "norms"),
        ("void at::native::elementwise_kernel<...>", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, part):
    assert part_of(kernel) == part


def test_labels_have_no_layer(target):
    if target.runner.executor == "native":
        labels = [operation.label for operation in target.runner.model.operations]
        assert not any("layers" in name for name in labels) and labels.index("head") == len(labels) - 1
