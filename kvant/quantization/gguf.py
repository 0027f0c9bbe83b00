"""What the bytes of a stored tensor mean: GGML's block formats and the plain floats, unpacked to fp32 with numpy.

Every block format is one dtype (the layout of its bytes, as in ggml-common.h of llama.cpp) and one function (its formula).
The arithmetic is fp32 in the order of llama.cpp's scalar reference, so results are equal to the last bit. A tensor is
unpacked in pieces of `CHUNK_VALUES`, straight into the result: temporaries stay inside a core's L2 cache, whatever the
tensor's size. SmolLM2's 134 M weights take 0.25 s on one core.

Letters: n blocks in a piece; q the small integers; d and m a block's scale and minimum.
"""

import math
from collections.abc import Callable

import numpy as np

from kvant.config.formats import FORMATS, StoredTensor
from kvant.errors import UnsupportedError

Array = np.ndarray

CHUNK_VALUES = 1 << 17  # 0.5 MB of fp32; 2^15 to 2^19 are within 15% of it

Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", 16)])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
Q5_0 = np.dtype([("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])
IQ4_NL = np.dtype([("d", "<f2"), ("q", "u1", 16)])
Q2_K = np.dtype([("scales", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("m", "<f2")])
Q3_K = np.dtype([("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)])
Q5_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)])
Q6_K = np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])

# What the 4-bit codes of IQ4_NL stand for (kvalues_iq4nl): finer steps near 0, where most weights lie.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)

PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]  # where the four 2-bit numbers of a byte begin


def dequantize(stored: StoredTensor) -> Array:
    """The values of `stored` as a new fp32 array of `stored.shape`.

    Raises `UnsupportedError` for a format that holds no floating-point weights.
    """
    layout, unpack = _rule(stored)
    out = np.empty(math.prod(stored.shape), np.float32)
    block = FORMATS[stored.format]
    blocks = np.ascontiguousarray(stored.raw).reshape(-1).view(layout)  # [total blocks]
    step = max(1, CHUNK_VALUES // block.block_elements)
    values = out.reshape(-1, block.block_elements)
    for first in range(0, len(blocks), step):
        unpack(blocks[first : first + step], values[first : first + step])
    return out.reshape(stored.shape)


def _rule(stored: StoredTensor) -> "tuple[np.dtype, Callable[[Array, Array], None]]":
    if stored.format not in RULES:
        raise UnsupportedError(
            f"tensor {stored.name!r} is stored as {stored.format}, which holds no weights that can be used here; "
            f"supported: {', '.join(RULES)} (see docs/models.md)"
        )
    return RULES[stored.format]


# --- plain formats ------------------------------------------------------------------------------------------------------


def _plain(blocks: Array, out: Array) -> None:
    """F64 is rounded to nearest; F32 and F16 are exact."""
    out[:, 0] = blocks


def _bf16(blocks: Array, out: Array) -> None:
    """The upper half of an fp32."""
    out.view(np.uint32)[:, 0] = blocks
    out.view(np.uint32)[:] <<= np.uint32(16)


# --- blocks of 32 -------------------------------------------------------------------------------------------------------


def _q4_0(blocks: Array, out: Array) -> None:
    """y = d (q - 8), q of 4 bits; byte j holds value j below and value j + 16 above."""
    _nibbles(blocks["q"], out, 16)
    out -= np.float32(8)
    out *= _fp32(blocks["d"])


def _q4_1(blocks: Array, out: Array) -> None:
    """y = d q + m, q of 4 bits; byte j holds value j below and value j + 16 above."""
    _nibbles(blocks["q"], out, 16)
    out *= _fp32(blocks["d"])
    out += _fp32(blocks["m"])


def _q5_0(blocks: Array, out: Array) -> None:
    """y = d (q - 16), q of 5 bits: the lower four as in Q4_0, the fifth of value j is bit j of a 32-bit word."""
    _nibbles(blocks["q"], out, 16)
    out += _fifth_bits(blocks["high"])
    out -= np.float32(16)
    out *= _fp32(blocks["d"])


def _q5_1(blocks: Array, out: Array) -> None:
    """y = d q + m, q of 5 bits as in Q5_0."""
    _nibbles(blocks["q"], out, 16)
    out += _fifth_bits(blocks["high"])
    out *= _fp32(blocks["d"])
    out += _fp32(blocks["m"])


def _fifth_bits(high: Array) -> Array:
    """[n, 4] bytes -> 0 or 16 per value, [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    bits <<= 4
    return bits


def _q8_0(blocks: Array, out: Array) -> None:
    """y = d q, q of 8 bits with a sign."""
    out[:] = blocks["q"]
    out *= _fp32(blocks["d"])


def _iq4_nl(blocks: Array, out: Array) -> None:
    """y = d table[q], q of 4 bits; byte j holds value j below and value j + 16 above."""
    packed = np.ascontiguousarray(blocks["q"])
    np.take(IQ4_VALUES, packed & 15, out=out[:, :16])
    np.take(IQ4_VALUES, packed >> 4, out=out[:, 16:])
    out *= _fp32(blocks["d"])


# --- super-blocks of 256 ------------------------------------------------------------------------------------------------


def _q2_k(blocks: Array, out: Array) -> None:
    """y = (d s) q - (m t), q of 2 bits, with a scale s and a minimum t of 4 bits for each of 16 sub-blocks of 16."""
    packed = np.ascontiguousarray(blocks["scales"])
    scale = _fp32(blocks["d"]) * (packed & 15)
    minimum = _fp32(blocks["m"]) * (packed >> 4)
    out[:] = _quarters(blocks["q"])
    parts = out.reshape(-1, 16, 16)
    parts *= scale[:, :, None]
    parts -= minimum[:, :, None]


def _q3_k(blocks: Array, out: Array) -> None:
    """y = (d (s - 32)) (q - 4), q of 3 bits, with a scale s of 6 bits for each of 16 sub-blocks of 16.

    The third bit of value i is bit i / 32 of byte i mod 32 of `high`. The scales' lower four bits are the nibbles of bytes
    0-7 (0-7 below, 8-15 above); of the upper two, byte 8 + s mod 4 holds those of s, s + 4, s + 8, s + 12 from its lowest up.
    """
    packed = np.ascontiguousarray(blocks["scales"])
    scale = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    scale |= (packed[:, None, 8:] >> PAIRS & 3).reshape(-1, 16) << 4
    scales = _fp32(blocks["d"]) * (scale.astype(np.float32) - np.float32(32))
    high = np.ascontiguousarray(blocks["high"])[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [n, 8, 32]
    high <<= 2
    out[:] = _quarters(blocks["q"]) | high.reshape(-1, 256)
    out -= np.float32(4)
    parts = out.reshape(-1, 16, 16)
    parts *= scales[:, :, None]


def _q4_k(blocks: Array, out: Array) -> None:
    """y = (d s) q - (m t), q of 4 bits, with a scale s and a minimum t of 6 bits for each of 8 sub-blocks of 32.

    The 128 bytes of q are four runs of 32: the lower halves of run r are sub-block 2r, the upper halves 2r + 1.
    """
    _nibbles(blocks["q"], out, 32)
    _scale_eighths(blocks, out)


def _q5_k(blocks: Array, out: Array) -> None:
    """As Q4_K, with q of 5 bits: the fifth of value i is bit i / 32 of byte i mod 32 of `high`."""
    _nibbles(blocks["q"], out, 32)
    high = np.ascontiguousarray(blocks["high"])[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [n, 8, 32]
    high <<= 4
    out += high.reshape(-1, 256)
    _scale_eighths(blocks, out)


def _scale_eighths(blocks: Array, out: Array) -> None:
    """q -> (d s) q - (m t) in place, in eight sub-blocks."""
    scale, minimum = _six_bit_scales(blocks["scales"])  # [n, 8] each
    scale = _fp32(blocks["d"]) * scale
    minimum = _fp32(blocks["m"]) * minimum
    parts = out.reshape(-1, 8, 32)
    parts *= scale[:, :, None]
    parts -= minimum[:, :, None]


def _six_bit_scales(packed: Array) -> tuple[Array, Array]:
    """[n, 12] bytes -> scales and minima, [n, 8] each, 0 to 63.

    bytes 0-3    scales 0-3 in the lower 6 bits; above, the upper 2 bits of scales 4-7
    bytes 4-7    minima 0-3 in the lower 6 bits; above, the upper 2 bits of minima 4-7
    bytes 8-11   the lower 4 bits of scales 4-7 below, of minima 4-7 above
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales, minima


def _q6_k(blocks: Array, out: Array) -> None:
    """y = (d s) (q - 32), q of 6 bits, with a signed 8-bit scale s for each of 16 sub-blocks of 16.

    Each half of 128 values takes 64 bytes for the lower four bits (values 0-63 below, 64-127 above) and 32 for the upper two.
    """
    scale = _fp32(blocks["d"]) * blocks["scales"].astype(np.float32)  # [n, 16]
    _nibbles(blocks["low"], out, 64)
    out += _quarters(blocks["high"]) << 4
    out -= np.float32(32)
    parts = out.reshape(-1, 16, 16)
    parts *= scale[:, :, None]


def _nibbles(packed: Array, out: Array, run: int) -> None:
    """Runs of `run` bytes: the lower halves of a run first, then its upper halves. [n, bytes] -> [n, 2 bytes]."""
    pairs = np.ascontiguousarray(packed).reshape(-1, run)
    unpacked = np.empty((len(pairs), 2, run), np.uint8)
    np.bitwise_and(pairs, 15, out=unpacked[:, 0])
    np.right_shift(pairs, 4, out=unpacked[:, 1])
    out[:] = unpacked.reshape(out.shape)


def _quarters(packed: Array) -> Array:
    """[n, 64] bytes -> 2-bit numbers [n, 256]: byte l of each half holds those of l, l + 32, l + 64, l + 96, lowest first."""
    runs = np.ascontiguousarray(packed).reshape(-1, 2, 1, 32)
    return (runs >> PAIRS & 3).reshape(-1, 256)


def _fp32(scale: Array) -> Array:
    """One fp16 per block -> fp32 [n, 1], exactly."""
    return scale.astype(np.float32)[:, None]


RULES: "dict[str, tuple[np.dtype, Callable[[Array, Array], None]]]" = {
    "F64": (np.dtype("<f8"), _plain),
    "F32": (np.dtype("<f4"), _plain),
    "F16": (np.dtype("<f2"), _plain),
    "BF16": (np.dtype("<u2"), _bf16),
    "Q4_0": (Q4_0, _q4_0),
    "Q4_1": (Q4_1, _q4_1),
    "Q5_0": (Q5_0, _q5_0),
    "Q5_1": (Q5_1, _q5_1),
    "Q8_0": (Q8_0, _q8_0),
    "IQ4_NL": (IQ4_NL, _iq4_nl),
    "Q2_K": (Q2_K, _q2_k),
    "Q3_K": (Q3_K, _q3_k),
    "Q4_K": (Q4_K, _q4_k),
    "Q5_K": (Q5_K, _q5_k),
    "Q6_K": (Q6_K, _q6_k),
}
