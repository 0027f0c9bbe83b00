"""The GGUF reader: what is there is found, and nothing that is wrong costs time, memory or a traceback."""

import random
import resource
import struct
import time
import tracemalloc

import numpy as np
import pytest

from kvant.checkpoint.gguf import read_gguf
from kvant.checkpoint.store import find_model
from kvant.errors import CheckpointError, ModelError, UnsupportedError
from tests.checkpoint.files import TYPE_IDS, Tensor, Typed, entry, f32_tensor, gguf_bytes, string, u32

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.rope.freq_base": 1e4,
    "flag": True,
    "big": Typed(10, 2**63 + 1),
    "small": Typed(1, -5),
    "precise": Typed(12, 0.1),
    "tokenizer.ggml.tokens": ["a", "", "ž😀", "x" * 300],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.token_type": Typed(5, [1, -3], array=True),
    "none": Typed(8, [], array=True),
}
MATRIX = np.arange(64, dtype=np.float32).reshape(2, 32)
TENSORS = [
    f32_tensor("matrix", MATRIX),
    f32_tensor("vector", np.array([1.5, -2.5, 3.5], np.float32)),
    Tensor("cube", (2, 3, 4), TYPE_IDS["F16"], np.arange(24, dtype=np.float16).tobytes()),
    Tensor("packed", (3, 64), TYPE_IDS["Q8_0"], bytes(range(204))),
]
GOOD = gguf_bytes(METADATA, TENSORS)


