"""kvant bench: tables on stdout, progress on stderr, JSON where it is asked for; options of the engine apply."""

import json

import pytest

from kvant.cli.main import run_command
from tests.cli.fake import doors
from tests.tiny_folder import LLAMA


@pytest.fixture
def kvant(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def run(command, *arguments):
        options = ("--device", "cpu", "--threads", "1")
        code = run_command(["bench", command, f"dummy:{tmp_path}", *options, *arguments], doors(None, tmp_path))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_latency(kvant, tmp_path):
    file = tmp_path / "result.json"
    arguments = ("--batch-size", "2", "--input-len", "9", "--output-len", "20", "--num-iters", "2", "--profile")
    code, out, err = kvant("latency", *arguments, "--save-result", str(file))
    assert code == 0 and "round 2 of 2" in err and "loading" not in out
    assert "ceilings: " in out and "decode, 2 streams" in out and "one decode step" in out
    saved = json.loads(file.read_text())
    assert saved["command"] == "latency" and saved["ceilings"]["bandwidth"] > 0
    scenarios = [row["scenario"] for row in saved["rows"]]
    assert scenarios[0] == "prompts, 2 x 9 tokens" and scenarios[-1] == "one decode step: step"


def test_throughput_and_an_engine_that_runs_fewer_at_once(kvant):
    code, out, _ = kvant("throughput", "--num-prompts", "5", "--input-len", "9", "--output-len", "3", "--max-num-seqs", "2")
    assert code == 0 and "throughput, 5 x 9+3" in out and "45 prompt and 15 output tokens" in out


def test_kernels(kvant):
    code, out, _ = kvant("kernels", "--max-num-seqs", "8", "--max-model-len", "200")
    assert code == 0
    assert "decode, 1 x 128 tokens" in out and "decode, 8 x 128 tokens" in out and "32 x 128" not in out
    assert "a prompt of 199 tokens" in out and "gate_proj + up_proj" in out


def test_startup(kvant):
    code, out, _ = kvant("startup", "--num-iters", "1")
    assert code == 0 and "start, to the first token" in out and "model loaded" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("latency", "--output-len", "1"), "--output-len"),
        (("latency", "--batch-size", "0"), "--batch-size"),
        (("latency", "--input-len", "600"), "600"),
        (("throughput", "--workload", "nano"), "ids up to 10000"),
        (("throughput", "--workload", "other"), "--workload"),
        (("serve",), "serve"),
    ],
)
def test_what_cannot_be_measured_is_one_line(kvant, arguments, message):
    code, out, err = kvant(*arguments)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err
