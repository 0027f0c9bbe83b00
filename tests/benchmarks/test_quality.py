"""The quality benchmark: its arithmetic on numbers made by hand, and a short form of it on the real models."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import quality, teacher
from benchmarks.distance import Distances, compare, summary
from benchmarks.peers import llama_quality
from benchmarks.results import merge, origin, read


def test_distances_are_the_sums_of_their_definitions():
    rng = np.random.default_rng(0)
    base, logits = rng.normal(size=(2, 5, 11)).astype(np.float32)
    targets = rng.integers(0, 11, 5)
    found = compare(torch.from_numpy(base), torch.from_numpy(logits), torch.from_numpy(targets))
    for row in range(5):
        p, q = (np.exp(x[row].astype(np.float64)) / np.exp(x[row].astype(np.float64)).sum() for x in (base, logits))
        assert found.kl[row] == pytest.approx(sum(p * (np.log(p) - np.log(q))), abs=1e-6)
        assert found.nll[row] == pytest.approx(-math.log(q[targets[row]]), abs=1e-6)
        assert found.base_nll[row] == pytest.approx(-math.log(p[targets[row]]), abs=1e-6)
        assert found.same_top[row] == (p.argmax() == q.argmax())


def test_summary_of_paired_positions():
    base_nll = np.array([[1.0, 2.0], [3.0, 2.0]])
    found = Distances(base_nll + np.array([[0.1, 0.3], [0.1, 0.3]]), base_nll, np.full((2, 2), 0.5), np.eye(2, dtype=bool))
    figures = summary(found)
    assert figures["tokens"] == 4
    assert figures["reference_perplexity"] == pytest.approx(math.exp(2), rel=1e-4)
    assert figures["perplexity"] == pytest.approx(math.exp(2.2), rel=1e-4)
    assert figures["change_percent"] == pytest.approx(100 * (math.exp(0.2) - 1), rel=1e-4)
    # Differences of 0.1 and 0.3 deviate by 0.1; of a mean of four, half of that.
    assert figures["change_error"] == pytest.approx(100 * math.exp(0.2) * 0.05, rel=1e-4)
    assert figures["mean_kl"] == 0.5 and figures["top1_percent"] == 50


def test_a_position_that_was_not_scored_is_no_result():
    found = Distances.empty(2, 3)
    found.put((np.array([0]), np.array([1])), Distances(*(np.zeros(1) for _ in range(4))))
    with pytest.raises(ValueError, match="no finite distance"):
        summary(found)
    assert summary(found.at((0, slice(1, 2))))["tokens"] == 1


def test_windows_cut_the_text_and_begin_as_the_model_expects():
    assert teacher.windows(list(range(1, 8)), 3, None).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert teacher.windows(list(range(1, 8)), 3, 0).tolist() == [[0, 1, 2], [0, 3, 4], [0, 5, 6]]


class Echo:
    """A network that believes every token follows itself; it keeps the sizes of its batches."""

    vocab = 50

    def __init__(self):
        self.sizes = []

    def new_cache(self, num_blocks):
        return self

    def run(self, batch, cache, *, logits):
        assert not logits
        self.batch = batch
        self.sizes.append(len(batch.input_ids))

    def logits(self, rows):
        out = np.zeros((len(rows), self.vocab), np.float32)
        out[np.arange(len(rows)), self.batch.input_ids[rows]] = 9
        return out


@pytest.mark.parametrize(
    ("streams", "chunk", "sizes"),
    [(1, 6, [6] * 3), (1, 4, [4, 2] * 3), (3, 1, [3] * 6), (2, 1, [2] * 6 + [1] * 6), (8, 1, [3] * 6)],
)
def test_every_position_is_fed_and_compared_once_whatever_the_mode(streams, chunk, sizes):
    ids = np.arange(18).reshape(3, 6)
    engine = object.__new__(teacher.Native)
    engine.network, engine.num_groups = Echo(), 1
    reference = object.__new__(teacher.Reference)
    reference.ids = ids

    def expected(window, position):
        out = torch.zeros(len(window), Echo.vocab)
        out[torch.arange(len(window)), torch.from_numpy(ids[window, position])] = 9
        return out

    reference.logits = expected
    found = teacher.score(engine, reference, teacher.Mode(6, streams, chunk))
    assert found.nll.shape == (3, 5)
    assert engine.network.sizes == sizes
    figures = summary(found)
    assert figures["top1_percent"] == 100 and figures["mean_kl"] == 0
    assert figures["perplexity"] == pytest.approx(math.exp(9) + Echo.vocab - 1, rel=1e-4)


def test_llama_cpps_file_holds_log_probabilities_in_16_bits():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)) * 4
    logits[0, 2] = -100  # deeper than the file reaches
    rows = llama_quality.encode(logits)
    assert rows.shape == (3, 4 + 8) and rows.dtype == np.uint16
    scale, lowest = rows[:, :4].copy().view(np.float32).T
    held = lowest[:, None] + scale[:, None] * rows[:, 4:11]
    expected = logits.log_softmax(-1).numpy()
    deep = expected < expected.max(-1, keepdims=True) - llama_quality.DEEPEST
    assert deep.sum() == 1
    assert np.abs(held - expected)[~deep].max() < 16 / 65535
    assert held[deep] == pytest.approx(expected[0].max() - 16, abs=1e-3)


def test_llama_cpps_file_is_its_header_and_the_second_half_of_each_window(tmp_path):
    reference = object.__new__(teacher.Reference)
    reference.ids, reference.vocab_size = np.arange(16).reshape(2, 8), 5
    asked = []
    reference.logits = lambda window, position: asked.append((window[0], list(position))) or torch.eye(5)[: len(window)]
    llama_quality.write_reference(path := tmp_path / "base", reference, None)
    assert asked == [(0, [4, 5, 6]), (1, [4, 5, 6])]
    data = path.read_bytes()
    assert data[:8] == b"_logits_"
    assert np.frombuffer(data[8:], np.int32, 3).tolist() == [8, 5, 2]
    assert np.frombuffer(data[20:], np.int32, 16).tolist() == list(range(16))
    assert len(data) == 20 + 64 + 2 * 3 * 2 * (4 + 6)


SAID = """
Mean PPL(Q)                   :  46.656600 ±   1.800000
Mean PPL(base)                :  46.289000 ±   1.700000
Mean ln(PPL(Q)/PPL(base))     :   0.007910 ±   0.002490
Mean PPL(Q)/PPL(base)         :   1.007940 ±   0.002510
Mean    KLD:   0.002740 ±   0.000090
99.0%   KLD:   0.013000
Same top p: 96.180 ± 0.600 %
"""


def test_what_llama_cpp_says_is_read_and_what_it_does_not_say_is_an_error():
    assert llama_quality.parse(SAID, 0) == {
        "perplexity": 46.6566,
        "reference_perplexity": 46.289,
        "change_percent": 0.794,
        "change_error": 0.251,
        "mean_kl": 0.00274,
        "p99_kl": 0.013,
        "top1_percent": 96.18,
    }
    for text, code in ((SAID, 1), (SAID.replace("Same top p", "other"), 0)):
        with pytest.raises(RuntimeError, match="llama-perplexity"):
            llama_quality.parse(text, code)


def test_llama_cpp_is_asked_for_so_many_rows_at_a_time(tmp_path):
    program = tmp_path / "perplexity"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'args')!r}, 'w').write(' '.join(sys.argv[1:]))\nprint({SAID!r})"
    )
    program.chmod(0o755)
    llama_quality.measure(program, Path("m.gguf"), Path("base"), 2, 512, 8)
    assert (
        tmp_path / "args"
    ).read_text() == "-m m.gguf --kl-divergence --kl-divergence-base base -c 512 -b 512 -ub 8 -t 2 -tb 2"


def test_measured_rows_replace_their_like_and_leave_the_others(tmp_path):
    path = tmp_path / "result.json"
    first = [{"scenario": name, "value": 1, "commit": "old"} for name in ("b", "a", "gone")]
    merge(path, first, ["a", "b", "gone"])
    rows = merge(path, [{"scenario": "b", "value": 2, "commit": "new"}], ["a", "b"])
    assert (
        rows == read(path) == [{"scenario": "a", "value": 1, "commit": "old"}, {"scenario": "b", "value": 2, "commit": "new"}]
    )
    assert origin(2, {"numpy": "2"}).keys() == {"machine", "versions", "commit", "date"}


# What a window or two can tell: the committed figures (benchmarks/quality.json) come from all of the text.
@pytest.mark.model
@pytest.mark.parametrize(("model", "windows"), [("smollm2-135m", 2), ("gemma3-270m", 1)])
def test_the_native_step_is_close_to_fp32_for_prompts_and_for_single_tokens(model, windows):
    ids, bos = quality.read_text(model)
    reference = teacher.Reference(model, 2)
    # Before anything else: the reference itself, against transformers.
    assert quality.check_reference(reference, model) < 0.001
    reference.read(teacher.windows(ids, 256, bos)[:windows])
    engine = teacher.Native(model, 2)
    for mode, kl, top1 in ((teacher.Mode(256, 1, 256), 0.001, 97), (teacher.Mode(256, 2, 1), 0.006, 92)):
        figures = summary(teacher.score(engine, reference, mode))
        assert figures["mean_kl"] < kl and figures["top1_percent"] > top1 and abs(figures["change_percent"]) < 2, figures