def read(tmp_path, data: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_comes_back(tmp_path, version):
    expected = {key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()}
    assert read(tmp_path, gguf_bytes(METADATA, TENSORS, version)).metadata == expected


@pytest.mark.parametrize("alignment", [None, 8, 32, 64, 4096])
def test_tensors_are_views_in_row_major_order(tmp_path, alignment):
    metadata = METADATA if alignment is None else {**METADATA, "general.alignment": alignment}
    file = read(tmp_path, gguf_bytes(metadata, TENSORS, alignment=alignment or 32))
    assert {name: (t.format, t.shape, t.raw.shape) for name, t in file.tensors.items()} == {
        "matrix": ("F32", (2, 32), (2, 128)),
        "vector": ("F32", (3,), (1, 12)),
        "cube": ("F16", (2, 3, 4), (6, 8)),
        "packed": ("Q8_0", (3, 64), (3, 68)),
    }
    np.testing.assert_array_equal(file.tensors["matrix"].raw.view(np.float32), MATRIX)
    assert file.tensors["packed"].raw.tobytes() == bytes(range(204))
    assert not file.tensors["matrix"].raw.flags.writeable and not file.tensors["matrix"].raw.flags.owndata


def test_equals_the_public_reader(tmp_path):
    """A file written by the gguf package."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(7)
    writer.add_token_list(["one", "two", "tři"])
    writer.add_token_scores([1.0, 2.0, 3.0])
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer.add_tensor("plain", values)
    writer.add_tensor("packed", gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.metadata["tokenizer.ggml.tokens"] == ["one", "two", "tři"]
    assert file.metadata["llama.block_count"] == 7
    for theirs in gguf.GGUFReader(path).tensors:
        ours = file.tensors[theirs.name]
        assert ours.format == theirs.tensor_type.name and ours.shape == tuple(int(n) for n in theirs.shape[::-1])
        assert ours.raw.tobytes() == theirs.data.tobytes()


@pytest.mark.model
@pytest.mark.parametrize("alias, tensors, tokens", [("smollm2-135m", 272, 49152), ("gemma3-270m", 236, 262144)])
def test_real_files_open_at_once(alias, tensors, tokens):
    """0.03 and 0.1 s when nothing else runs; the public reader takes 4 and 15."""
    path = find_model(alias)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        file = read_gguf(path)
        times.append(time.perf_counter() - start)
    assert len(file.tensors) == tensors and len(file.metadata["tokenizer.ggml.tokens"]) == tokens
    assert min(times) < 1.0


# --- what is wrong ------------------------------------------------------------------------------------------------------

HUGE = 2**64 - 1
INFO_OF_MATRIX = string("matrix") + struct.pack("<IQQIQ", 2, 32, 2, 0, 0)


def changed(old: bytes, new: bytes) -> bytes:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def one_tensor(shape: tuple[int, ...], type_id: int = 0, offset: int = 0, data: bytes = bytes(256)) -> bytes:
    """A file with one tensor whose entry may contradict its data; `shape` in the file's own order."""
    info = string("t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    return head + b"\0" * (-len(head) % 32) + data


MALFORMED = {
    "empty": ("is empty", b""),
    "other magic": ("letters GGUF", b"GGML" + GOOD[4:]),
    "only magic": ("ends inside its header", b"GGUF"),
    "tensor count": ("claims 18446744073709551615 tensors", GOOD[:8] + struct.pack("<Q", HUGE) + GOOD[16:]),
    "tensor count that fits the file": ("tensors", GOOD[:8] + struct.pack("<Q", len(GOOD) // 40) + GOOD[16:]),
    "key count": ("metadata keys", GOOD[:16] + struct.pack("<Q", HUGE) + GOOD[24:]),
    "no keys at all": ("dimensions", GOOD[:16] + struct.pack("<Q", 0) + GOOD[24:]),
    "key length": ("name is", GOOD[:24] + struct.pack("<Q", HUGE) + GOOD[32:]),
    "string length": ("bytes of text", changed(string("llama"), struct.pack("<Q", 2**62) + b"llama")),
    "string over the end": ("bytes of text", changed(string("llama"), struct.pack("<Q", len(GOOD)) + b"llama")),
    "string array count": ("entries", changed(struct.pack("<IIQ", 9, 8, 4), struct.pack("<IIQ", 9, 8, HUGE))),
    "number array count": ("entries", changed(struct.pack("<IIQ", 9, 6, 2), struct.pack("<IIQ", 9, 6, 2**40))),
    "length inside an array": ("beyond its end", changed(string("ž😀"), struct.pack("<Q", 2**50) + "ž😀".encode())),
    "nested array": ("nested type 9", changed(struct.pack("<IIQ", 9, 6, 2), struct.pack("<IIQ", 9, 9, 2))),
    "unknown value type": (
        "value type 13",
        changed(entry("llama.block_count", 3), string("llama.block_count") + struct.pack("<II", 13, 3)),
    ),
    "key twice": ("'k' occurs twice", b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry("k", 1) * 2),
    "bad utf-8": ("UTF-8", changed("ž😀".encode(), b"\xff" * 6)),
    "no dimensions": ("0 dimensions", changed(INFO_OF_MATRIX, string("matrix") + struct.pack("<IIQ", 0, 0, 0))),
    "too many dimensions": ("5 dimensions", one_tensor((1, 1, 1, 1, 1))),
    "dimension count": (
        "2147483648 dimensions",
        changed(INFO_OF_MATRIX, INFO_OF_MATRIX.replace(struct.pack("<I", 2), struct.pack("<I", 2**31), 1)),
    ),
    "dimension of 0": ("dimension of 0", one_tensor((0,))),
    "sizes whose product wraps to 64": ("ends at byte", one_tensor((2**32, 2**32, 64))),
    "tensor beyond the end": ("ends at byte 324 of 320", one_tensor((65,))),
    "offset beyond the end": ("ends at byte", one_tensor((1,), offset=2**40)),
    "offset that wraps": ("ends at byte", one_tensor((1,), offset=2**64 - 32)),
    "unaligned offset": ("unaligned", one_tensor((1,), offset=4)),
    "row of broken blocks": ("blocks of 32", one_tensor((33,), TYPE_IDS["Q8_0"])),
    "unknown tensor type": ("type 200", one_tensor((1,), 200)),
    "type that was removed": ("type 4", one_tensor((32,), 4)),
    "overlap": (
        "inside another tensor",
        gguf_bytes({}, [f32_tensor("a", np.zeros(64)), f32_tensor("b", np.zeros(8))]).replace(
            struct.pack("<QIQ", 8, 0, 256), struct.pack("<QIQ", 8, 0, 224)
        ),
    ),
    "tensor twice": ("'a' occurs twice", gguf_bytes({}, [f32_tensor("a", np.zeros(8)), f32_tensor("a", np.zeros(8))])),
    "alignment 0": ("alignment is", gguf_bytes({"general.alignment": 0}, TENSORS)),
    "alignment 12": ("alignment is", gguf_bytes({"general.alignment": 12}, TENSORS)),
    "alignment as text": ("alignment is", gguf_bytes({"general.alignment": "32"}, TENSORS)),
    "huge alignment": ("alignment is", gguf_bytes({"general.alignment": 2**31}, TENSORS)),
    "long tensor name": ("name is 5000", gguf_bytes({}, [f32_tensor("n" * 5000, np.zeros(8))])),
}


@pytest.mark.parametrize("reason, data", MALFORMED.values(), ids=MALFORMED.keys())
def test_R37_malformed_files_are_refused_quickly_and_without_memory(tmp_path, reason, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        start = time.perf_counter()
        with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
            read_gguf(path)
        elapsed, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert reason in message and "\n" not in message and len(message) < 300
    assert elapsed < 0.5 and peak < 1 << 20


def test_R37_truncations_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for length in [*range(48), *range(48, len(GOOD), 5), len(GOOD) - 1]:
        path.write_bytes(GOOD[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


def test_R37_a_large_file_of_zeros_behind_a_good_head_is_refused_quickly(tmp_path):
    """Counts that the file's size allows must not make the reader walk through all of it."""
    path = tmp_path / "model.gguf"
    for head in (
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 22, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 22),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 24),
    ):
        with open(path, "wb") as file:
            file.write(head)
            file.truncate(1 << 28)
        start = time.perf_counter()
        with pytest.raises(CheckpointError):
            read_gguf(path)
        assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("type_id, name", [(9, "Q8_1"), (15, "Q8_K"), (18, "IQ3_XXS"), (23, "IQ4_XS"), (39, "MXFP4")])
def test_R37_R43_an_unsupported_tensor_type_is_named(tmp_path, type_id, name):
    with pytest.raises(UnsupportedError, match=rf"'t' is stored as {name}.*IQ4_NL.*Q2_K.*Q6_K.*docs/models\.md"):
        read(tmp_path, one_tensor((256,), type_id))


@pytest.mark.parametrize("format", sorted(TYPE_IDS))
def test_R43_every_type_is_found_under_its_number(tmp_path, format):
    """The numbers and sizes are the gguf package's."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[format]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    tensor = read(tmp_path, one_tensor((elements,), int(kind), data=bytes(size))).tensors["t"]
    assert (tensor.format, tensor.raw.shape) == (format, (1, size))


@pytest.mark.parametrize("version, named", [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_R37_other_versions_are_named(tmp_path, version, named):
    with pytest.raises(UnsupportedError, match=named):
        read(tmp_path, GOOD[:4] + struct.pack("<I", version) + GOOD[8:])


def test_R37_a_folder_or_missing_file_is_an_error_of_ours(tmp_path):
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(CheckpointError, match="cannot read"):
            read_gguf(path)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: bytes, numbers at likely places, pieces cut out or doubled."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        kind = rng.randrange(5)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, HUGE, len(out), rng.getrandbits(64)])
            out[at : at + 8] = struct.pack("<Q", number)
        elif kind == 2:
            out[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 5, 9, 2**31, rng.getrandbits(32)]))
        elif kind == 3:
            del out[at : at + rng.randint(1, 40)]
        else:
            out[at:at] = out[at : at + rng.randint(1, 40)]
    return bytes(out)


def test_R37_mutations_end_in_an_error_of_ours_or_in_a_valid_file(tmp_path):
    rng, outcomes = random.Random(37), {True: 0, False: 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(600):
        try:
            file = read(tmp_path, mutate(GOOD, rng))
        except ModelError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        for tensor in file.tensors.values():
            assert tensor.raw.sum() >= 0  # every byte lies inside the file
    assert outcomes[True] > 20 and outcomes[False] > 200, outcomes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_alignment_is_not_confused_with_a_number_of_another_type(tmp_path):
    with pytest.raises(CheckpointError, match="alignment"):
        read(tmp_path, gguf_bytes({"general.alignment": True}, TENSORS))
    assert read(tmp_path, gguf_bytes({"general.alignment": u32(64)}, TENSORS, alignment=64)).tensors
