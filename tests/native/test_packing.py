"""Packing with a shelf: the same bytes and the same results as without, from the file where there is one."""

from dataclasses import replace

import numpy as np
import pytest

from kvant import LLM, SamplingParams
from kvant.checkpoint.kept import Shelf
from kvant.errors import UnsupportedError
from kvant.native import packing
from tests.native.small import BLOCK_FORMATS, PLAIN_FORMATS, random_weight
from tests.tiny_folder import write_folder


@pytest.fixture
def shelf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"x")
    notices = []
    made = Shelf(tmp_path / "packed", tmp_path / "model.gguf", 1 << 30, notices.append)
    yield made
    assert not notices


def weights():
    rng = np.random.default_rng(3)
    return [random_weight(format, rows, 256, rng) for format in (*BLOCK_FORMATS, *PLAIN_FORMATS) for rows in (16, 37)]


def same(some, others):
    return all(
        (a.rows, a.columns, a.packing) == (b.rows, b.columns, b.packing) and np.array_equal(a.data, b.data)
        for a, b in zip(some, others, strict=True)
    )


def test_from_the_file_come_the_same_bytes(library, shelf, monkeypatch):
    expected = packing.pack(library, weights(), 2)
    monkeypatch.setattr(packing, "PIECE_BYTES", 20_000)  # several pieces
    assert same(packing.packed(library, weights(), 2, shelf), expected)
    monkeypatch.setattr(packing, "pack", None)  # from here on it may not pack
    again = packing.packed(library, weights(), 2, shelf)
    assert same(again, expected) and all(weight.data.ctypes.data % packing.CACHE_LINE == 0 for weight in again)


def test_another_build_or_other_weights_are_packed_anew(native, shelf):
    first = weights()[:4]
    packing.packed(native, first, 1, shelf)
    moved = replace(native, path=native.path.with_name("another-cpu.so"))
    for library, some in ((moved, first), (native, first[:2]), (native, [replace(first[0], name="x"), *first[1:]])):
        assert shelf.read(packing._key(library, some)) is None
        assert same(packing.packed(library, some, 1, shelf), packing.pack(native, some, 1))
        assert shelf.read(packing._key(library, some)) is not None


def test_a_shelf_that_keeps_nothing_is_no_obstacle(native, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"x")
    notices = []
    shelf = Shelf(tmp_path / "model.gguf", tmp_path / "model.gguf", 1 << 30, notices.append)  # a file is no folder
    assert same(packing.packed(native, weights(), 1, shelf), packing.pack(native, weights(), 1))
    assert len(notices) == 2 and all("no use" in notice or "cannot be kept" in notice for notice in notices)


def test_a_format_without_a_kernel_is_refused_and_leaves_no_file(native, shelf, tmp_path):
    wrong = replace(weights()[0], format="Q8_1", name="blk.0.weight")
    with pytest.raises(UnsupportedError, match=r"blk\.0\.weight: format Q8_1 has no kernel"):
        packing.packed(native, [*weights()[:2], wrong], 1, shelf)
    assert list((tmp_path / "packed").iterdir()) == []


def test_a_model_answers_alike_from_memory_and_from_the_file(tmp_path, monkeypatch, native):
    (tmp_path / "model").mkdir()
    folder = str(write_folder(tmp_path / "model"))
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=3)

    def answer(limit):
        monkeypatch.setenv("KVANT_PACKED_GIB", limit)
        llm = LLM(folder, kv_cache_memory_bytes=4 << 20, threads=1)
        assert not any("packed" in notice for notice in llm.notices)
        return llm.generate("hello", greedy)[0].outputs[0]

    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    without = answer("0")
    assert not (tmp_path / "cache" / "packed").exists()
    assert answer("1") == without
    (file,) = (tmp_path / "cache" / "packed").iterdir()
    written = file.stat().st_ino
    assert answer("1") == without and file.stat().st_ino == written
