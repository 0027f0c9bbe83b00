"""The program as a whole: version, help, exit codes, and what it may import."""

import os
import subprocess
import sys

import pytest

import kvant
from kvant.checkpoint.catalogue import CATALOGUE
from kvant.cli.main import main, run_command
from kvant.config.environment import read_environment
from tests.cli.fake import MODEL, FakeLLM, doors
from tests.cli.terminal import ROOT
from tests.tiny_folder import write_folder

COMMANDS = ["run", "pull", "list", "rm", "bench", "plan", "explain-config", "doctor"]


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


# What `kvant run` may load for one answer, chat template included, once model, library and packed weights are in the cache.
# A new name here is a slower start for everybody: 10 ms were lost to less (docs/benchmarks.md has the budget).
RUN_IMPORTS = {"kvant", "numpy", "click", "tokenizers", "jinja2", "markupsafe"}
RUN_MODULES = 130  # of Kvant's own, at most
BARRED = {"asyncio", "multiprocessing", "importlib.metadata", "concurrent.futures", "ssl", "http.client", "pydantic", "rich"}


def test_what_a_run_imports(tmp_path):
    """The exact list of third-party packages, in a fresh process. The second run is looked at: the first builds and packs."""
    write_folder(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(read_environment().cache / "native")  # built once for all tests
    script = f"""
import sys, sysconfig
before = set(sys.modules)  # what the environment's own start files load
from kvant.cli.main import run_command
code = run_command(["run", {str(tmp_path)!r}, "-p", "hello", "--max-tokens", "2", "--kv-cache-memory-bytes", "4194304"])
new = set(sys.modules) - before
top = {{name.partition(".")[0] for name in new}}
print()
print(code, sorted(name for name in top if name not in sys.stdlib_module_names and not name.startswith("_")))
print(sorted({BARRED!r} & new), sum(name.partition(".")[0] == "kvant" for name in new))
"""
    environment = {**os.environ, "KVANT_CACHE": str(tmp_path / "cache"), "KVANT_PACKED_GIB": "1", "KVANT_OFFLINE": "1"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    if "the CPU runs on torch" in done.stderr:
        pytest.skip("the native executor cannot be built here")
    imported, counted = done.stdout.splitlines()[-2:]
    assert imported == f"0 {sorted(RUN_IMPORTS)}", done.stderr
    barred, number = counted.rsplit(" ", 1)
    assert barred == "[]" and int(number) <= RUN_MODULES


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"], ["list"]])
def test_what_words_alone_import(tmp_path, arguments):
    script = f"""
import sys
before = set(sys.modules)
from kvant.cli.main import run_command
run_command({arguments!r})
top = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print()
print(sorted(name for name in top if name not in sys.stdlib_module_names and not name.startswith("_")))
"""
    environment = {"KVANT_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.splitlines()[-1] == "['click', 'kvant']", done.stderr


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
