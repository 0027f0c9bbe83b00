"""The structures that cross into C++, field by field as in `program.h` and `pack.h`, and the functions' signatures."""

import ctypes
from typing import Any

import numpy as np

POINTER = np.uint64

VIEW = np.dtype([("offset", np.int64), ("stride", np.int32), ("start", np.int32), ("width", np.int32), ("padding", np.int32)])
SEGMENT = np.dtype([("data", POINTER), ("rows", np.int32), ("columns", np.int32), ("packing", np.int32), ("padding", np.int32)])
OPERATION = np.dtype(
    [(name, POINTER) for name in ("norm", "bias", "table")]
    + [("row_bytes", np.int64)]
    + [
        (name, np.int32)
        for name in (
            *("kind", "in0", "in1", "out", "first_segment", "num_segments", "format", "num_rows"),
            *("group", "layer", "head_dim", "window", "activation", "angles"),
        )
    ]
    + [(name, np.float32) for name in ("eps", "scale", "cap", "padding")]
)
GROUP = np.dtype([(name, np.int32) for name in ("layers", "kv_heads", "head_dim", "block_size")])
FREQUENCIES = np.dtype([("inverse", POINTER), ("count", np.int32), ("scale", np.float32)])
GROUP_BATCH = np.dtype(
    [
        ("cache", POINTER),
        ("num_blocks", np.int64),
        ("slots", POINTER),
        ("block_table", POINTER),
        ("kv_lens", POINTER),
        ("copies", POINTER),
        ("num_copies", np.int64),
        ("table_width", np.int64),
    ]
)
BATCH = np.dtype(
    [(name, POINTER) for name in ("ids", "positions", "query_start", "logit_rows", "groups", "logits", "best", "finite")]
    + [(name, np.int32) for name in ("tokens", "sequences", "logit_count", "drawable")]
)
DRAW_ROW = np.dtype(
    [("logits", POINTER), ("keys", POINTER), ("ids", POINTER), ("top_k", np.int64)]
    + [(name, np.float32) for name in ("temperature", "top_p", "log_min_p")]
    + [("draws", np.int32)]
)
SOURCE = np.dtype(
    [("rows", POINTER), ("row_bytes", np.int64), ("format", np.int32), ("num_rows", np.int32), ("num_columns", np.int32)],
    align=True,
)

_FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "Q5_1", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL")
FORMATS = {name: number for number, name in enumerate(_FORMATS)}
DENSE = 5  # packing of plain values, as bf16

ERRORS = {
    -1: "not enough memory for the step's buffers",
    -2: "input_ids: an id outside the vocabulary",
    -3: "slot_mapping: a slot outside the cache",
    -4: "block_table: a block outside the cache",
    -5: "query_start, kv_lens: lengths that do not fit together",
    -6: "logit_rows: a row outside the batch",
    -7: "positions: a position that its sequence's kv_lens does not cover",
    -8: "kv_copies: a block outside the cache",
}


def address(array: np.ndarray) -> int:
    """Where the array's bytes are."""
    return int(array.__array_interface__["data"][0])


def declare(library: Any) -> None:
    """Tells ctypes what each function takes and gives."""
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "kvant_vector_level": (int32, []),
        "kvant_tiles_granted": (int32, []),
        "kvant_has_tiles": (int32, [pointer]),
        "kvant_threads": (int32, [pointer]),
        "kvant_packing_of": (int32, [int32]),
        "kvant_packed_bytes": (int64, [int32, int32, int32]),
        "kvant_pack": (int32, [pointer, pointer, pointer, pointer, int32, int32]),
        "kvant_decode_row": (None, [int32, pointer, int32, pointer]),
        "kvant_create": (pointer, [pointer, int32] * 5 + [int64, int32, int32, int32]),
        "kvant_destroy": (None, [pointer]),
        "kvant_run": (int32, [pointer, pointer]),
        "kvant_head": (int32, [pointer, pointer, int32, pointer]),
        "kvant_hidden": (pointer, [pointer]),
        "kvant_hidden_stride": (int64, [pointer]),
        "kvant_profile": (None, [pointer, pointer]),
        "kvant_read_seconds": (ctypes.c_double, [pointer, int64, int32, int32]),
        "kvant_product_rate": (ctypes.c_double, [int32, int32]),
        "kvant_draw": (None, [pointer, pointer, int32, int32]),
        "kvant_top_k": (None, [pointer, pointer, int64, int32, int32, int32, pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
