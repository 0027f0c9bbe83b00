"""The model store with a pip of our own: resuming, damage, races, and words for everything that can go wrong."""

import dataclasses
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvant.checkpoint import catalogue, download, lock, store
from kvant.checkpoint.catalogue import CatalogueModel, Package
from kvant.checkpoint.download import PipResult, run_pip
from kvant.checkpoint.store import find_model, list_models, pull_model, remove_model, resolve_model
from kvant.config.environment import Environment, read_environment
from kvant.errors import CapacityError, ConfigError, DownloadError, ModelNotFoundError, UnsupportedError

CONTENT = bytes(range(256)) * 5000  # more than one chunk of the copying loop
PIECES = [CONTENT[:600_000], CONTENT[600_000:]]
TINY = CatalogueModel(
    alias="tiny",
    description="a model for tests",
    file_name="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    packages=(
        Package(name="tiny-base", version="1.0", wheel_bytes=300, documents=("tiny_base/TERMS.html",)),
        Package(name="tiny-part1", version="1.0", wheel_bytes=3000, member="tiny_part1/model.part00"),
        Package(name="tiny-part2", version="1.0", wheel_bytes=3000, member="tiny_part2/model.part01"),
    ),
    terms="Terms apply.",
)
MEMBERS = {
    "tiny-base": {"tiny_base/TERMS.html": b"the terms"},
    "tiny-part1": {"tiny_part1/model.part00": PIECES[0]},
    "tiny-part2": {"tiny_part2/model.part01": PIECES[1]},
}


