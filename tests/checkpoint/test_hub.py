"""Models of the Hub: the real client against a Hub on this machine, and what is decided about names and files."""

import json
import os
import subprocess
import sys

import pytest

from kvant.checkpoint import hub
from kvant.checkpoint.hub import choose, find, parse, pins, pull, remove
from kvant.checkpoint.hub_client import HubClient
from kvant.checkpoint.store import list_models, pull_model, remove_model, resolve_model
from kvant.config.environment import Environment
from kvant.errors import CapacityError, DownloadError, ModelNotFoundError, UnsupportedError
from tests.checkpoint.hub_server import TOKEN, Hub, serving

WEIGHTS = bytes(range(256)) * 2000
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "LICENSE": b"free",
}
OTHERS = {"README.md": b"#", "pytorch_model.bin": b"x" * 99, "onnx/model.safetensors": b"x", "consolidated.safetensors": b"x"}


@pytest.fixture(scope="module")
def server():
    with serving(Hub()) as served:
        yield served


@pytest.fixture
def there(server, monkeypatch, tmp_path):
    """The Hub, with one model; its client is what the store uses."""
    server.__init__(repos={"org/name": {"main": {**FILES, **OTHERS}}}, url=server.url)
    monkeypatch.setattr(hub, "HubClient", lambda: HubClient(server.url, token=False))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "shared"))
    monkeypatch.setattr("kvant.checkpoint.hub_client.ATTEMPTS", 1)
    return server


@pytest.fixture
def environment(tmp_path):
    return Environment(cache=tmp_path / "cache")


def silent(*news):
    pass


# --- names and files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, expected",
    [
        ("org/name", ("org/name", None, None)),
        ("org/name@v1.0", ("org/name", "v1.0", None)),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3", None)),
        ("org/name:model-Q4_K_M.gguf", ("org/name", None, "model-Q4_K_M.gguf")),
        ("o.r-g/n_a.m-e@0123abc:sub/model.gguf", ("o.r-g/n_a.m-e", "0123abc", "sub/model.gguf")),
    ],
)
def test_names(name, expected):
    assert parse(name) == expected and parse(name).name == name


@pytest.mark.parametrize(
    "name",
    ["smollm2-135m", "./org/name", "../name", "/org/name", "~/name", "a/b/c", "org/", "org/name:file.bin", "org/name.json",
     "org/name:../../x.gguf", "org/name@", "C:/models/x", "org\\name", ""],
)  # fmt: skip
def test_what_is_no_name_of_the_hub(name):
    assert parse(name) is None


def test_only_what_a_model_needs_is_chosen():
    assert sorted(choose(parse("org/name"), {**FILES, **OTHERS})) == sorted(FILES)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(shards) < set(choose(parse("org/name"), [*shards, "config.json", "chat_template.jinja"]))
    ggufs = ["a-Q4.gguf", "a-Q8.gguf", "LICENSE", "config.json"]
    assert choose(parse("org/name:a-Q8.gguf"), ggufs) == ["a-Q8.gguf", "LICENSE"]


@pytest.mark.parametrize(
    "name, files, error, message",
    [
        ("org/name", ["a.gguf", "b.gguf"], ModelNotFoundError, "there are org/name:a.gguf, org/name:b.gguf"),
        ("org/name:a-q4.gguf", ["a-Q4.gguf", "x.gguf"], ModelNotFoundError, "did you mean org/name:a-Q4.gguf?"),
        ("org/name:a.gguf", ["config.json"], ModelNotFoundError, "no GGUF file at all"),
        ("org/name:a-00001-of-00002.gguf", ["a-00001-of-00002.gguf"], UnsupportedError, "split GGUF"),
        ("org/name", ["config.json", "pytorch_model.bin"], UnsupportedError, "only pickled weights"),
        ("org/name", ["README.md"], UnsupportedError, "lacks config.json or safetensors"),
        ("org/name", ["config.json", "..\\..\\x.safetensors"], UnsupportedError, "lacks"),
    ],
)
def test_what_cannot_be_chosen(name, files, error, message):
    with pytest.raises(error) as caught:
        choose(parse(name), files)
    assert message in str(caught.value)


# --- fetching -----------------------------------------------------------------------------------------------------------


def test_a_model_is_fetched_pinned_and_found_without_a_network(there, environment):
    seen = []
    path = resolve_model("org/name", environment, progress=lambda *news: seen.append(news))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert path.name == there.commit("org/name", "main")
    total = sum(map(len, FILES.values()))
    done = [news[0] for news in seen if news[1:] == (total, "downloading org/name")]
    assert done == sorted(done) and done[-1] == total and len(done) > 3
    there.asked.clear()
    assert resolve_model("org/name", Environment(cache=environment.cache, offline=True)) == path
    assert there.asked == []
    listed = list_models(environment)[-1]
    assert (listed.alias, listed.path, listed.num_bytes) == ("org/name", path, total)


