"""Every stored format against a scalar reference, written from the description of its blocks, bit by bit."""

import struct
import time

import numpy as np
import pytest

from kvant.checkpoint.gguf import read_gguf
from kvant.checkpoint.store import find_model
from kvant.config.formats import FORMATS, StoredTensor, row_bytes
from kvant.errors import UnsupportedError
from kvant.quantization.gguf import CHUNK_VALUES, RULES, dequantize

f32 = np.float32

# fp16 bit patterns: zero, the smallest and largest subnormal, the smallest normal, one, the largest finite, both signs.
EXTREME_SCALES = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF]
EXTREME_SCALES += [bits | 0x8000 for bits in EXTREME_SCALES]


# --- the reference: one value at a time ---------------------------------------------------------------------------------


def half(raw: bytes) -> np.float32:
    return f32(struct.unpack("<e", raw)[0])


def low_then_high(packed: bytes, j: int) -> int:
    """Value j of 32: byte j mod 16, its lower half first."""
    return packed[j] & 15 if j < 16 else packed[j - 16] >> 4


def q4_0(block: bytes) -> list:
    return [half(block[:2]) * f32(low_then_high(block[2:18], j) - 8) for j in range(32)]


def q4_1(block: bytes) -> list:
    d, m = half(block[:2]), half(block[2:4])
    return [d * f32(low_then_high(block[4:20], j)) + m for j in range(32)]


def q5_0(block: bytes) -> list:
    fifth = struct.unpack("<I", block[2:6])[0]
    return [half(block[:2]) * f32((low_then_high(block[6:22], j) | (fifth >> j & 1) << 4) - 16) for j in range(32)]


def q5_1(block: bytes) -> list:
    d, m, fifth = half(block[:2]), half(block[2:4]), struct.unpack("<I", block[4:8])[0]
    return [d * f32(low_then_high(block[8:24], j) | (fifth >> j & 1) << 4) + m for j in range(32)]


def iq4_nl(block: bytes) -> list:
    table = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    return [half(block[:2]) * f32(table[low_then_high(block[2:18], j)]) for j in range(32)]


