"""Kept arrays: they come back as they were, or not at all and with one notice, whatever happens to folder and file."""

import multiprocessing
import os
import shutil
import time

import numpy as np
import pytest

from kvant.checkpoint import kept
from kvant.checkpoint.kept import PAGE, TAIL, Shelf, forget, total_bytes

LIMIT = 1 << 20


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def shelf(tmp_path, model):
    """A shelf in an empty folder; `notices` is what it said."""
    return make(tmp_path, model)


def make(tmp_path, model, limit=LIMIT):
    notices = []
    made = Shelf(tmp_path / "packed", model, limit, notices.append)
    made.notices = notices
    return made


def parts(seed=0, sizes=(1, 64, PAGE, 3 * PAGE + 5)):
    rng = np.random.default_rng(seed)
    return [((size, number), rng.integers(0, 256, size, np.uint8)) for number, size in enumerate(sizes)]


def same(kept, expected):
    return len(kept) == len(expected) and all(
        k.about == about and np.array_equal(k.data, data) for k, (about, data) in zip(kept, expected, strict=True)
    )


def files(tmp_path):
    return sorted((tmp_path / "packed").glob("*"))


@pytest.mark.parametrize("sizes", [(1,), (64, PAGE), (1, 64, PAGE, 3 * PAGE + 5), ()])
def test_what_was_kept_comes_back(shelf, tmp_path, sizes):
    assert shelf.read("key") is None
    assert shelf.write("key", 100, parts(sizes=sizes))
    found = shelf.read("key")
    assert same(found, parts(sizes=sizes)) and not shelf.notices
    assert all(k.data.ctypes.data % 64 == 0 and not k.data.flags.writeable for k in found if k.data.size)
    assert total_bytes(tmp_path / "packed") == sum(path.stat().st_size for path in files(tmp_path)) > 0


def test_another_key_or_a_changed_file_is_another_entry(shelf, tmp_path, model):
    shelf.write("key", 100, parts())
    assert shelf.read("other") is None
    before = model.stat()
    model.write_bytes(b"WEIGHTS")  # the same size, and the time set back
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = make(tmp_path, model)
    assert changed.read("key") is None and not changed.notices
    changed.write("key", 100, parts(1))
    assert len(files(tmp_path)) == 1  # what was kept of the file before is gone
    assert same(changed.read("key"), parts(1))


