"""The program as a whole: version, help, exit codes, and what it may import."""

import subprocess
import sys

import pytest

import kvant
from kvant.checkpoint.catalogue import CATALOGUE
from kvant.cli.main import main, run_command
from tests.cli.fake import MODEL, FakeLLM, doors
from tests.cli.terminal import ROOT

COMMANDS = ["run", "pull", "list", "rm", "explain-config", "doctor"]


def test_version(capsys):
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"kvant {kvant.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_exactly_what_exists(capsys, arguments):
    assert run_command(arguments) == 0
    commands = capsys.readouterr().out.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in commands if line.strip()] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    assert run_command([command, "--help"]) == 0
    assert f"Usage: kvant {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "raised, code, message",
    [(KeyboardInterrupt, 130, ""), (MemoryError, 2, "error: out of memory")],
)
def test_while_a_model_is_loaded(capsys, tmp_path, raised, code, message):
    def open_llm(config):
        raise raised

    assert run_command(["run", MODEL, "-p", "x"], doors(FakeLLM(), tmp_path, open_llm=open_llm)) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(message) and "Traceback" not in captured.err


def test_a_fault_of_the_programs_own_keeps_its_traceback(tmp_path):
    def open_llm(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(["run", MODEL, "-p", "x"], doors(FakeLLM(), tmp_path, open_llm=open_llm))


def test_main_exits(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--nothing"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: No such option '--nothing'.\n"


def test_an_unusable_environment_is_a_mistake_like_any_other(capsys, monkeypatch):
    monkeypatch.setenv("KVANT_CACHE", "~no-such-user-here/x")
    assert run_command(["list"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments, barred",
    [
        (["--help"], ["torch", "numpy", "tokenizers", "jinja2"]),
        (["run", "--help"], ["torch", "numpy", "tokenizers", "jinja2"]),
        (["list"], ["torch", "numpy", "tokenizers", "jinja2"]),
        (["rm", "nothing"], ["torch", "numpy", "tokenizers", "jinja2", "yaml", "huggingface_hub"]),
        (["explain-config", "nothing"], ["torch", "tokenizers", "jinja2", "yaml", "huggingface_hub"]),
        (["pull", "nothing"], ["torch", "numpy", "tokenizers", "jinja2"]),
        (["doctor"], ["torch", "tokenizers", "jinja2", "transformers"]),
        # wrong arguments and unknown models are noticed before anything heavy is loaded
        (["run", "nothing", "-p", "x"], ["torch", "numpy", "tokenizers", "jinja2"]),
        (["run", "-p", "x", "--temperature", "-1"], ["torch", "numpy", "tokenizers", "jinja2"]),
    ],
)
def test_imports(tmp_path, arguments, barred):
    script = f"""
import sys
from kvant.cli.main import run_command
run_command({arguments!r})
print("imported:", sorted(set({barred!r}) & set(sys.modules)))
"""
    environment = {"KVANT_CACHE": str(tmp_path), "KVANT_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.splitlines()[-1] == "imported: []", done.stderr


@pytest.mark.parametrize(
    "words, expected", [("kvant ex", ["explain-config"]), ("kvant pull g", ["gemma3-270m"]), ("kvant rm ", ["gemma3-270m"])]
)
def test_completion_in_bash(tmp_path, words, expected):
    """What the shell asks for, with one model in the store."""
    model = CATALOGUE["gemma3-270m"]
    path = tmp_path / "models" / model.alias / model.file_name
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.truncate(model.num_bytes)
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_KVANT_COMPLETE": "bash_complete"}
    script = "from kvant.cli.main import main; main([])"
    environment = {**asked, "KVANT_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.split() == [f"plain,{word}" for word in expected], done.stderr