def q2_k(block: bytes) -> list:
    scales, q, d, m = block[:16], block[16:80], half(block[80:82]), half(block[82:84])
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        quarter, column = divmod(within, 32)
        code = q[32 * part + column] >> 2 * quarter & 3
        values.append(d * f32(scales[i // 16] & 15) * f32(code) - m * f32(scales[i // 16] >> 4))
    return values


def q3_k_scale(packed: bytes, number: int) -> int:
    low = packed[number] & 15 if number < 8 else packed[number - 8] >> 4
    return (low | (packed[8 + number % 4] >> 2 * (number // 4) & 3) << 4) - 32


def q3_k(block: bytes) -> list:
    high, q, packed, d = block[:32], block[32:96], block[96:108], half(block[108:110])
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        quarter, column = divmod(within, 32)
        code = q[32 * part + column] >> 2 * quarter & 3 | (high[i % 32] >> i // 32 & 1) << 2
        values.append(d * f32(q3_k_scale(packed, i // 16)) * f32(code - 4))
    return values


def q8_0(block: bytes) -> list:
    return [half(block[:2]) * f32(q) for q in struct.unpack("<32b", block[2:34])]


def q4_k(block: bytes) -> list:
    return eighths(block[:16], block[16:144], bytes(32))


def q5_k(block: bytes) -> list:
    return eighths(block[:16], block[48:176], block[16:48])


def eighths(head: bytes, q: bytes, high: bytes) -> list:
    """Eight sub-blocks of 32; `high` has the fifth bits, one per sub-block."""
    d, m, packed = half(head[:2]), half(head[2:4]), head[4:16]
    values = []
    for sub in range(8):
        if sub < 4:
            scale, minimum = packed[sub] & 63, packed[sub + 4] & 63
        else:
            scale = packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4
            minimum = packed[sub + 4] >> 4 | packed[sub] >> 6 << 4
        run = q[sub // 2 * 32 : sub // 2 * 32 + 32]
        codes = [(byte >> 4 if sub % 2 else byte & 15) | (high[i] >> sub & 1) << 4 for i, byte in enumerate(run)]
        values += [d * f32(scale) * f32(code) - m * f32(minimum) for code in codes]
    return values


def q6_k(block: bytes) -> list:
    low, high, scales, d = block[:128], block[128:192], struct.unpack("<16b", block[192:208]), half(block[208:210])
    values = []
    for i in range(256):
        part, within = divmod(i, 128)
        quarter, column = divmod(within, 32)
        byte = low[64 * part + 32 * (quarter % 2) + column]
        nibble = byte >> 4 if quarter >= 2 else byte & 15
        q = nibble | (high[32 * part + column] >> 2 * quarter & 3) << 4
        values.append(d * f32(scales[i // 16]) * f32(q - 32))
    return values


REFERENCE = {
    "F64": lambda block: [f32(struct.unpack("<d", block)[0])],
    "F32": lambda block: [f32(struct.unpack("<f", block)[0])],
    "F16": lambda block: [half(block)],
    "BF16": lambda block: [f32(struct.unpack("<f", b"\0\0" + block)[0])],
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "IQ4_NL": iq4_nl,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
# Where the half-precision scales stand inside a block.
SCALES_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0]}
SCALES_AT |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


# --- material -----------------------------------------------------------------------------------------------------------


def random_raw(format: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random bytes whose numbers are finite; scales run through the extreme ones."""
    rng = np.random.default_rng(seed)
    if format in SCALES_AT:
        blocks = rng.integers(0, 256, (rows * width // FORMATS[format].block_elements, FORMATS[format].block_bytes), np.uint8)
        for offset in SCALES_AT[format]:
            bits = rng.choice(np.array(EXTREME_SCALES, "<u2"), len(blocks))
            bits[::2] = rng.standard_normal(len(bits[::2])).astype("<f2").view("<u2")
            blocks[:, offset : offset + 2] = bits.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(rows, -1)
    values = rng.standard_normal((rows, width)).astype(np.float32)
    if format == "BF16":
        return np.ascontiguousarray((values.view("<u4") >> 16).astype("<u2")).view(np.uint8)
    return values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[format]).view(np.uint8)


def stored(format: str, rows: int, width: int, seed: int = 0) -> StoredTensor:
    return StoredTensor("w", format, (rows, width), random_raw(format, rows, width, seed))


def scalar(tensor: StoredTensor) -> np.ndarray:
    raw, size = tensor.raw.tobytes(), FORMATS[tensor.format].block_bytes
    values = [REFERENCE[tensor.format](raw[i : i + size]) for i in range(0, len(raw), size)]
    return np.array(values, np.float32).reshape(tensor.shape)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("format", RULES)
def test_R43_equals_the_scalar_reference(format):
    tensor = stored(format, 24, 512)
    assert_same_bits(dequantize(tensor), scalar(tensor))


@pytest.mark.parametrize("format", SCALES_AT)
def test_R43_every_pair_of_extreme_scales(format):
    blocks = random_raw(format, len(EXTREME_SCALES) ** 2, FORMATS[format].block_elements)
    pairs = np.array([(a, b) for a in EXTREME_SCALES for b in EXTREME_SCALES], "<u2")
    for number, offset in enumerate(SCALES_AT[format]):
        blocks[:, offset : offset + 2] = np.ascontiguousarray(pairs[:, number]).view(np.uint8).reshape(-1, 2)
    tensor = StoredTensor("w", format, (len(blocks), FORMATS[format].block_elements), blocks)
    assert_same_bits(dequantize(tensor), scalar(tensor))


@pytest.mark.parametrize("format", sorted(set(RULES) - {"F64"}))
def test_R43_equals_the_gguf_package(format):
    gguf = pytest.importorskip("gguf")
    tensor = stored(format, 300, 512, seed=1)
    expected = gguf.dequantize(tensor.raw, gguf.GGMLQuantizationType[format])
    assert_same_bits(dequantize(tensor), np.ascontiguousarray(expected.reshape(tensor.shape).astype(np.float32)))


@pytest.mark.parametrize("format", RULES)
def test_pieces_join_without_seam(format):
    """More values than one piece, and no multiple of it."""
    width = 256
    tensor = stored(format, 2 * CHUNK_VALUES // width + 3, width)
    whole = dequantize(tensor)
    rows = np.array([0, CHUNK_VALUES // width - 1, CHUNK_VALUES // width, 2 * CHUNK_VALUES // width, len(whole) - 1])
    assert_same_bits(whole[rows], np.concatenate([dequantize(stored_row(tensor, row)) for row in rows]))


def stored_row(tensor: StoredTensor, row: int) -> StoredTensor:
    return StoredTensor("row", tensor.format, (1, tensor.shape[1]), tensor.raw[row : row + 1])


def test_the_result_is_a_copy():
    """Whoever writes into it must not meet the read-only file."""
    tensor = stored("F32", 2, 8)
    tensor.raw.flags.writeable = False
    values = dequantize(tensor)
    values += 1
    assert values.base is None or values.base.flags.writeable


def test_unaligned_and_strided_bytes():
    """A file may place a tensor at any byte; rows may have been picked out of a larger matrix."""
    tensor = stored("F32", 6, 8)
    shifted = np.empty(tensor.raw.size + 1, np.uint8)[1:].reshape(tensor.raw.shape)
    shifted[:] = tensor.raw
    assert_same_bits(dequantize(StoredTensor("w", "F32", (6, 8), shifted)), dequantize(tensor))
    assert_same_bits(dequantize(StoredTensor("w", "F32", (3, 8), tensor.raw[::2])), dequantize(tensor)[::2])


@pytest.mark.parametrize("shape", [(), (32,), (2, 3, 64), (0, 32)])
def test_any_number_of_dimensions(shape):
    count = int(np.prod(shape, dtype=int))
    values = np.arange(count, dtype=np.float32).reshape(shape)
    raw = values.reshape(-1).view(np.uint8).reshape(int(np.prod(shape[:-1], dtype=int)), -1 if count else 128)
    np.testing.assert_array_equal(dequantize(StoredTensor("w", "F32", shape, raw)), values)


def test_R43_an_unusable_format_is_named():
    with pytest.raises(UnsupportedError, match=r"'w'.*I32.*Q4_K"):
        dequantize(StoredTensor("w", "I32", (1, 4), np.zeros((1, row_bytes("I32", 4)), np.uint8)))


@pytest.mark.parametrize("format", SCALES_AT)
def test_infinite_scales_stay_non_finite(format):
    """Garbage is passed on, so that the check of the logits sees it; it is not turned into numbers."""
    raw = random_raw(format, 1, FORMATS[format].block_elements)
    raw[0, SCALES_AT[format][0] : SCALES_AT[format][0] + 2] = [0x00, 0x7C]
    with np.errstate(invalid="ignore"):
        values = dequantize(StoredTensor("w", format, (1, FORMATS[format].block_elements), raw))
    assert not np.isfinite(values).all()


@pytest.mark.model
@pytest.mark.parametrize("alias", ["smollm2-135m", "gemma3-270m"])
def test_R43_real_tensors_equal_the_gguf_package(alias):
    """The first tensor of every format that the file has."""
    gguf = pytest.importorskip("gguf")
    first = {tensor.format: tensor for tensor in reversed(read_gguf(find_model(alias)).tensors.values())}
    for format, tensor in first.items():
        rows = np.arange(0, len(tensor.raw), max(1, len(tensor.raw) // 500))
        expected = gguf.dequantize(tensor.raw[rows], gguf.GGMLQuantizationType[format])
        picked = StoredTensor(tensor.name, format, (len(rows), tensor.shape[-1]), tensor.raw[rows])
        assert_same_bits(dequantize(picked), np.ascontiguousarray(expected.reshape(picked.shape).astype(np.float32)))


@pytest.mark.model
def test_a_whole_model_unpacks_in_under_a_second():
    """0.2 s on one quiet core; the bound leaves room for a busy machine."""
    tensors = read_gguf(find_model("smollm2-135m")).tensors.values()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for tensor in tensors:
            dequantize(tensor)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.6