def wheel(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class FakePip:
    """An index in memory. `trouble` maps a package to what happens instead of its delivery."""

    def __init__(self, trouble=None):
        self.asked: list[str] = []
        self.trouble = trouble or {}

    def __call__(self, arguments, scratch, tick) -> PipResult:
        assert arguments[0] == "download" and "--no-deps" in arguments and "--only-binary=:all:" in arguments
        name, _, version = arguments[-1].partition("==")
        self.asked.append(name)
        (scratch / "half").write_bytes(bytes(100))
        tick()
        target = Path(arguments[arguments.index("--dest") + 1]) / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        if name in self.trouble:
            return self.trouble[name](target)
        wheel(target, MEMBERS[name])
        tick()
        return PipResult(0, f"Saved {target}")


@pytest.fixture(autouse=True)
def only_tiny(monkeypatch):
    for module in (catalogue, store):
        monkeypatch.setattr(module, "CATALOGUE", {"tiny": TINY})
    monkeypatch.setattr(download, "SPARE_BYTES", 0)


@pytest.fixture
def environment(tmp_path):
    return Environment(cache=tmp_path / "cache")


def pull(environment, pip, **options):
    return pull_model("tiny", environment, run=pip, **options)


def leftovers(environment) -> list[str]:
    """Every file in the cache but the model, its papers and the lock."""
    files = (p for p in environment.cache.rglob("*") if p.is_file() and p.suffix != ".lock")
    return sorted(p.name for p in files if p.name not in ("tiny.gguf", "TERMS.html"))


# --- what goes well -----------------------------------------------------------------------------------------------------


def test_a_model_is_fetched_joined_and_found_again(environment):
    pip, told, seen = FakePip(), [], []
    path = pull(environment, pip, notify=told.append, progress=lambda *news: seen.append(news))
    assert path.read_bytes() == CONTENT and path.name == "tiny.gguf"
    assert pip.asked == ["tiny-base", "tiny-part1", "tiny-part2"] and leftovers(environment) == []
    assert told == [f"Terms apply. Their text is kept in {path.parent}."]
    assert (path.parent / "TERMS.html").read_bytes() == b"the terms"
    assert find_model("tiny", environment) == path == pull(environment, FakePip(trouble=dict.fromkeys(MEMBERS, None)))
    assert_progress(seen)


def assert_progress(seen):
    labels = list(dict.fromkeys(label for _, _, label in seen))
    assert labels == ["downloading tiny", "unpacking tiny"]
    for label, total in zip(labels, (TINY.wheel_bytes, TINY.num_bytes), strict=True):
        done = [d for d, t, name in seen if name == label and t == total]
        assert done == sorted(done) and done[-1] == total and len(done) > 1


def test_a_second_try_fetches_only_what_is_missing(environment):
    def broken(_):
        return PipResult(1, "ERROR: HTTP error 500 while getting the file")

    with pytest.raises(DownloadError, match=r"tiny-part2==1\.0: HTTP error 500"):
        pull(environment, FakePip({"tiny-part2": broken}))
    assert find_model("tiny", environment) is None
    pip = FakePip()
    assert pull(environment, pip).read_bytes() == CONTENT
    assert pip.asked == ["tiny-part2"]


def test_ctrl_c_while_fetching_keeps_what_is_complete(environment):
    def interrupted(target):
        target.write_bytes(b"half a wheel")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(environment, FakePip({"tiny-part2": interrupted}))
    assert leftovers(environment) == ["tiny_base-1.0-py3-none-any.whl", "tiny_part1-1.0-py3-none-any.whl"]
    pip = FakePip()
    assert pull(environment, pip).read_bytes() == CONTENT and pip.asked == ["tiny-part2"]


def test_an_interrupted_unpacking_leaves_nothing_that_looks_like_a_model(environment):
    def stop(done, total, label):
        if label.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(environment, FakePip(), progress=stop)
    assert find_model("tiny", environment) is None and not list(environment.models.rglob("*.partial"))
    pip = FakePip()
    assert pull(environment, pip).read_bytes() == CONTENT and pip.asked == []


def test_what_a_killed_process_left_is_no_model(environment):
    folder = environment.models / "tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf.partial").write_bytes(CONTENT[:1000])
    (folder / "tiny.gguf").write_bytes(CONTENT[:1000])  # not of our making, but of the wrong size
    incoming = environment.downloads / "tiny" / "incoming"
    incoming.mkdir(parents=True)
    (incoming / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    assert find_model("tiny", environment) is None
    assert pull(environment, FakePip()).read_bytes() == CONTENT and leftovers(environment) == []


# --- damage -------------------------------------------------------------------------------------------------------------


def test_half_a_wheel_is_not_kept(environment):
    def cut(target):
        wheel(target, MEMBERS["tiny-part1"])
        target.write_bytes(target.read_bytes()[:-200])
        return PipResult(0, "")

    with pytest.raises(DownloadError, match=r"tiny-part1==1\.0 arrived damaged; try again"):
        pull(environment, FakePip({"tiny-part1": cut}))
    assert leftovers(environment) == ["tiny_base-1.0-py3-none-any.whl"]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_wheel_with_a_flipped_byte_is_thrown_away_and_fetched_anew(environment, compression):
    def flipped(target):
        raw = bytearray(wheel(target, MEMBERS["tiny-part1"], compression).read_bytes())
        raw[len(raw) // 3] ^= 0x55
        target.write_bytes(raw)
        return PipResult(0, "")

    with pytest.raises(DownloadError, match=r"tiny-part1==1\.0 is damaged"):
        pull(environment, FakePip({"tiny-part1": flipped}))
    assert find_model("tiny", environment) is None and "tiny_part1" not in str(leftovers(environment))
    pip = FakePip()
    assert pull(environment, pip).read_bytes() == CONTENT and pip.asked == ["tiny-part1"]


def test_another_content_than_expected_is_refused_and_nothing_of_it_kept(environment):
    def other(target):
        wheel(target, {"tiny_part2/model.part01": bytes(len(PIECES[1]))})
        return PipResult(0, "")

    with pytest.raises(DownloadError, match="another content than expected"):
        pull(environment, FakePip({"tiny-part2": other}))
    assert find_model("tiny", environment) is None and leftovers(environment) == []
    assert not (environment.models / "tiny" / "TERMS.html").exists()


def test_a_package_without_the_model_is_refused(environment):
    def empty(target):
        wheel(target, {"README": b""})
        return PipResult(0, "")

    with pytest.raises(DownloadError, match=r"lacks tiny_part1/model\.part00"):
        pull(environment, FakePip({"tiny-part1": empty}))


# --- two at once --------------------------------------------------------------------------------------------------------


def test_two_pulls_at_once_fetch_once(environment, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.01)
    inside, go_on, waiting = threading.Event(), threading.Event(), threading.Event()

    def slow(target):
        inside.set()
        assert go_on.wait(10)
        wheel(target, MEMBERS["tiny-part1"])
        return PipResult(0, "")

    def second_waits(done, total, label):
        if label == "waiting for tiny":
            waiting.set()

    first, second, paths = FakePip({"tiny-part1": slow}), FakePip(), []
    threads = [
        threading.Thread(target=lambda: paths.append(pull(environment, first))),
        threading.Thread(target=lambda: paths.append(pull(environment, second, progress=second_waits))),
    ]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert waiting.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(paths) == 2 and paths[0] == paths[1] and paths[0].read_bytes() == CONTENT
    assert second.asked == []


def test_the_lock_does_not_survive_its_holder(environment):
    environment.downloads.mkdir(parents=True)
    path = environment.downloads / "tiny.lock"
    script = f"""
import os
from pathlib import Path
from kvant.checkpoint.lock import only_one
with only_one(Path({str(path)!r})):
    os._exit(1)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 1
    assert path.exists() and pull(environment, FakePip()).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(environment):
    """Somebody else's, or on a read-only disk; here a folder stands where the lock should be, which stops even root."""
    from kvant.checkpoint.lock import only_one

    (environment.downloads / "lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot write .*lock \(.*set KVANT_CACHE"), only_one(environment.downloads / "lock"):
        pass


def test_the_lock_of_windows(tmp_path, monkeypatch):
    """The same file lock through msvcrt, as far as a system without it can tell."""
    held = set()

    def locking(number, mode, num_bytes):
        key = os.fstat(number).st_ino
        if mode == "lock" and key in held:
            raise OSError("already locked")
        (held.add if mode == "lock" else held.remove)(key)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK="lock", LK_UNLCK="unlock"))
    windows = runpy.run_path(lock.__file__)
    waited = []
    with windows["only_one"](tmp_path / "lock"):
        assert len(held) == 1

        def waiting():
            waited.append(True)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), windows["only_one"](tmp_path / "lock", waiting):
            pass
    assert waited and not held


