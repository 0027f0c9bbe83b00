"""`kvant pull` and `kvant list` over the real store in an empty folder; the network is never touched."""

import json

import numpy as np
import pytest

from kvant.checkpoint.catalogue import CATALOGUE
from kvant.checkpoint.kept import Shelf
from kvant.cli import models
from kvant.cli.main import run_command
from kvant.cli.screen import columns
from tests.cli.fake import FakeLLM, doors


@pytest.fixture
def kvant(capsys, tmp_path):
    def run(*arguments: str):
        code = run_command(list(arguments), doors(FakeLLM(), tmp_path))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_list_of_an_empty_store(kvant):
    code, out, err = kvant("list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(CATALOGUE)
    assert "not here; kvant pull gemma3-270m" in out


def test_list_shows_where_a_model_is(kvant, tmp_path):
    model = CATALOGUE["smollm2-135m"]
    path = tmp_path / "models" / model.alias / model.file_name
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.truncate(model.num_bytes)
    assert str(path) in kvant("list")[1]
    assert kvant("pull", "smollm2-135m") == (0, f"smollm2-135m is at {path}\n", "")


@pytest.mark.parametrize("command", ["pull", "run"])
def test_without_a_network(kvant, command):
    code, out, err = kvant(command, "smollm2-135m", *(["-p", "x"] if command == "run" else []))
    assert (code, out) == (2, "")
    assert err.startswith("error: smollm2-135m is not in the store and KVANT_OFFLINE is set") and err.count("\n") == 1


@pytest.mark.parametrize(
    "model, message",
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("nothing-like-it", "known models are smollm2-135m, gemma3-270m"),
        ("missing.gguf", "there is no file or folder missing.gguf"),
        ("{folder}/notes.txt", "is no GGUF file"),
        ("dummy:{folder}/none.json", "names no config"),
    ],
)
def test_models_that_are_not_there(kvant, tmp_path, model, message):
    (tmp_path / "notes.txt").write_text("not a model")
    code, out, err = kvant("run", model.format(folder=tmp_path), "-p", "x")
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_pull_wants_an_alias(kvant):
    assert kvant("pull", "smolm2")[0] == 2
    code, _, err = kvant("pull")
    assert code == 2 and "Missing argument 'MODEL'" in err


def test_progress_without_a_terminal_is_a_line_per_stage(kvant, monkeypatch, tmp_path):
    def pull_model(alias, environment, *, progress, notify):
        notify("These are the terms.")
        for done in range(0, 101, 10):
            progress(done, 100, "fetching")
        progress(0, 100, "unpacking")
        return tmp_path / "model"

    monkeypatch.setattr(models, "pull_model", pull_model)
    code, out, err = kvant("pull", "gemma3-270m")
    assert (code, out) == (0, f"gemma3-270m is at {tmp_path / 'model'}\n")
    assert err == "notice: These are the terms.\nfetching\nunpacking\n"


def test_interrupted_pull(kvant, monkeypatch):
    def pull_model(alias, environment, *, progress, notify):
        progress(1, 100, "fetching")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "pull_model", pull_model)
    assert kvant("pull", "gemma3-270m") == (130, "", "fetching\n\n")  # the shell's prompt begins below ^C


def test_columns():
    assert columns([["a", "bb", "c"], ["aaa", "b", ""]]) == ["a    bb  c", "aaa  b"]


def test_rm(kvant, tmp_path):
    model = CATALOGUE["smollm2-135m"]
    path = tmp_path / "models" / model.alias / model.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(3 << 20))
    assert kvant("rm", "smollm2-135m") == (0, "smollm2-135m is removed; 3.0 MiB are free again\n", "")
    assert not path.exists()
    code, out, err = kvant("rm", "smollm2-135m")
    assert (code, out) == (2, "") and "is not in the store; there is nothing to remove" in err
    assert "org/name is not in the store" in kvant("rm", "org/name")[2]


def test_packed_weights_are_listed_and_go_with_their_model(kvant, tmp_path):
    model = CATALOGUE["smollm2-135m"]
    path = tmp_path / "models" / model.alias / model.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(1 << 20))
    weights = np.zeros(1 << 20, np.uint8)
    Shelf(tmp_path / "packed", path, 1 << 30, print).write("key", len(weights), [((0,), weights)])
    (kept,) = (tmp_path / "packed").iterdir()
    assert kvant("list")[1].splitlines()[-1] == f"packed for this CPU  1.0 MiB  {tmp_path / 'packed'}"
    assert kvant("rm", "smollm2-135m") == (0, "smollm2-135m is removed; 2.0 MiB are free again\n", "")
    assert not kept.exists() and "packed" not in kvant("list")[1]


def test_a_model_of_the_hub(kvant, tmp_path):
    folder = tmp_path / "hub" / "org--name" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"GGUF")
    pin = {"model": "org/name:model.gguf", "commit": "0123456789abcdef", "files": {"model.gguf": 4}}
    (tmp_path / "hub" / "org%2Fname%3Amodel.gguf.json").write_text(json.dumps(pin))
    line = kvant("list")[1].splitlines()[-1]
    assert line.split()[0] == "org/name:model.gguf" and str(folder) in line and "Hugging Face, commit 0123456" in line
    code, out, err = kvant("run", "org/other", "-p", "x")
    assert (code, out) == (2, "") and "KVANT_OFFLINE is set; unset it and run: kvant pull org/other" in err
    assert kvant("rm", "org/name:model.gguf")[1].startswith("org/name:model.gguf is removed; 4 bytes are free")
