"""Recording: a network's `forward` is run once with symbols instead of tensors, and what it would compute is written down.

A symbol is a `Buffer` of the Program (hidden states, queries, ...) or an `Input` (token ids, positions). Bricks notice symbols
among their arguments and emit their operation; family files only wire bricks together and use the few operators that a Buffer
knows (`+`, `*` by a number, `split`, `reshape`), so one `forward` serves both worlds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvant.batch import Batch
from kvant.config.model import CacheGroup
from kvant.native.program import Buffer, Program


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """Something that comes with every batch: "ids" or "positions"."""

    program: Program
    name: str


Symbol = Buffer | Input


class RecordingCache:
    """Stands where a step's planned attention stands: writes the cache operations down."""

    def __init__(self, program: Program):
        self.program = program

    def attend(self, q: Buffer, k: Buffer, v: Buffer, rule: Any) -> Buffer:
        """`rule` is an AttentionRule."""
        self.program.store_kv(k, v, rule.layer)
        return self.program.attention(q, rule.layer, rule.scale, rule.window, rule.soft_cap)


def record(model: Any, groups: Sequence[CacheGroup]) -> Program:
    """The program of `model`, whose bricks hold their weights as stored (`Brick.keep`), over the cache of `groups`."""
    program = Program(groups)
    batch = Batch(
        input_ids=Input(program, "ids"),
        positions=Input(program, "positions"),
        query_start=None,
        seats=None,
        logit_rows=None,
        groups=(),
    )
    hidden = model(batch, RecordingCache(program))
    program.output(hidden.final)
    model.logits(hidden.final)
    return program