# --- no network, no disk, no pip ----------------------------------------------------------------------------------------


def test_offline_says_so_and_touches_nothing(environment):
    offline, pip = dataclasses.replace(environment, offline=True), FakePip()
    with pytest.raises(DownloadError, match=r"KVANT_OFFLINE is set; unset it"):
        pull(offline, pip)
    assert pip.asked == [] and not environment.cache.exists()
    path = pull(environment, FakePip())
    assert pull(offline, pip) == path == resolve_model("tiny", offline) and pip.asked == []


def test_a_full_disk_is_noticed_before_anything_is_fetched(environment, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, TINY.num_bytes))
    pip = FakePip()
    with pytest.raises(CapacityError, match=r"tiny needs 1 MB of disk.*KVANT_CACHE"):
        pull(environment, pip)
    assert pip.asked == []


def test_a_disk_that_fills_up_meanwhile(environment, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match=r"cannot write .*tiny\.gguf: No space left"):
        pull(environment, FakePip())
    assert find_model("tiny", environment) is None and not list(environment.models.rglob("*.partial"))


NO_MATCH = "ERROR: Could not find a version\nERROR: No matching distribution found for tiny-base==1.0"
PIP_SAYS = {
    "no network": (f"WARNING: connection broken by 'NewConnectionError'\n{NO_MATCH}", DownloadError, "cannot be reached"),
    "timeout": ("ERROR: Exception:\nReadTimeoutError: HTTPSConnectionPool: Read timed out.", DownloadError, "reached"),
    "unknown": (NO_MATCH, DownloadError, "whether pip's index .* carries it"),
    "full": ("ERROR: Could not install: [Errno 28] No space left on device", CapacityError, "disk is full"),
    "other": ("lots\nERROR: something odd\nmore", DownloadError, "something odd"),
    "silent": ("", DownloadError, "gave no reason"),
}


@pytest.mark.parametrize("output, kind, named", PIP_SAYS.values(), ids=PIP_SAYS.keys())
def test_pips_troubles_become_one_line_with_a_remedy(environment, output, kind, named):
    with pytest.raises(kind, match=named) as caught:
        pull(environment, FakePip({"tiny-base": lambda _: PipResult(1, output)}))
    assert "\n" not in str(caught.value) and "tiny-base==1.0" in str(caught.value)


