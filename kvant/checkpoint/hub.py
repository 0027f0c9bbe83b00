"""Models of the Hugging Face Hub: `org/name`, `org/name@REVISION`, `org/name:FILE.gguf`.

    <cache>/hub/<org>--<name>/<commit>/...      the files of one commit, each complete and checked under its own name
    <cache>/hub/<org>--<name>/<commit>/*.partial   what goes on where it stopped
    <cache>/hub/<model>.json                    the pin: which commit and files `<model>` means on this machine

A pin is written last. From then on the model is found without network, library or surprise: what it names does not change
until somebody pulls it again. Only safetensors, GGUF and the texts beside them are ever fetched; nothing of them is run.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from kvant.checkpoint.download import SPARE_BYTES, Progress
from kvant.checkpoint.hub_client import HubClient, RemoteFile, Repository, is_intact
from kvant.checkpoint.lock import make_folder, only_one
from kvant.config.environment import Environment
from kvant.config.kv_memory import show_bytes
from kvant.errors import CapacityError, DownloadError, ModelNotFoundError, UnsupportedError

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>.+\.gguf))?")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Beside the weights: what a tokenizer and a chat template may need, and the papers.
_TEXTS = re.compile(r"(config|generation_config|preprocessor_config)\.json|.*token.*\.json|vocab\.json|merges\.txt"
                    r"|.*\.jinja|chat_template\.json|.*\.safetensors\.index\.json|(LICENSE|NOTICE|USE_POLICY).*")  # fmt: skip
_SHOWN = 8  # names in an error


class HubModel(NamedTuple):
    """A model's name, taken apart. Without `file` it is the repository's safetensors."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @property
    def name(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{at}" + (f":{self.file}" if self.file else "")


class Pin(NamedTuple):
    """What a name means on this machine."""

    model: HubModel
    commit: str
    files: dict[str, int]  # name: bytes
    folder: Path

    @property
    def path(self) -> Path:
        """What `open_checkpoint` opens."""
        return self.folder / self.model.file if self.model.file else self.folder

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def is_whole(self) -> bool:
        return all(_size(self.folder / name) == size for name, size in self.files.items())


def parse(name: str) -> HubModel | None:
    """The Hub's model that `name` may mean, or None where it cannot be one. Paths go before; nothing is looked up."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name or name.endswith((".json", ".safetensors")):
        return None
    return HubModel(match["repo"], match["revision"], match["file"])


def find(model: HubModel, environment: Environment) -> Pin | None:
    """The pin of `model`, if all its files are here. Touches no network."""
    pin = _read_pin(_pin_path(model, environment), environment)
    return pin if pin is not None and pin.is_whole else None


def pins(environment: Environment) -> list[Pin]:
    """Every model of the Hub that is here."""
    read = (_read_pin(path, environment) for path in sorted(_home(environment).glob("*.json")))
    return [pin for pin in read if pin is not None and pin.is_whole]


def pull(model: HubModel, environment: Environment, progress: Progress, client: HubClient | None = None) -> Pin:
    """Fetches what `model` names now and pins it. What is here already, or half here, is not fetched again.

    Raises `ModelNotFoundError`, `UnsupportedError`, `DownloadError`, `CapacityError`, each with the remedy.
    """
    if environment.offline:
        raise DownloadError(
            f"there is no file or folder {model.name}, the store does not have it, and KVANT_OFFLINE is set;"
            f" unset it and run: kvant pull {model.name}"
        )
    client = client or HubClient()
    progress(0, 1, f"asking the Hub for {model.repo}")
    repository = client.repository(model.repo, model.revision)
    sizes = {name: repository.files[name].num_bytes for name in choose(model, repository.files)}
    pin = Pin(model, repository.commit, sizes, _folder(model, repository.commit, environment))
    make_folder(pin.folder)
    with only_one(_pin_path(model, environment).with_suffix(".lock"), lambda: progress(0, 1, f"waiting for {model.name}")):
        before = find(model, environment)
        _fetch_all(pin, repository, before, progress, client)
        _write_pin(pin, environment)
        if before is not None and before.commit != pin.commit:
            _sweep(model, environment)
    return pin


def choose(model: HubModel, files: Iterable[str]) -> list[str]:
    """The files of a repository that `model` needs."""
    names = sorted(files)
    ggufs = [name for name in names if name.endswith(".gguf")]
    top = [name for name in names if not re.search(r"[/\\:]", name)]
    if model.file is not None:
        if model.file not in ggufs:
            raise ModelNotFoundError(f"{model.repo} has no file {model.file}; {_listed(model, ggufs)}")
        if _SHARD.search(model.file):
            raise UnsupportedError(
                f"{model.file} is a part of a split GGUF, which is not built here; take one in a single file"
            )
        return [model.file, *(name for name in top if re.match("LICENSE|NOTICE", name))]
    # consolidated.safetensors is the same weights a second time, under the names of another program.
    weights = [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if not weights and ggufs:
        raise ModelNotFoundError(f"{model.repo} holds GGUF files, of which one must be named; {_listed(model, ggufs)}")
    if not weights and any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        raise UnsupportedError(
            f"{model.repo} has only pickled weights, which can run code when they are read; take a repository with safetensors"
        )
    if not weights or "config.json" not in top:
        raise UnsupportedError(f"{model.repo} is no model in Hugging Face layout: it lacks config.json or safetensors")
    return weights + [name for name in top if _TEXTS.fullmatch(name)]


def remove(model: HubModel, environment: Environment) -> int:
    """Deletes `model`, except for files that another pin needs; returns the bytes that became free."""
    path = _pin_path(model, environment)
    folders = _home(environment) / _folder_name(model)
    if not path.exists() and not folders.exists():
        raise ModelNotFoundError(f"{model.name} is not in the store; there is nothing to remove")
    path.unlink(missing_ok=True)
    path.with_suffix(".lock").unlink(missing_ok=True)
    return _sweep(model, environment)


def _sweep(model: HubModel, environment: Environment) -> int:
    """Deletes what no pin needs of the repository; returns the bytes that became free."""
    home = _home(environment) / _folder_name(model)
    kept = {pin.folder / name for pin in pins(environment) for name in pin.files}
    freed = 0
    for file in [file for file in home.rglob("*") if file.is_file() and file not in kept]:
        size = file.stat().st_size
        with suppress(OSError):  # where a file that somebody reads cannot be deleted, the next sweep does it
            file.unlink()
            freed += size
    for folder in sorted((folder for folder in (home, *home.rglob("*")) if folder.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    return freed


# --- fetching -----------------------------------------------------------------------------------------------------------


def _fetch_all(pin: Pin, repository: Repository, before: Pin | None, progress: Progress, client: HubClient) -> None:
    missing = [name for name, size in pin.files.items() if _size(pin.folder / name) != size]
    _check_disk(pin, sum(pin.files[name] - _size(_partial(pin.folder / name)) for name in missing))
    done = pin.num_bytes - sum(pin.files[name] for name in missing)
    label = f"downloading {pin.model.name}"
    for name in missing:
        size, target = pin.files[name], pin.folder / name

        def tick(arrived: int, done: int = done, size: int = size) -> None:
            progress(done + min(arrived, size), pin.num_bytes, label)

        tick(_size(_partial(target)))
        # The commit before this one may have the same file, and so may the cache that other programs share.
        elsewhere = (before and before.folder / name, client.cached(pin.model.repo, pin.commit, name))
        if not any(place is not None and _take_over(place, target, repository.files[name]) for place in elsewhere):
            _fetch(pin.model, repository, name, target, tick=tick, client=client)
        done += size
        progress(done, pin.num_bytes, label)


def _fetch(model: HubModel, repository: Repository, name: str, target: Path, *, tick: Any, client: HubClient) -> None:
    partial = _partial(target)
    client.fetch(model.repo, repository.commit, name, partial, tick)
    if not is_intact(partial, repository.files[name]):
        partial.unlink()
        raise DownloadError(
            f"{name} of {model.repo} arrived damaged and was thrown away; fetch it again: kvant pull {model.name}"
        )
    os.replace(partial, target)


def _take_over(cached: Path, target: Path, file: RemoteFile) -> bool:
    """Links, or else copies, a file that another program fetched. False where it is not the same."""
    if not cached.is_file() or not is_intact(cached, file):
        return False
    partial = _partial(target)
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    try:
        os.link(cached, partial)
    except OSError:  # another disk, or one without links
        shutil.copyfile(cached, partial)
    os.replace(partial, target)
    return True


def _check_disk(pin: Pin, needed: int) -> None:
    free = shutil.disk_usage(pin.folder).free
    if needed and free < needed + SPARE_BYTES:
        raise CapacityError(
            f"{pin.model.name} needs {show_bytes(needed + SPARE_BYTES)} of disk, {pin.folder} has {show_bytes(free)} free; "
            "make room, or set KVANT_CACHE to a folder on a larger disk"
        )


def _listed(model: HubModel, ggufs: list[str]) -> str:
    if not ggufs:
        return "it holds no GGUF file at all"
    close = difflib.get_close_matches(model.file or "", ggufs, n=1, cutoff=0.5)
    shown = ", ".join(f"{model.repo}:{name}" for name in (close or ggufs[:_SHOWN]))
    more = f" and {len(ggufs) - _SHOWN} more" if not close and len(ggufs) > _SHOWN else ""
    return f"did you mean {shown}?" if close else f"there are {shown}{more}"


# --- places and pins ----------------------------------------------------------------------------------------------------


def _home(environment: Environment) -> Path:
    return environment.cache / "hub"


def _folder_name(model: HubModel) -> str:
    return model.repo.replace("/", "--")


def _folder(model: HubModel, commit: str, environment: Environment) -> Path:
    return _home(environment) / _folder_name(model) / commit


def _pin_path(model: HubModel, environment: Environment) -> Path:
    """File names may hold neither ":" nor "/" on every system: both are escaped as in addresses."""
    return _home(environment) / f"{quote(model.name, safe='@ ')}.json"


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _write_pin(pin: Pin, environment: Environment) -> None:
    path = _pin_path(pin.model, environment)
    text = json.dumps({"model": pin.model.name, "commit": pin.commit, "files": pin.files}, indent=1)
    _partial(path).write_text(text, encoding="utf-8")
    os.replace(_partial(path), path)


def _read_pin(path: Path, environment: Environment) -> Pin | None:
    """None for what is missing or damaged: the next pull writes it anew."""
    try:
        pin = json.loads(path.read_text(encoding="utf-8"))
        model = parse(pin["model"])
        files = {str(name): int(size) for name, size in pin["files"].items()}
        commit = str(pin["commit"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if model is None or not files else Pin(model, commit, files, _folder(model, commit, environment))
