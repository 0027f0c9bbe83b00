"""`--config` and `kvant explain-config`: where each value came from; the command line goes before the file."""

import json

import pytest

from kvant.cli.main import run_command
from tests.cli.fake import FakeLLM, doors


@pytest.fixture
def kvant(capsys, tmp_path):
    model = tmp_path / "config.json"
    shape = dict(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model.write_text(json.dumps({**shape, "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')

    def run(*arguments: str, file: str | None = None):
        if file is not None:
            (tmp_path / "kvant.yaml").write_text(file)
            arguments = (*arguments, "--config", str(tmp_path / "kvant.yaml"))
        llm = FakeLLM(replies=["ok"])
        code = run_command([word.replace("MODEL", f"dummy:{model}") for word in arguments], doors(llm, tmp_path))
        captured = capsys.readouterr()
        return code, captured.out, captured.err, llm

    return run


def rows(out: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in out.splitlines() if line.startswith("  ") and (words := line.split())}


def test_every_option_says_where_it_came_from(kvant, tmp_path):
    code, out, err, _ = kvant(
        "explain-config", "MODEL", "--top-k", "5", "--threads", "1", file="max-num-seqs: 7\ntop_k: 9\nstop: [a b, c]\n"
    )
    assert code == 0 and err.startswith("notice: no C++ compiler") and err.count("\n") == 1
    found = rows(out)
    file = str(tmp_path / "kvant.yaml")
    assert found["max_num_seqs"] == ["7", file] and found["threads"] == ["1", "command", "line"]
    assert found["top_k"] == ["5", "command", "line"] and found["stop"] == ["'a", "b'", "'c'", file]
    assert found["block_size"] == ["16", "default"] and found["temperature"] == ["0.3", "model"]
    assert found["device"][:2] == ["cpu", "decided"] and "no NVIDIA GPU was found" in out
    assert found["max_model_len"][:2] == ["256", "decided"] and found["max_tokens"] == ["none", "chat"]
    assert found["model"][1:3] == ["command", "line"]
    assert out.splitlines()[0] == "Engine" and "\nSampling\n" in out and "executor: torch" in out


def test_a_model_that_is_not_here_is_not_fetched(kvant):
    code, out, err, _ = kvant("explain-config")
    assert (code, out) == (2, "") and "fetch it with: kvant pull smollm2-135m" in err


def test_run_takes_the_file_and_the_command_line_before_it(kvant):
    file = "max_model_len: 50\ntemperature: 0.5\ntop-p: 0.5\nenable-prefix-caching: false\n"
    code, out, _, llm = kvant("run", "MODEL", "-p", "x", "--temperature", "0.9", file=file)
    assert (code, out) == (0, "ok\n")
    assert (llm.config.max_model_len, llm.config.enable_prefix_caching) == (50, False)
    assert (llm.params[0].temperature, llm.params[0].top_p) == (0.9, 0.5)


def test_the_file_may_name_the_model(kvant, tmp_path):
    _, _, _, llm = kvant("run", "-p", "x", file=f"model: dummy:{tmp_path}/config.json")
    assert llm.config.model == f"dummy:{tmp_path}/config.json"


@pytest.mark.parametrize("command", ["run", "explain-config"])
@pytest.mark.parametrize(
    "file, message",
    [
        ("max-model-length: 5", "kvant.yaml: unknown option 'max-model-length'; did you mean max_model_len?"),
        ("max-num-seqs: many", "kvant.yaml: max_num_seqs must be a whole number, not 'many'"),
        ("temperature: -1", "kvant.yaml: temperature must be between 0 and 100, not -1"),
    ],
)
def test_a_wrong_file_is_named(kvant, command, file, message):
    code, out, err, _ = kvant(command, "MODEL", *(["-p", "x"] if command == "run" else []), file=file)
    assert (code, out) == (2, "")
    assert message.replace("max_num_seqs must", "--max-num-seqs must") in err or message in err


def test_a_file_that_is_not_there(kvant):
    code, _, err, _ = kvant("run", "MODEL", "-p", "x", "--config", "/nowhere/kvant.yaml")
    assert code == 2 and err.startswith("error: cannot read the config file /nowhere/kvant.yaml") and err.count("\n") == 1
