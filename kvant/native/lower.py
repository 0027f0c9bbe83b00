"""Lowering: the recorded operations become fewer ones, and values get memory.

Fusions, each one rule below:

    rms_norm, linear          -> linear with a norm        the normalised row exists only while it is quantised
    linear, gated             -> linear with activation    gate and up panels meet in registers
    add(x, linear)            -> linear with residual
    add(x, rms_norm)          -> norm with residual

Memory: a value lives from the operation that makes it to the last one that reads it, and its columns are then used again.
Per-head norms and rotary write over their input, and a sum over its residual, where nobody reads that later.
"""

from dataclasses import dataclass, replace

from kvant.native.program import Buffer, Kind, Operation, Program

ALIGNMENT = 16  # columns: every row of every value starts on a cache line


@dataclass(frozen=True, slots=True)
class Place:
    """Columns [start, ...) of root value `root`: where a value's numbers really are."""

    root: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """Operations in order, the head last; and where each value lies: (floats per row before its slot, stride, first column)."""

    operations: list[Operation]
    places: dict[int, tuple[int, int, int]]
    row_floats: int


def lower(program: Program) -> Lowered:
    """Fuses and places. The program must have an output and a head."""
    operations = [_copy(op) for op in program.operations]
    assert program.final is not None and program.head is not None
    head = _copy(program.head)
    head.inputs = [program.final]
    operations.append(head)
    operations = _norm_into_linear(operations)
    operations = _gate_into_linear(operations)
    operations = _sum_into_producer(operations)
    roots = _places(operations, program.widths)
    return _slots(operations, program.widths, roots)


def _copy(op: Operation) -> Operation:
    return replace(op, inputs=list(op.inputs))


def _whole(buffer: Buffer) -> bool:
    return buffer.start == 0 and buffer.width == buffer.program.widths[buffer.value]


def _readers(operations: list[Operation]) -> dict[int, list[Operation]]:
    readers: dict[int, list[Operation]] = {}
    for op in operations:
        for buffer in op.inputs:
            readers.setdefault(buffer.value, []).append(op)
    return readers


def _producers(operations: list[Operation]) -> dict[int, Operation]:
    return {op.out.value: op for op in operations if op.out is not None and op.out.value >= 0}


def _norm_into_linear(operations: list[Operation]) -> list[Operation]:
    readers = _readers(operations)
    folded = set()
    for norm in operations:
        if norm.kind != Kind.NORM or norm.out is None:
            continue
        users = readers.get(norm.out.value, [])
        head = operations[-1]  # its rows are gathered, and the normalised hidden states are an output of their own
        if not users or any(u.kind != Kind.LINEAR or u.norm is not None or u is head or not _whole(u.inputs[0]) for u in users):
            continue
        for user in users:
            user.inputs[0], user.norm, user.eps = norm.inputs[0], norm.norm, norm.eps
        folded.add(id(norm))
    return [op for op in operations if id(op) not in folded]


def _gate_into_linear(operations: list[Operation]) -> list[Operation]:
    readers, producers = _readers(operations), _producers(operations)
    folded = set()
    for gated in operations:
        if gated.kind != Kind.GATED:
            continue
        source = gated.inputs[0]
        linear = producers.get(source.value)
        if linear is None or linear.kind != Kind.LINEAR or len(readers[source.value]) != 1 or not _whole(source):
            continue
        if len(linear.weights) != 2 or linear.weights[0].shape != linear.weights[1].shape:
            continue
        linear.activation, linear.out = gated.activation, gated.out
        folded.add(id(gated))
    return [op for op in operations if id(op) not in folded]


def _sum_into_producer(operations: list[Operation]) -> list[Operation]:
    readers, producers = _readers(operations), _producers(operations)
    order = {id(op): i for i, op in enumerate(operations)}
    folded = set()
    for add in operations:
        if add.kind != Kind.ADD:
            continue
        for residual, term in (add.inputs, add.inputs[::-1]):
            producer = producers.get(term.value)
            if producer is None or producer.kind not in (Kind.LINEAR, Kind.NORM) or len(producer.inputs) != 1:
                continue
            source = producers.get(residual.value)
            known = source is not None and order[id(source)] < order[id(producer)]
            if known and _whole(term) and len(readers[term.value]) == 1 and producer is not add:
                producer.inputs.append(residual)
                producer.out = add.out
                assert add.out is not None
                producers[add.out.value] = producer
                folded.add(id(add))
                break
    return [op for op in operations if id(op) not in folded]


def _places(operations: list[Operation], widths: list[int]) -> dict[int, Place]:
    """Which values are written over others."""
    places: dict[int, Place] = {}
    for i, op in enumerate(operations):
        if op.out is None or op.out.value < 0:
            continue
        target = None
        if op.kind in (Kind.HEAD_NORM, Kind.ROTARY):
            target = op.inputs[0]
        elif op.kind in (Kind.LINEAR, Kind.NORM) and len(op.inputs) == 2:
            target = op.inputs[1]
        if target is not None and not _read_later(operations[i + 1 :], target) and not _overlaps(op.inputs[0], target, op):
            place = places[target.value]
            places[op.out.value] = Place(place.root, place.start + target.start)
        else:
            places[op.out.value] = Place(op.out.value, 0)
    return places


def _overlaps(source: Buffer, target: Buffer, op: Operation) -> bool:
    """A linear or norm must not overwrite what it still reads; per-head operations may."""
    return op.kind in (Kind.LINEAR, Kind.NORM) and source.value == target.value


def _read_later(operations: list[Operation], target: Buffer) -> bool:
    end = target.start + target.width
    return any(
        buffer.value == target.value and buffer.start < end and target.start < buffer.start + buffer.width
        for op in operations
        for buffer in op.inputs
    )


def _slots(operations: list[Operation], widths: list[int], places: dict[int, Place]) -> Lowered:
    last: dict[int, int] = {}
    for i, op in enumerate(operations):
        for buffer in [*op.inputs, *([op.out] if op.out is not None and op.out.value >= 0 else [])]:
            last[places[buffer.value].root] = i
    slots: list[tuple[int, int]] = []  # (offset, stride)
    free: list[int] = []
    slot_of: dict[int, int] = {}
    row_floats = 0
    for i, op in enumerate(operations):
        if op.out is not None and op.out.value >= 0 and places[op.out.value].root == op.out.value:
            stride = -(-widths[op.out.value] // ALIGNMENT) * ALIGNMENT
            slot = next((s for s in free if slots[s][1] == stride), None)
            if slot is None:
                slot = len(slots)
                slots.append((row_floats, stride))
                row_floats += stride
            else:
                free.remove(slot)
            slot_of[op.out.value] = slot
        free += [slot_of[root] for root, end in last.items() if end == i]
    where = {value: (*slots[slot_of[place.root]], place.start) for value, place in places.items()}
    return Lowered(operations, where, row_floats)
