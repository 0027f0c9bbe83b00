"""Program: one network step written down once, as a flat list of operations over packed weights, then run in one call.

The bricks' `emit(program, ...)` call the methods below in the order of their `forward`; nothing is computed while recording.
`finish` fuses neighbours (norm + linear, linear + residual, gate/up + activation), packs the weights and hands the list to
the C++ executor. A value is a `Buffer`: fp32 [T, width], T being the tokens of whatever batch is run later.

    program = Program(config.cache_groups())
    x       = program.embedding(embed, scale=1.0)                       # ids come with the batch      [T, D]
    h       = program.rms_norm(x, norm_weight, eps, offset)             # weight fp32 [D]              [T, D]
    qkv     = program.linear(h, [q_proj, k_proj, v_proj])               # StoredTensors, rows stacked  [T, (N + 2K) H]
    q, k, v = qkv.split((N * H, K * H, K * H))                          # views, nothing is copied
    q       = program.head_norm(q, weight, eps, offset)                 # weight fp32 [H]; per head
    q       = program.rotary(q, H, inv_freq, scale=1.0)                 # positions come with the batch
    k       = program.rotary(k, H, inv_freq)
    program.store_kv(k, v, layer)                                       # group and slots: from `groups` and the batch
    a       = program.attention(q, layer, scale, window, soft_cap)      #                              [T, N H]
    x       = x + program.linear(a, [o_proj])                           # fused into one operation
    gu      = program.linear(h, [gate_proj, up_proj])                   #                              [T, 2F]
    x       = x + program.linear(program.gated(gu, "silu"), [down_proj])
    program.output(program.rms_norm(x, ...))                            # the final hidden states
    program.logits([lm_head], soft_cap=None)                            # of rows asked for when running
    model   = program.finish(library, threads=2, deterministic=False)   # NativeModel, see executor.py

    cache   = model.new_cache([num_blocks of each group])
    step    = model.run(batch, cache)                                   # step.hidden [T, D], step.logits [R, V]: views
    more    = model.logits(rows)                                        # of the last run's hidden states

`Buffer` also knows `+`, `* number`, `.split(widths, -1)` and `.reshape(-1, heads, size)` / `.reshape(-1, width)`, so that a
Symbol can be a thin wrapper of it, or the Buffer itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from kvant.config.formats import StoredTensor
from kvant.config.model import CacheGroup
from kvant.errors import UnsupportedError

if TYPE_CHECKING:
    from kvant.native.build import Library
    from kvant.native.executor import NativeModel
    from kvant.native.packing import Shelf


class Kind(IntEnum):
    """Operations of the executor; the same numbers stand in `program.h`."""

    EMBEDDING = 0
    NORM = 1  # out = rms_norm(in0) [+ in1]
    HEAD_NORM = 2
    ROTARY = 3
    STORE_KV = 4
    ATTENTION = 5
    LINEAR = 6  # out = act(rms_norm(in0) W^T + bias) [+ in1]
    GATED = 7
    ADD = 8
    SCALE = 9


ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Columns [start, start + width) of value number `value`: fp32 [T, width], optionally seen as heads [T, heads, size]."""

    program: "Program"
    value: int
    start: int
    width: int

    def split(self, widths: Sequence[int], axis: int = -1) -> tuple["Buffer", ...]:
        """Neighbouring column ranges of this buffer; `widths` must add up to its width."""
        if sum(widths) != self.width or axis != -1:
            raise UnsupportedError(f"cannot split a buffer of {self.width} columns into {list(widths)} along axis {axis}")
        starts = np.cumsum([self.start, *widths[:-1]])
        return tuple(Buffer(self.program, self.value, int(s), w) for s, w in zip(starts, widths, strict=True))

    def reshape(self, *shape: int) -> "Buffer":
        """[T, N, H] and [T, N * H] are the same memory: a check of the sizes, and nothing else."""
        if shape[0] != -1 or int(np.prod(shape[1:])) != self.width:
            raise UnsupportedError(f"cannot see a buffer of {self.width} columns as {shape}")
        return self

    def __add__(self, other: "Buffer") -> "Buffer":
        return self.program.add(self, other)

    def __mul__(self, factor: float) -> "Buffer":
        return self.program.scale(self, factor)

    __rmul__ = __mul__