def test_a_pin_moves_only_when_it_is_pulled(there, environment):
    first = resolve_model("org/name", environment)
    there.repos["org/name"]["main"] = {**FILES, "config.json": b'{"architectures": ["Other"]}'}
    assert resolve_model("org/name", environment) == first
    there.asked.clear()
    second = pull_model("org/name", environment)
    assert second != first and (second / "config.json").read_bytes() == b'{"architectures": ["Other"]}'
    assert there.asked == ["config.json"]  # the rest is the same, and was here
    assert not first.exists() and find(parse("org/name"), environment).path == second


def test_revisions_and_files_are_models_of_their_own(there, environment):
    there.repos["org/name"]["v2"] = {**FILES, "model.safetensors": WEIGHTS[::-1]}
    there.repos["org/ggufs"] = {"main": {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b", "LICENSE": b"free"}}
    names = ["org/name", "org/name@v2", "org/ggufs:a.gguf", "org/ggufs:b.gguf"]
    paths = [resolve_model(name, environment) for name in names]
    assert paths[1].joinpath("model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert [path.read_bytes() for path in paths[2:]] == [b"GGUF a", b"GGUF b"]
    assert sorted(pin.model.name for pin in pins(environment)) == sorted(names)
    files = [path.name for path in environment.cache.rglob("*")]
    assert not any(set(name) & set('<>:"\\|?*') for name in files)  # Windows could not make them


def test_an_interrupted_file_goes_on_where_it_stopped(there, environment):
    there.ends_at = 100_000
    with pytest.raises(DownloadError, match="run the same command again"):
        pull(parse("org/name"), environment, silent)
    assert find(parse("org/name"), environment) is None
    there.ends_at = None
    there.asked.clear()
    path = resolve_model("org/name", environment)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    resumed = [name for name in there.asked if name.startswith("model.safetensors")]
    assert len(resumed) == 1 and int(resumed[0].rpartition(" ")[2]) >= 100_000


def test_a_line_that_breaks_now_and_then_is_no_error(there, environment, monkeypatch):
    monkeypatch.setattr("kvant.checkpoint.hub_client.ATTEMPTS", 2)
    there.breaks_after = 200_000
    assert (resolve_model("org/name", environment) / "model.safetensors").read_bytes() == WEIGHTS
    assert len([name for name in there.asked if name.startswith("model.safetensors")]) == 3


def test_a_server_without_ranges_starts_again(there, environment):
    there.ends_at, there.ignores_range = 100_000, True
    with pytest.raises(DownloadError):
        pull(parse("org/name"), environment, silent)
    there.ends_at = None
    assert (resolve_model("org/name", environment) / "model.safetensors").read_bytes() == WEIGHTS


def test_damage_is_noticed_and_nothing_of_it_kept(there, environment):
    there.damages = True
    with pytest.raises(DownloadError, match="arrived damaged"):
        pull(parse("org/name"), environment, silent)
    assert not [file for file in environment.cache.rglob("*") if file.is_file() and file.suffix != ".lock"]


def test_what_another_program_fetched_is_not_fetched_again(there, environment, monkeypatch, tmp_path):
    other = tmp_path / "blob"
    other.write_bytes(WEIGHTS)
    monkeypatch.setattr(HubClient, "cached", lambda self, repo, commit, name: other if name.endswith("tensors") else None)
    path = resolve_model("org/name", environment)
    assert "model.safetensors" not in there.asked and (path / "model.safetensors").read_bytes() == WEIGHTS
    other.write_bytes(WEIGHTS[::-1])  # the same size, something else
    remove(parse("org/name"), environment)
    assert (resolve_model("org/name", environment) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_pin_whose_files_went_away_is_no_pin(there, environment):
    (resolve_model("org/name", environment) / "tokenizer.json").unlink()
    assert find(parse("org/name"), environment) is None
    there.asked.clear()
    resolve_model("org/name", environment)
    assert there.asked == ["tokenizer.json"]
    (environment.cache / "hub" / "org%2Fname.json").write_text("{")
    assert pins(environment) == []


# --- what goes wrong ----------------------------------------------------------------------------------------------------


def test_gated_repositories_say_what_to_do(there, environment, monkeypatch):
    there.gated.add("org/name")
    for token, status in [(False, "HTTP 401"), ("hf_other", "HTTP 403")]:
        with pytest.raises(DownloadError) as caught:
            pull(parse("org/name"), environment, silent, HubClient(there.url, token))
        for words in ("is gated", "https://huggingface.co/org/name", "hf auth login", "HF_TOKEN", status):
            assert words in str(caught.value)
    assert pull(parse("org/name"), environment, silent, HubClient(there.url, TOKEN)).is_whole


def test_the_token_comes_from_the_environment(there, tmp_path):
    there.gated.add("org/name")
    script = f"""
import kvant.checkpoint.hub as hub
from kvant.config.environment import read_environment
print(hub.pull(hub.parse("org/name"), read_environment(), lambda *news: None, hub.HubClient({there.url!r})).is_whole)
"""
    environment = {**os.environ, "HF_TOKEN": TOKEN, "KVANT_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    "name, error, words",
    [
        ("org/none", ModelNotFoundError, ["no file or folder org/none", "https://huggingface.co/org/none", "hf auth login"]),
        ("org/name@v9", ModelNotFoundError, ["org/name has no revision 'v9'"]),
        ("org/na--me", ModelNotFoundError, ["is no name of a repository"]),
    ],
)
def test_what_is_not_there(there, environment, name, error, words):
    with pytest.raises(error) as caught:
        resolve_model(name, environment)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert pins(environment) == []


@pytest.mark.parametrize("status, remedy", [(500, "try again later"), (401, "hf auth login"), (403, "hf auth login")])
def test_what_the_hub_refuses(there, environment, monkeypatch, status, remedy):
    client = HubClient(there.url, token=False)
    repository = client.repository("org/name", None)
    monkeypatch.setattr(client, "repository", lambda repo, revision: repository)
    there.status = status
    with pytest.raises((DownloadError, ModelNotFoundError), match=remedy):
        pull(parse("org/name"), environment, silent, client)


def test_without_a_network(environment, monkeypatch):
    monkeypatch.setattr(hub, "HubClient", lambda: HubClient("http://127.0.0.1:9", token=False))
    with pytest.raises(DownloadError, match="cannot reach the Hub for org/name"):
        resolve_model("org/name", environment)


def test_offline_and_not_allowed(there, environment):
    offline = Environment(cache=environment.cache, offline=True)
    with pytest.raises(DownloadError, match="KVANT_OFFLINE is set; unset it and run: kvant pull org/name"):
        resolve_model("org/name", offline)
    with pytest.raises(ModelNotFoundError, match="fetch it with: kvant pull org/name"):
        resolve_model("org/name", environment, allow_download=False)
    assert there.asked == []


def test_a_disk_that_is_too_small(there, environment, monkeypatch):
    monkeypatch.setattr(hub, "SPARE_BYTES", 1 << 62)
    with pytest.raises(CapacityError, match="set KVANT_CACHE"):
        resolve_model("org/name", environment)


# --- removing -----------------------------------------------------------------------------------------------------------


def test_removing_keeps_what_others_need(there, environment):
    there.repos["org/ggufs"] = {"main": {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b!", "LICENSE": b"free"}}
    a, b = resolve_model("org/ggufs:a.gguf", environment), resolve_model("org/ggufs:b.gguf", environment)
    assert remove_model("org/ggufs:a.gguf", environment) == len(b"GGUF a")
    assert not a.exists() and b.read_bytes() == b"GGUF b!"
    assert remove_model("org/ggufs:b.gguf", environment) == len(b"GGUF b!") + len(b"free")
    assert not list((environment.cache / "hub").iterdir())
    with pytest.raises(ModelNotFoundError, match=r"ggufs:b[.]gguf is not in the store"):
        remove_model("org/ggufs:b.gguf", environment)


def test_half_of_a_model_can_be_removed(there, environment):
    there.ends_at = 100_000
    with pytest.raises(DownloadError):
        pull(parse("org/name"), environment, silent)
    assert remove_model("org/name", environment) >= 100_000
    assert not list((environment.cache / "hub").iterdir())


def test_a_path_that_exists_goes_before_the_hub(there, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    assert str(resolve_model("org/name", environment)) == "org/name"


def test_a_found_model_needs_neither_network_nor_library(there, environment):
    resolve_model("org/name", environment)
    script = """
import json, sys
from kvant.checkpoint.store import list_models, resolve_model
found = [str(resolve_model("org/name")), list_models()[-1].alias]
print(json.dumps([*found, sorted({"huggingface_hub", "numpy"} & set(sys.modules))]))
"""
    variables = {**os.environ, "KVANT_CACHE": str(environment.cache)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=variables)
    assert json.loads(done.stdout)[1:] == ["org/name", []]
