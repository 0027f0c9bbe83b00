"""NativeModel: a finished program and its packed weights; runs batches of numpy arrays in one call each.

The arrays are those of `batch.Batch`. What comes back are views into memory that the next run overwrites. Everything that
could make the C++ side read or write where it must not (shapes, ids, slots, blocks, lengths) is checked before the first
operation, and named.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvant.batch import Batch
from kvant.config.formats import StoredTensor
from kvant.errors import CapacityError, UnsupportedError
from kvant.native import abi
from kvant.native.build import Library
from kvant.native.cache import NativeCache
from kvant.native.lower import Lowered, lower
from kvant.native.packing import PackedWeight, Shelf, packed
from kvant.native.program import Buffer, Kind, Operation, Program

MAX_HEADS_PER_KV_HEAD = 128


class NativeStep(NamedTuple):
    """One step's results; views, valid until the next run."""

    hidden: np.ndarray  # [T, D] fp32, after the last norm
    logits: np.ndarray | None  # [R, V] fp32
    best: np.ndarray  # [R] int64: place of the largest of the logits that can be drawn, the lowest of equals
    finite: np.ndarray  # [R] bool: those hold neither NaN nor infinity


class RowDraws(NamedTuple):
    """How tokens are drawn from one row of logits. `keys` [Z] are `sampling.host.row_keys`, one per draw."""

    logits: np.ndarray  # [V] fp32, contiguous
    keys: np.ndarray  # [Z] uint64
    temperature: float
    top_k: int  # 0 is off
    top_p: float  # 1 is off
    log_min_p: float  # minus infinity is off