@dataclass(slots=True, eq=False)
class Operation:
    """One recorded operation. Unused fields keep their defaults."""

    kind: Kind
    inputs: list[Buffer]
    out: Buffer | None = None
    weights: tuple[StoredTensor, ...] = ()
    norm: np.ndarray | None = None  # fp32, offset included
    bias: np.ndarray | None = None
    frequencies: np.ndarray | None = None
    eps: float = 0.0
    scale: float = 1.0
    cap: float = 0.0  # 0: none
    layer: int = -1
    head_dim: int = 0
    window: int = 0  # 0: everything
    activation: int = -1
    name: str = field(default="", kw_only=True)  # what an error calls it

    @property
    def label(self) -> str:
        """What it is called whatever its layer: "q_proj + k_proj + v_proj", "rotary", "head"."""
        if self.kind != Kind.LINEAR:
            return self.kind.name.lower().replace("_", " ")
        if self.out is not None and self.out.value < 0:
            return "head"
        return " + ".join(weight.name.removesuffix(".weight").rsplit(".", 1)[-1] for weight in self.weights)


class Program:
    """Records a network; see the module's story for the order of calls."""

    def __init__(self, groups: Sequence[CacheGroup]):
        self.groups = tuple(groups)
        self.operations: list[Operation] = []
        self.widths: list[int] = []  # of every value
        self.final: Buffer | None = None
        self.head: Operation | None = None
        self._place = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}

    def place(self, layer: int) -> tuple[int, int]:
        """Group of `layer`, and its position inside the group."""
        if layer not in self._place:
            raise UnsupportedError(f"layer {layer} belongs to no cache group")
        return self._place[layer]

    def embedding(self, weight: StoredTensor, scale: float = 1.0) -> Buffer:
        """Rows of `weight` [V, D] by the batch's ids, times `scale`."""
        return self._record(Operation(Kind.EMBEDDING, [], weights=(weight,), scale=scale), weight.shape[1])

    def rms_norm(self, x: Buffer, weight: Any, eps: float, offset: float = 0.0) -> Buffer:
        """x / rms(x) * (weight + offset), over the whole width."""
        self._same(x.width, np.size(weight), "rms_norm")
        return self._record(Operation(Kind.NORM, [x], norm=_fp32(weight) + np.float32(offset), eps=eps), x.width)

    def head_norm(self, x: Buffer, weight: Any, eps: float, offset: float = 0.0) -> Buffer:
        """The same for every head of `weight`'s size by itself."""
        size = int(np.size(weight))
        self._same(x.width % size, 0, "head_norm")
        norm = _fp32(weight) + np.float32(offset)
        return self._record(Operation(Kind.HEAD_NORM, [x], norm=norm, eps=eps, head_dim=size), x.width)

    def linear(self, x: Buffer, weights: Sequence[StoredTensor], bias: Any = None, residual: Buffer | None = None) -> Buffer:
        """x W^T (+ bias) (+ residual): the matrices [out, in] stacked along their rows; `bias` fp32 [sum of outs]."""
        for weight in weights:
            self._same(x.width, weight.shape[1], f"linear {weight.name}")
        width = sum(weight.shape[0] for weight in weights)
        vector = None if bias is None else _fp32(bias)
        if vector is not None:
            self._same(width, vector.size, f"bias of {weights[0].name}")
        name = weights[0].name
        out = self._record(Operation(Kind.LINEAR, [x], weights=tuple(weights), bias=vector, name=name), width)
        return out if residual is None else self.add(residual, out)

    def rotary(self, x: Buffer, head_dim: int, inv_freq: Any, scale: float = 1.0) -> Buffer:
        """Rotate-half by position * inv_freq: the first 2 * len(inv_freq) columns of each head turn, times `scale`."""
        frequencies = _fp32(inv_freq)
        self._same(x.width % head_dim, 0, "rotary")
        if 2 * frequencies.size > head_dim:
            raise UnsupportedError(f"rotary: {frequencies.size} frequencies for heads of {head_dim}")
        op = Operation(Kind.ROTARY, [x], frequencies=frequencies, head_dim=head_dim, scale=scale)
        return self._record(op, x.width)

    def store_kv(self, k: Buffer, v: Buffer, layer: int) -> None:
        """Writes keys and values [T, K H] of `layer` into the cache, at the batch's slots."""
        group = self.groups[self.place(layer)[0]]
        for buffer in (k, v):
            self._same(buffer.width, group.num_kv_heads * group.head_dim, f"store_kv of layer {layer}")
        self.operations.append(Operation(Kind.STORE_KV, [k, v], layer=layer, head_dim=group.head_dim))

    def attention(
        self, q: Buffer, layer: int, scale: float, window: int | None = None, soft_cap: float | None = None
    ) -> Buffer:
        """Causal attention of q [T, N H] over the layer's cache; `store_kv` of the same layer comes before."""
        group = self.groups[self.place(layer)[0]]
        self._same(q.width % (group.num_kv_heads * group.head_dim), 0, f"attention of layer {layer}")
        op = Operation(Kind.ATTENTION, [q], layer=layer, head_dim=group.head_dim, scale=scale)
        op.window, op.cap = window or 0, soft_cap or 0.0
        return self._record(op, q.width)

    def gated(self, gate_up: Buffer, activation: str) -> Buffer:
        """act(gate) * up: [T, 2F] -> [T, F]."""
        if activation not in ACTIVATIONS:
            raise UnsupportedError(f"activation {activation!r} is not built here; supported: {', '.join(ACTIVATIONS)}")
        return self._record(Operation(Kind.GATED, [gate_up], activation=ACTIVATIONS[activation]), gate_up.width // 2)

    def add(self, a: Buffer, b: Buffer) -> Buffer:
        self._same(a.width, b.width, "add")
        return self._record(Operation(Kind.ADD, [a, b]), a.width)

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return self._record(Operation(Kind.SCALE, [x], scale=float(factor)), x.width)

    def output(self, x: Buffer) -> None:
        """Names the final hidden states."""
        self.final = x

    def logits(self, weights: Sequence[StoredTensor], soft_cap: float | None = None) -> None:
        """The head, applied to the rows that a run asks for."""
        width = sum(weight.shape[0] for weight in weights)
        head = Operation(Kind.LINEAR, [], weights=tuple(weights), cap=soft_cap or 0.0, name=weights[0].name)
        head.out = Buffer(self, -1, 0, width)
        self.head = head

    def finish(
        self, library: "Library", *, threads: int, deterministic: bool = False, shelf: "Shelf | None" = None
    ) -> "NativeModel":
        """Fuses, packs and hands over. `deterministic`: one kernel per weight whatever the number of rows.

        `shelf`: where packed weights are kept from one start to the next.
        """
        from kvant.native.executor import NativeModel

        return NativeModel(self, library, threads=threads, deterministic=deterministic, shelf=shelf)

    def _record(self, op: Operation, width: int) -> Buffer:
        op.out = Buffer(self, len(self.widths), 0, width)
        op.name = op.name or op.kind.name.lower()
        self.widths.append(width)
        self.operations.append(op)
        return op.out

    def _same(self, actual: int, expected: int, what: str) -> None:
        if actual != expected:
            raise UnsupportedError(f"{what}: {actual} columns where {expected} fit (operation {len(self.operations)})")


def _fp32(values: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(values, np.float32).reshape(-1))
