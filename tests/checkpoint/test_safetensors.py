"""The safetensors reader, against the public writer, and against files that lie."""

import json
import random
import resource
import struct
import time
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvant.checkpoint.safetensors import INDEX, read_folder, read_safetensors
from kvant.errors import CheckpointError, ModelError, UnsupportedError
from kvant.quantization.gguf import dequantize
from tests.checkpoint.files import safetensors_bytes, write_json
from tests.checkpoint.test_gguf import mutate

RNG = np.random.default_rng(0)
ARRAYS = {
    "model.a": RNG.standard_normal((4, 6)).astype(np.float32),
    "model.b": RNG.standard_normal(5).astype(np.float16),
    "model.c": RNG.standard_normal((2, 3, 4)).astype(np.float64),
    "scalar": np.array(2.5, np.float32),
    "counts": np.arange(3),
    "nothing": np.zeros((0, 4), np.float32),
}


def tensor(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_equals_what_the_public_library_wrote(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path, metadata={"format": "pt"})
    tensors = read_safetensors(path)
    assert tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert tensors[name].shape == array.shape and tensors[name].raw.tobytes() == array.tobytes()
        assert not tensors[name].raw.flags.writeable and not tensors[name].raw.flags.owndata
    np.testing.assert_array_equal(dequantize(tensors["model.a"]), ARRAYS["model.a"])
    assert dequantize(tensors["scalar"]).shape == ()


def test_bfloat16_and_data_at_odd_bytes(tmp_path):
    """Other writers do not pad their header."""
    values = np.array([1.5, -2.0, 0.125], np.float32)
    header = json.dumps({"t": tensor(0, 6, [3], "BF16")}).encode()
    header += b" " * (1 - len(header) % 2)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(safetensors_bytes(header, (values.view(np.uint32) >> 16).astype("<u2").tobytes()))
    assert (8 + len(header)) % 2 == 1
    np.testing.assert_array_equal(dequantize(read_safetensors(path)["t"]), values)


GOOD = safetensors_bytes({"a": tensor(0, 16, [2, 2]), "b": tensor(16, 24, [4], "F16")}, bytes(24))
MALFORMED = {
    "empty": ("is empty", b""),
    "no length": ("header", b"\1\2\3"),
    "header beyond the end": ("header of", struct.pack("<Q", 2**40) + GOOD[8:]),
    "header length wraps": ("header of", struct.pack("<Q", 2**64 - 1) + GOOD[8:]),
    "header cut": ("not valid JSON", struct.pack("<Q", 20) + GOOD[8:]),
    "not UTF-8": ("not valid JSON", safetensors_bytes(b'{"\xff": 1}', b"")),
    "a list": ("but no object", safetensors_bytes(b"[]", b"")),
    "deep nesting": ("not valid JSON", safetensors_bytes(b"[" * 200_000, b"")),
    "long number": ("not valid JSON", safetensors_bytes(b'{"a": ' + b"9" * 10_000 + b"}", b"")),
    "name twice": ("occurs twice", safetensors_bytes(b'{"a": {}, "a": {}}', b"")),
    "no description": ("exactly dtype", safetensors_bytes({"a": 3}, b"")),
    "missing key": ("exactly dtype", safetensors_bytes({"a": {"dtype": "F32", "shape": [1]}}, bytes(4))),
    "unknown dtype": ("unknown dtype 'F33'", safetensors_bytes({"a": tensor(0, 4, [1], "F33")}, bytes(4))),
    "block format as dtype": ("unknown dtype 'Q8_0'", safetensors_bytes({"a": tensor(0, 34, [32], "Q8_0")}, bytes(34))),
    "dtype as number": ("unknown dtype", safetensors_bytes({"a": {**tensor(0, 4, [1]), "dtype": 3}}, bytes(4))),
    "negative dimension": ("impossible shape", safetensors_bytes({"a": tensor(0, 4, [-1])}, bytes(4))),
    "dimension as text": ("impossible shape", safetensors_bytes({"a": tensor(0, 4, ["1"])}, bytes(4))),
    "dimension as truth": ("impossible shape", safetensors_bytes({"a": tensor(0, 4, [True])}, bytes(4))),
    "huge dimensions": ("impossible shape", safetensors_bytes({"a": tensor(0, 0, [2**63, 0])}, b"")),
    "too many dimensions": ("impossible shape", safetensors_bytes({"a": tensor(0, 4, [1] * 70)}, bytes(4))),
    "product that wraps": ("takes 4 bytes", safetensors_bytes({"a": tensor(0, 4, [2**33, 2**33])}, bytes(4))),
    "span too short": ("takes 4 bytes", safetensors_bytes({"a": tensor(0, 4, [2])}, bytes(4))),
    "span backwards": ("impossible offsets", safetensors_bytes({"a": tensor(4, 0, [1])}, bytes(4))),
    "three offsets": (
        "impossible offsets",
        safetensors_bytes({"a": {**tensor(0, 4, [1]), "data_offsets": [0, 4, 8]}}, bytes(4)),
    ),
    "hole": ("leaves a hole", safetensors_bytes({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12))),
    "hole at the start": ("leaves a hole", safetensors_bytes({"a": tensor(4, 8, [1])}, bytes(8))),
    "overlap": ("overlaps", safetensors_bytes({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12))),
    "same span": ("overlaps", safetensors_bytes({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, bytes(8))),
    "data cut": ("fetch it again", GOOD[:-1]),
    "data left over": ("fetch it again", GOOD + b"\0"),
    "long name": ("characters long", safetensors_bytes({"n" * 5000: tensor(0, 4, [1])}, bytes(4))),
}


@pytest.mark.parametrize("reason, data", MALFORMED.values(), ids=MALFORMED.keys())
def test_R38_inconsistent_headers_are_refused_before_data_is_read(tmp_path, reason, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert reason in message and "\n" not in message and len(message) < 400
    assert time.perf_counter() - start < 0.5


def test_R38_a_lying_length_costs_no_memory(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 1 << 29))
        file.truncate(1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="header of"):
            read_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_R38_a_known_dtype_that_is_not_built_here_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": tensor(0, 4, [4], "F8_E4M3")}, bytes(4)))
    with pytest.raises(UnsupportedError, match=r"'a' is stored as F8_E4M3.*BF16"):
        read_safetensors(path)


def test_R38_mutations_end_in_an_error_of_ours_or_in_a_valid_file(tmp_path):
    good = safetensors_bytes({"a": tensor(0, 400, [10, 10]), "b": tensor(400, 408, [4], "F16")}, bytes(408))
    rng, outcomes = random.Random(38), {True: 0, False: 0}
    path = tmp_path / "model.safetensors"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(400):
        path.write_bytes(mutate(good, rng))
        try:
            tensors = read_safetensors(path)
        except ModelError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert sum(t.num_bytes for t in tensors.values()) == 408
    assert outcomes[False] > 200 and outcomes[True] > 20, outcomes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


# --- folders ------------------------------------------------------------------------------------------------------------


def sharded(folder):
    save_file({"a": np.ones(2, np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.full(3, 2, np.float32)}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    return write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def test_shards_are_joined(tmp_path):
    sharded(tmp_path)
    assert {name: dequantize(t).tolist() for name, t in read_folder(tmp_path).items()} == {"a": [1, 1], "b": [2, 2, 2]}


def test_a_single_file_needs_no_index(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "weights.safetensors")
    assert read_folder(tmp_path).keys() == {"a"}
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"3 safetensors files but no {INDEX}"):
        read_folder(tmp_path)


def test_R39_a_missing_shard_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
        read_folder(tmp_path)


def test_R39_a_tensor_that_no_shard_holds_is_named(tmp_path):
    index = json.loads(sharded(tmp_path).read_text())
    index["weight_map"]["model.lost"] = "model-00001-of-00002.safetensors"
    write_json(tmp_path / INDEX, index)
    with pytest.raises(CheckpointError, match=r"holds model\.lost"):
        read_folder(tmp_path)


def test_R39_a_tensor_in_two_shards_is_named(tmp_path):
    sharded(tmp_path)
    save_file({"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="a also occurs in another shard"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "weights.bin", 3, None, "..", ""]
)
def test_R38_an_index_cannot_reach_out_of_its_folder(tmp_path, file):
    write_json(tmp_path / INDEX, {"weight_map": {"a": file}})
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        read_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"a": NaN'])
def test_R38_a_broken_index(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="index"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "w.pkl"])
def test_R40_pickles_are_refused_and_never_opened(tmp_path, name):
    marker = tmp_path / "executed"
    (tmp_path / name).write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    with pytest.raises(UnsupportedError, match=rf"pickle \({name}\).*convert them to safetensors"):
        read_folder(tmp_path)
    assert not marker.exists()


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        read_folder(tmp_path)
