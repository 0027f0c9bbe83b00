"""kvant plan: the parts add up, the file says what the screen says, and nothing but the config is read."""

import json

import pytest

from kvant.cli.main import run_command
from kvant.cli.plan import parse_bytes
from kvant.errors import ConfigError
from tests.cli.fake import doors
from tests.tiny_folder import GEMMA, LLAMA


@pytest.fixture
def kvant(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def run(*arguments):
        code = run_command(["plan", f"dummy:{tmp_path}", *arguments], doors(None, tmp_path))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_gpu_that_is_not_here(kvant, tmp_path):
    code, out, _ = kvant("--gpu-memory", "80GB", "--max-model-len", "256", "--save-result", str(tmp_path / "plan.json"))
    assert code == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["device"], plan["executor"], plan["dtype"]) == ("cuda", "torch", "bfloat16")
    names = [part["name"] for part in plan["parts"]]
    assert names == ["context", "weights", "activations", "sampler", "log-probabilities", "KV blocks"]
    assert all(name in out for name in names) and "of 74.5 GiB" in out
    block = 2 * 2 * 16 * 2 * 16 * 2  # keys and values, layers, tokens, heads, size, bytes
    assert plan["num_bytes"] == sum(part["num_bytes"] for part in plan["parts"])
    assert 0.9 * 80e9 - block < plan["num_bytes"] <= 0.9 * 80e9
    assert plan["parts"][-1]["num_bytes"] == block * plan["num_blocks"][0]
    assert plan["sequences"] == {"256": 64} and plan["max_model_len"] == 256


def test_what_fits_is_counted_in_blocks(kvant, tmp_path):
    block = 2 * 2 * 16 * 2 * 16 * 2
    code, out, _ = kvant("--gpu-memory", "8GB", "--kv-cache-memory-bytes", str(100 * block), "--max-model-len", "512")
    assert code == 0
    (line,) = [line.split() for line in out.splitlines() if " 512 tokens" in line]
    assert line == ["512", "tokens", "3", "sequences"]  # 99 blocks that can be used, 32 a sequence


def test_without_a_gpu_the_cpu_is_planned(kvant):
    code, out, err = kvant()
    assert code == 0 and "torch on the CPU" in out and "of 8.0 GiB" in out
    assert err.startswith("notice: no C++ compiler")


def test_groups_are_told_apart(kvant, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    _, out, _ = kvant("--gpu-memory", "8GiB")
    assert "KV blocks, sliding21" in out and "KV blocks, full" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpu-memory", "lots"], "--gpu-memory must be a size such as 141GB or 80GiB, not 'lots'"),
        (["--gpu-memory", "80GB", "--device", "cpu"], "give one of them"),
        (["--gpu-memory", "200MB"], "what a step needs"),
        (["--device", "cuda"], "no NVIDIA GPU was found"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_remedy(kvant, arguments, message):
    code, out, err = kvant(*arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, number", [("141GB", 141 * 10**9), ("80GiB", 80 << 30), ("1.5t", 15 * 10**11), ("7", 7), ("2 Mi", 2 << 20)]
)
def test_sizes(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "1 2GB"])
def test_no_sizes(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)
