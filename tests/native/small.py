"""Small programs and batches made by hand, and the formulas they are held against, in fp64."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kvant.batch import Batch, GroupBatch
from kvant.config.formats import FORMATS, StoredTensor, row_bytes
from kvant.config.model import CacheGroup
from kvant.native.program import Program

# Where the half-precision scales stand inside a block: random bytes there would be NaN and infinity.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0]}
SCALES |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
BLOCK_FORMATS = tuple(SCALES)
SUPER_FORMATS = tuple(format for format in SCALES if format.endswith("_K"))  # blocks of 256, scales are products
PLAIN_FORMATS = ("F32", "F16", "BF16")


def plain(name: str, values: np.ndarray) -> StoredTensor:
    values = np.ascontiguousarray(values, np.float32)
    return StoredTensor(name, "F32", values.shape, values.view(np.uint8).reshape(len(values), -1))


def random_weight(format: str, rows: int, columns: int, rng: np.random.Generator, spread: float = 0.02) -> StoredTensor:
    """Random bytes with sane scales, or random values in a plain format."""
    if format in PLAIN_FORMATS:
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        if format == "F16":
            raw = values.astype(np.float16).view(np.uint8)
        elif format == "BF16":
            raw = np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        else:
            raw = values.view(np.uint8)
        return StoredTensor(f"{format} {rows}x{columns}", format, (rows, columns), raw.reshape(rows, -1))
    size = FORMATS[format].block_bytes
    raw = rng.integers(0, 256, (rows, row_bytes(format, columns)), dtype=np.uint8)
    blocks = raw.reshape(rows, -1, size)
    for at in SCALES[format]:
        scales = (rng.normal(size=blocks.shape[:2]) * spread).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return StoredTensor(f"{format} {rows}x{columns}", format, (rows, columns), raw)


def values_of(stored: StoredTensor) -> np.ndarray:
    """fp64 values, by the public gguf package."""
    return dequantize(stored.raw, GGMLQuantizationType[stored.format]).astype(np.float64).reshape(stored.shape)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32)
    return rounded.view(np.float32).astype(np.float64)


def to_int8_groups(x: np.ndarray) -> np.ndarray:
    """Activations as the integer kernels see them: 127 steps per side and 32 columns.

    In fp32, operation by operation: in fp64 a value between two steps would now and then fall to the other side. So it may
    where a compiler fuses the multiplication with what rounds: tests of all instruction sets use `between_no_steps`.
    """
    groups = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 1e-30)
    codes = np.rint(groups * inverse).astype(np.float64)
    return (codes * (top / np.float32(127))).reshape(x.shape)


def between_no_steps(x: np.ndarray) -> np.ndarray:
    """`x` with values that lie halfway between two int8 steps moved away from there."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    steps = groups.astype(np.float64) / np.where(top > 0, top, 1) * 127
    halfway = np.abs(np.abs(steps - np.rint(steps)) - 0.5) < 1e-3
    return np.where(halfway, groups * np.float32(0.99), groups).reshape(x.shape)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def attention(q, keys, values, positions, *, scale, window=None, cap=None):
    """`q` [T, N, H] at `positions`, `keys`, `values` [L, K, H] -> [T, N, H]."""
    share = q.shape[1] // keys.shape[1]
    k, v = (np.repeat(x.astype(np.float64), share, axis=1) for x in (keys, values))
    scores = np.einsum("tnh,lnh->ntl", q.astype(np.float64), k) * scale
    if cap is not None:
        scores = np.tanh(scores / cap) * cap
    distance = np.asarray(positions)[:, None] - np.arange(len(keys))[None]
    visible = (distance >= 0) & (distance < (window or 1 << 40))
    return np.einsum("ntl,lnh->tnh", softmax(np.where(visible, scores, -np.inf)), v)


def rows_batch(tokens: int, groups: int = 1) -> Batch:
    """`tokens` rows of one sequence, ids 0, 1, ...; for programs without attention."""
    ids = np.arange(tokens, dtype=np.int64)
    group = GroupBatch(ids + 16, 1 + np.arange(-(-tokens // 16), dtype=np.int32)[None], np.array([tokens], np.int32))
    return Batch(ids, ids.copy(), np.array([0, tokens], np.int32), np.zeros(1, np.int64), ids[-1:], (group,) * groups)


GROUP = CacheGroup(name="full", layers=(0,), window=None, num_kv_heads=1, head_dim=32)


def apply(library, x: np.ndarray, body, threads: int = 2, deterministic: bool = False) -> np.ndarray:
    """Runs `body(program, x)` on the rows of `x` [T, D]: they are the embedding's rows."""
    program = Program((GROUP,))
    program.output(body(program, program.embedding(plain("x", x))))
    program.logits([plain("head", np.zeros((16, program.final.width)))])
    model = program.finish(library, threads=threads, deterministic=deterministic)
    return model.run(rows_batch(len(x)), model.new_cache([2 + len(x) // 16]), logits=False).hidden.copy()