def test_a_folder_is_all_its_weights_and_its_config(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(b"x")
    make(tmp_path, folder).write("key", 100, parts())
    (folder / "README.md").write_bytes(b"x")
    assert make(tmp_path, folder).read("key") is not None
    for name in ("config.json", "b.safetensors"):
        (folder / name).write_bytes(b"yy")
        assert make(tmp_path, folder).read("key") is None, name
        make(tmp_path, folder).write("key", 100, parts())


def damage(kind, path):
    data = bytearray(path.read_bytes())
    size = len(data)
    if kind == "cut":
        data = data[: size // 2]
    elif kind == "empty":
        data = bytearray()
    elif kind == "no tail":
        data = data[: size - TAIL.size]
    elif kind == "longer":
        data = data[:PAGE] + bytes(PAGE) + data[PAGE:]
    elif kind == "swapped pages":
        data[:PAGE], data[2 * PAGE : 3 * PAGE] = data[2 * PAGE : 3 * PAGE], data[:PAGE]
    elif kind == "zeros":  # what a file system may leave of data that never reached the disk
        data[3 * PAGE : 4 * PAGE] = bytes(PAGE)
    elif kind == "magic":
        data[size - TAIL.size] ^= 1
    elif kind == "index":
        data[size - TAIL.size - 5] ^= 1
    else:
        data[int(kind)] ^= 0x40
    path.write_bytes(data)


KINDS = ["cut", "empty", "no tail", "longer", "swapped pages", "zeros", "magic", "index", "0", "70", str(5 * PAGE + 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_one_notice_and_made_anew(shelf, tmp_path, kind):
    shelf.write("key", 100, parts())
    (path,) = files(tmp_path)
    damage(kind, path)
    assert shelf.read("key") is None
    assert len(shelf.notices) == 1 and "are of no use" in shelf.notices[0] and "packed anew" in shelf.notices[0]
    assert not path.exists()
    assert shelf.write("key", 100, parts()) and same(shelf.read("key"), parts())
    assert len(shelf.notices) == 1


def test_a_folder_that_cannot_be_written_is_one_notice(tmp_path, model):
    (tmp_path / "packed").write_bytes(b"a file where the folder should be")
    shelf = make(tmp_path, model)
    assert not shelf.write("key", 100, parts())
    assert len(shelf.notices) == 1 and "cannot be kept" in shelf.notices[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_read_and_not_written(shelf, tmp_path):
    shelf.write("key", 100, parts())
    (tmp_path / "packed").chmod(0o500)
    assert same(shelf.read("key"), parts()) and not shelf.notices
    assert not shelf.write("other", 100, parts()) and len(shelf.notices) == 1


def test_a_full_disk_leaves_nothing_half_written(shelf, tmp_path, monkeypatch):
    def broken():
        yield parts()[0]
        raise OSError(28, "No space left on device")

    assert not shelf.write("key", 100, broken())
    assert "No space left on device" in shelf.notices[0] and files(tmp_path) == []
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 50, 150))
    assert not shelf.write("key", 100, parts())
    assert "nearly full" in shelf.notices[1] and files(tmp_path) == []


def test_an_error_of_the_maker_passes_and_leaves_nothing(shelf, tmp_path):
    def broken():
        yield parts()[0]
        raise KeyError("no kernel")

    with pytest.raises(KeyError):
        shelf.write("key", 100, broken())
    assert files(tmp_path) == [] and not shelf.notices


def test_the_limit_holds_and_the_longest_unused_goes_first(tmp_path):
    models = []
    for number in range(3):
        models.append(tmp_path / f"model{number}.gguf")
        models[-1].write_bytes(b"x")
        shelf = make(tmp_path, models[-1], limit=6 * PAGE)
        assert shelf.write("key", 2 * PAGE, parts(sizes=(2 * PAGE,)))
        os.utime(shelf._path("key"), (number, number))  # made one after the other
        if number == 1:
            make(tmp_path, models[0]).read("key")  # used now
    kept_now = [make(tmp_path, path).read("key") is not None for path in models]
    assert kept_now == [True, False, True]
    big = make(tmp_path, models[0], limit=10)
    assert not big.write("other", 11, parts()) and not big.notices  # larger than all that may be kept: not even tried


def test_what_is_half_written_goes_when_nobody_can_be_writing_it(shelf, tmp_path):
    (tmp_path / "packed").mkdir()
    old, new = tmp_path / "packed" / "a.part", tmp_path / "packed" / "b.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, time.time() - kept.ABANDONED - 10))
    shelf.write("key", 100, parts())
    assert not old.exists() and new.exists()


def test_a_model_that_is_gone_is_forgotten(tmp_path, model):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"x")
    for path in (model, other):
        make(tmp_path, path).write("key", 100, parts())
    total = total_bytes(tmp_path / "packed")
    assert forget(tmp_path / "packed") == 0
    model.unlink()
    assert forget(tmp_path / "packed") == total // 2
    assert make(tmp_path, other).read("key") is not None
    assert forget(tmp_path / "nowhere") == total_bytes(tmp_path / "nowhere") == 0


def work(folder, model, seed):
    notices = []
    shelf = Shelf(folder, model, LIMIT, notices.append)
    for _ in range(20):
        assert shelf.write("key", 100, parts(seed))
        found = shelf.read("key")
        assert found is None or same(found, parts(0)) or same(found, parts(1))
    assert not notices, notices


def test_two_processes_at_once_see_whole_files_only(tmp_path, model):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(tmp_path / "packed", model, seed)) for seed in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(files(tmp_path)) == 1