class NativeModel:
    """One network on the CPU."""

    def __init__(self, program: Program, library: Library, *, threads: int, deterministic: bool, shelf: Shelf | None = None):
        if program.final is None or program.head is None:
            raise UnsupportedError("a program needs an output and logits before it can be finished")
        self.groups = program.groups
        self.library = library
        self._functions = library.functions
        self._keep: list[object] = []  # arrays that C++ points to
        lowered = lower(program)
        self.operations = lowered.operations
        self.hidden_size = program.final.width
        self.vocab_size = _head_width(program)
        packed = self._pack(lowered.operations, threads, shelf)
        self.weight_bytes = sum(weight.data.nbytes for weight in packed.values())
        self._handle = self._create(program, lowered, packed, threads, deterministic)
        self._logits = np.empty((0, self.vocab_size), np.float32)
        self._batch = np.zeros(1, abi.BATCH)
        self._groups = np.zeros(len(self.groups), abi.GROUP_BATCH)
        self._num_tokens = 0

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._functions.kvant_destroy(self._handle)
            self._handle = None

    @property
    def uses_tiles(self) -> bool:
        """Whether many rows are multiplied with AMX tiles."""
        return bool(self._functions.kvant_has_tiles(self._handle))

    @property
    def threads(self) -> int:
        """Threads that compute: fewer than asked for where the system allows no more."""
        return int(self._functions.kvant_threads(self._handle))

    def new_cache(self, num_blocks: Sequence[int]) -> NativeCache:
        """An empty cache of `num_blocks` blocks per group, the null block included."""
        return NativeCache(self.groups, num_blocks)

    def run(self, batch: Batch, cache: NativeCache, *, logits: bool = True, drawable: int | None = None) -> NativeStep:
        """Runs the network on `batch`; with `logits`, also the head on its `logit_rows`, in the same call.

        The first `drawable` columns of the logits (None: all) are those that `best` and `finite` look at.
        """
        if batch.ancestors is not None or batch.embed_rows is not None or batch.adapter_rows is not None:
            raise UnsupportedError("the native CPU step takes no token trees, media or adapters; run with device torch")
        rows = len(batch.logit_rows) if logits else 0
        best, finite = np.empty(rows, np.int64), np.empty(rows, np.bool_)
        arrays = self._point(batch, cache, rows)
        scan = abi.address(best) if rows else 0, abi.address(finite), self.vocab_size if drawable is None else drawable
        self._batch["best"], self._batch["finite"], self._batch["drawable"] = scan
        self._check(self._functions.kvant_run(self._handle, abi.address(self._batch)))
        del arrays
        return NativeStep(self._hidden(), self._logits[:rows] if logits else None, best, finite)

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """fp32 logits [R, V] of `rows` [R] of the last run: a view, overwritten by the next call."""
        rows = _array("rows", rows, np.int64, (len(rows),))
        self._reserve_logits(len(rows))
        self._check(self._functions.kvant_head(self._handle, abi.address(rows), len(rows), abi.address(self._logits)))
        return self._logits[: len(rows)]

    def draw(self, draws: Sequence[RowDraws]) -> list[np.ndarray]:
        """Tokens [Z] int64 for each of several rows, on all threads; the same ones as `sampling.host.draw` gives."""
        ids = [np.empty(len(row.keys), np.int64) for row in draws]
        entries = []
        for row, drawn in zip(draws, ids, strict=True):
            logits, keys = row.logits, row.keys
            if logits.dtype != np.float32 or logits.shape != draws[0].logits.shape or keys.dtype != np.uint64:
                raise ValueError("draws need fp32 rows of logits of one length, and uint64 keys")
            pointers = abi.address(logits), abi.address(keys), abi.address(drawn)
            entries.append((*pointers, row.top_k, row.temperature, row.top_p, row.log_min_p, len(drawn)))
        table = np.array(entries, abi.DRAW_ROW)
        self._functions.kvant_draw(self._handle, abi.address(table), len(table), draws[0].logits.size)
        return ids

    def top_k(self, logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The `k` largest of every row, largest first, equals by id: ids [R, k] int64 and values [R, k] fp32."""
        rows, count = _matrix(logits)
        if not 0 < k <= count:
            raise ValueError(f"top_k: k must be between 1 and {count}, not {k}")
        ids, values = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
        outs = abi.address(ids), abi.address(values)
        self._functions.kvant_top_k(self._handle, abi.address(logits), logits.strides[0] // 4, rows, count, k, *outs)
        return ids, values

    @contextmanager
    def profiled(self) -> Iterator[np.ndarray]:
        """Inside, every run adds the nanoseconds of each of `operations` to its entry of the array given: int64.

        Measured on the first thread, its waiting for the others included.
        """
        times = np.zeros(len(self.operations), np.int64)
        self._functions.kvant_profile(self._handle, abi.address(times))
        try:
            yield times
        finally:
            self._functions.kvant_profile(self._handle, None)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _point(self, batch: Batch, cache: NativeCache, rows: int) -> list[np.ndarray]:
        """Fills the structures with addresses; returns the arrays, which must outlive the call."""
        tokens, sequences = len(batch.input_ids), len(batch.query_start) - 1
        if tokens == 0:
            raise ValueError("a batch needs at least one token")
        arrays = [
            _array("input_ids", batch.input_ids, np.int64, (tokens,)),
            _array("positions", batch.positions, np.int64, (tokens,)),
            _array("query_start", batch.query_start, np.int32, (sequences + 1,)),
            _array("logit_rows", batch.logit_rows, np.int64, (len(batch.logit_rows),)),
        ]
        step = self._batch[0]
        for name, array in zip(("ids", "positions", "query_start", "logit_rows"), arrays, strict=True):
            step[name] = abi.address(array)
        self._reserve_logits(rows)
        step["groups"], step["logits"] = abi.address(self._groups), abi.address(self._logits)
        step["tokens"], step["sequences"], step["logit_count"] = tokens, sequences, rows
        if len(batch.groups) != len(self.groups) or cache.groups != self.groups:
            raise ValueError(f"the batch has {len(batch.groups)} cache groups, the network {len(self.groups)}")
        for number, group in enumerate(batch.groups):
            arrays += self._point_group(number, group, cache, tokens, sequences)
        return arrays

    def _point_group(self, number: int, group: object, cache: NativeCache, tokens: int, sequences: int) -> list[np.ndarray]:
        target = self._groups[number]
        width = group.block_table.shape[1]  # type: ignore[attr-defined]
        slots = _array("slot_mapping", group.slot_mapping, np.int64, (tokens,))  # type: ignore[attr-defined]
        table = _array("block_table", group.block_table, np.int32, (sequences, width))  # type: ignore[attr-defined]
        lens = _array("kv_lens", group.kv_lens, np.int32, (sequences,))  # type: ignore[attr-defined]
        copies = group.kv_copies  # type: ignore[attr-defined]
        copies = np.zeros((0, 2), np.int64) if copies is None else _array("kv_copies", copies, np.int64, (len(copies), 2))
        target["cache"], target["num_blocks"] = abi.address(cache.arrays[number]), cache.num_blocks[number]
        target["slots"], target["block_table"], target["kv_lens"] = abi.address(slots), abi.address(table), abi.address(lens)
        target["copies"], target["num_copies"], target["table_width"] = abi.address(copies), len(copies), width
        return [slots, table, lens, copies]

    def _reserve_logits(self, rows: int) -> None:
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.vocab_size), np.float32)

    def _hidden(self) -> np.ndarray:
        tokens, stride = int(self._batch["tokens"][0]), self._functions.kvant_hidden_stride(self._handle)
        memory = ctypes.cast(self._functions.kvant_hidden(self._handle), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(memory, (tokens, stride))[:, : self.hidden_size]

    def _check(self, status: int) -> None:
        if status == -1:
            raise CapacityError(abi.ERRORS[status])
        if status:
            raise ValueError(abi.ERRORS[status])

    # --- construction -------------------------------------------------------------------------------------------------

    def _pack(self, operations: list[Operation], threads: int, shelf: Shelf | None) -> dict[int, PackedWeight]:
        weights = {id(w): w for op in operations if op.kind == Kind.LINEAR for w in op.weights}
        done = dict(zip(weights, packed(self.library, list(weights.values()), threads, shelf), strict=True))
        self._keep.append(done)
        return done

    def _create(
        self, program: Program, lowered: Lowered, packed: dict[int, PackedWeight], threads: int, deterministic: bool
    ) -> int:
        writer = _Writer(program, lowered, packed)
        operations = np.stack([writer.operation(op) for op in lowered.operations])
        views = np.array(writer.views, abi.VIEW)
        segments = np.array(writer.segments, abi.SEGMENT)
        frequencies = np.array([(abi.address(f), f.size, s) for f, s in writer.frequencies], abi.FREQUENCIES)
        groups = np.array([(len(g.layers), g.num_kv_heads, g.head_dim, g.block_size) for g in program.groups], abi.GROUP)
        self._keep += [writer]
        vocabulary = min(op.weights[0].shape[0] for op in lowered.operations if op.kind == Kind.EMBEDDING)
        tables = [x for table in (operations, views, segments, groups, frequencies) for x in (abi.address(table), len(table))]
        handle = self._functions.kvant_create(*tables, lowered.row_floats, vocabulary, threads, int(deterministic))
        if not handle:
            raise CapacityError("not enough memory for the native step")
        return handle


class _Writer:
    """Operations as the structures of `abi`, and the arrays those point to."""

    def __init__(self, program: Program, lowered: Lowered, packed: dict[int, PackedWeight]):
        self.program, self.lowered, self.packed = program, lowered, packed
        self.views: list[tuple[int, int, int, int, int]] = []
        self.segments: list[tuple[int, int, int, int, int]] = []
        self.frequencies: list[tuple[np.ndarray, float]] = []
        self.keep: list[np.ndarray] = []

    def operation(self, op: Operation) -> np.ndarray:
        entry = np.zeros((), abi.OPERATION)
        entry["kind"] = op.kind
        inputs = [self._view(buffer) for buffer in op.inputs]
        entry["in0"], entry["in1"] = (inputs + [-1, -1])[:2]
        entry["out"] = -1 if op.out is None or op.out.value < 0 else self._view(op.out)
        entry["norm"], entry["bias"] = self._array(op.norm), self._array(op.bias)
        entry["eps"], entry["scale"], entry["cap"] = op.eps, op.scale, op.cap
        entry["head_dim"], entry["window"], entry["activation"] = op.head_dim, op.window, op.activation
        if op.layer >= 0:
            entry["group"], entry["layer"] = self.program.place(op.layer)
        if op.kind == Kind.LINEAR:
            entry["first_segment"], entry["num_segments"] = len(self.segments), len(op.weights)
            self.segments += [self._segment(weight) for weight in op.weights]
        elif op.kind == Kind.EMBEDDING:
            self._embedding(op.weights[0], entry)
        elif op.kind == Kind.ROTARY:
            entry["angles"] = self._angles(op)
        elif op.kind == Kind.ATTENTION:
            group = self.program.groups[self.program.place(op.layer)[0]]
            if op.inputs[0].width // group.head_dim // group.num_kv_heads > MAX_HEADS_PER_KV_HEAD:
                raise UnsupportedError(f"{op.name}: more than {MAX_HEADS_PER_KV_HEAD} query heads share a kv head")
        return entry

    def _view(self, buffer: Buffer) -> int:
        offset, stride, start = self.lowered.places[buffer.value]
        self.views.append((offset, stride, start + buffer.start, buffer.width, 0))
        return len(self.views) - 1

    def _array(self, array: np.ndarray | None) -> int:
        if array is None:
            return 0
        self.keep.append(array)
        return abi.address(array)

    def _segment(self, weight: StoredTensor) -> tuple[int, int, int, int, int]:
        packed = self.packed[id(weight)]
        return abi.address(packed.data), packed.rows, packed.columns, packed.packing, 0

    def _embedding(self, weight: StoredTensor, entry: np.ndarray) -> None:
        if weight.format not in abi.FORMATS:
            raise UnsupportedError(f"{weight.name}: format {weight.format} has no kernel; built are {', '.join(abi.FORMATS)}")
        raw = np.ascontiguousarray(weight.raw)
        entry["table"], entry["row_bytes"] = self._array(raw), raw.size // weight.shape[0]
        entry["format"], entry["num_rows"] = abi.FORMATS[weight.format], weight.shape[0]

    def _angles(self, op: Operation) -> int:
        assert op.frequencies is not None
        for number, (known, scale) in enumerate(self.frequencies):
            if scale == op.scale and np.array_equal(known, op.frequencies):
                return number
        self.frequencies.append((op.frequencies, op.scale))
        return len(self.frequencies) - 1


def _head_width(program: Program) -> int:
    assert program.head is not None
    return sum(weight.shape[0] for weight in program.head.weights)


def _matrix(logits: np.ndarray) -> tuple[int, int]:
    if logits.dtype != np.float32 or logits.ndim != 2 or (logits.size and logits.strides[1] != 4) or logits.shape[1] == 0:
        raise ValueError(f"logits must be fp32 rows, not {logits.dtype} of shape {list(logits.shape)}")
    return logits.shape[0], logits.shape[1]


def _array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {list(array.shape)} instead of {list(shape)}")
    return np.ascontiguousarray(array, dtype)