def test_a_python_without_pip_is_told_how_to_get_it(environment):
    with pytest.raises(DownloadError, match="-m ensurepip"):
        pull(environment, FakePip({"tiny-base": lambda _: PipResult(1, "/usr/bin/python3: No module named pip")}))


def test_success_without_a_wheel_is_trouble_too(environment):
    with pytest.raises(DownloadError, match="tiny-base"):
        pull(environment, FakePip({"tiny-base": lambda _: PipResult(0, "")}))


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="KVANT_CACHE"):
        pull(Environment(cache=tmp_path / "file" / "cache"), FakePip())


def test_the_real_pip_is_run_and_watched(tmp_path):
    ticks = []
    result = run_pip(["--version"], tmp_path, lambda: ticks.append(1))
    assert result.returncode == 0 and result.output.startswith("pip ")
    assert run_pip(["no-such-command"], tmp_path, lambda: None).returncode != 0


def test_an_interrupted_pip_is_ended(tmp_path, monkeypatch):
    children = []
    popen = subprocess.Popen

    def sleeping(command, **options):
        children.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return children[0]

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    with pytest.raises(KeyboardInterrupt):
        run_pip(["download"], tmp_path, stop)
    assert children[0].returncode is not None


# --- names --------------------------------------------------------------------------------------------------------------


def test_what_a_user_may_name(environment, tmp_path):
    folder, file, odd = tmp_path / "model", tmp_path / "a.gguf", tmp_path / "blob"
    folder.mkdir()
    file.touch()
    odd.write_bytes(b"GGUF....")
    (folder / "config.json").touch()
    for path in (folder, file, odd):
        assert resolve_model(str(path), environment) == path
    assert resolve_model(f"dummy:{folder}", environment) == f"dummy:{folder}"
    assert resolve_model(f"dummy:{folder}/config.json", environment) == f"dummy:{folder}/config.json"


def test_an_alias_is_fetched_only_when_that_is_allowed(environment, monkeypatch):
    with pytest.raises(ModelNotFoundError, match="kvant pull tiny"):
        resolve_model("tiny", environment, allow_download=False)
    monkeypatch.setattr(store, "pull_model", lambda *_, **__: Path("fetched"))
    assert resolve_model("tiny", environment) == Path("fetched")


@pytest.mark.parametrize(
    "name, named",
    [
        ("tiney", "did you mean tiny"),
        ("TINY", "did you mean tiny"),
        ("something else", "known models are tiny"),
        ("org/model/more", "known models are tiny"),
        ("missing.gguf", "no file or folder missing.gguf"),
        ("./missing", "no file or folder ./missing"),
        ("dummy:/missing/config.json", "no file /missing/config.json"),
        ("", "known models are tiny"),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(environment, name, named):
    with pytest.raises(ModelNotFoundError, match=named):
        resolve_model(name, environment)


def test_a_file_of_another_kind_is_refused(environment, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedError, match="no GGUF file"):
        resolve_model(str(tmp_path / "model.bin"), environment)


def test_list_and_remove(environment):
    assert [(m.alias, m.path) for m in list_models(environment)] == [("tiny", None)]
    with pytest.raises(ModelNotFoundError, match="nothing to remove"):
        remove_model("tiny", environment)
    path = pull(environment, FakePip())
    assert list_models(environment)[0].path == path
    assert remove_model("tiny", environment) == len(CONTENT) + len(b"the terms")
    assert list_models(environment)[0].path is None and not path.parent.exists()
    with pytest.raises(ModelNotFoundError, match="known models"):
        remove_model("other", environment)


# --- the real catalogue -------------------------------------------------------------------------------------------------


def test_the_store_needs_neither_numpy_nor_torch():
    script = "import sys, kvant.checkpoint.store; print(sorted({'numpy', 'torch', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.model
def test_the_real_models_have_the_hashes_of_the_catalogue():
    for model in catalogue._MODELS:
        path = read_environment().models / model.alias / model.file_name
        with open(path, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
        for package in model.packages:
            assert all((path.parent / Path(document).name).is_file() for document in package.documents)
