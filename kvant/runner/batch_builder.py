"""From a Schedule to a Batch: the only place where sequences become arrays.

Everything is written into numpy on the host; the torch runner copies it to its device, the native one passes pointers.
What the network may know is the Batch; what choosing tokens needs beside it is the SelectPlan.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvant.batch import Batch, GroupBatch
from kvant.runner.seats import SeatTable
from kvant.sampling.plan import DrawPlan
from kvant.types import Schedule, Scheduled


class PromptScore(NamedTuple):
    """Prompt log-probabilities of one row: batch rows, the tokens that follow there, alternatives per position."""

    row: int  # of the schedule
    batch_rows: np.ndarray  # [P]
    targets: np.ndarray  # [P]
    num_top: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SelectPlan:
    """What `select` does with the hidden states. `drawing[i]` is the schedule row that logit row i belongs to."""

    drawing: list[int]
    draw: DrawPlan
    logprobs: list[tuple[int, int]]  # (draw, alternatives) for draws that report log-probabilities
    scores: list[PromptScore]


def build(schedule: Schedule, seats: SeatTable, vocab_size: int) -> tuple[Batch, SelectPlan]:
    """The step's arrays, in numpy. Updates the seats of the schedule's rows. Ids below `vocab_size` can be drawn."""
    for row in schedule.rows:
        seats.update(row)
    rows = schedule.rows
    lengths = np.array([row.num_tokens for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int64)
    seat_of = np.array([row.sequence.seat for row in rows], np.int64)
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    owner = np.repeat(np.arange(len(rows)), lengths)  # [T] row of every token
    positions = np.arange(int(query_start[-1]), dtype=np.int64) - query_start[owner] + starts[owner]
    drawing = [number for number, row in enumerate(rows) if row.want is not None]
    batch = Batch(
        input_ids=np.array([token for row in rows for token in _tokens(row)], np.int64),
        positions=positions,
        query_start=query_start,
        seats=seat_of,
        logit_rows=(query_start[1:][drawing] - 1).astype(np.int64),
        groups=tuple(
            _group(seats, number, seat_of, owner, positions, (starts + lengths).astype(np.int32), schedule)
            for number in range(len(seats.groups))
        ),
    )
    plan = SelectPlan(
        drawing=drawing,
        draw=_draw_plan(rows, drawing, seats, vocab_size),
        logprobs=_logprob_rows(rows, drawing),
        scores=[score for number, row in enumerate(rows) if (score := _prompt_score(row, number, query_start)) is not None],
    )
    return batch, plan


def _tokens(row: Scheduled) -> list[int]:
    known = row.sequence.tokens[row.start : row.start + row.num_tokens - len(row.drafts)]
    return known + [draft.token for draft in row.drafts] if row.drafts else known


def _group(
    seats: SeatTable,
    number: int,
    seat_of: np.ndarray,
    owner: np.ndarray,
    positions: np.ndarray,
    kv_lens: np.ndarray,
    schedule: Schedule,
) -> GroupBatch:
    size = seats.groups[number].block_size
    width = max(1, -(-int(kv_lens.max()) // size)) if len(kv_lens) else 1
    table = seats.block_tables[number][seat_of, :width]
    slots = table[owner, positions // size].astype(np.int64) * size + positions % size
    copies = schedule.kv_copies[number] if schedule.kv_copies else ()
    return GroupBatch(slots, table, kv_lens, np.array(copies, np.int64).reshape(-1, 2) if copies else None)


def _draw_plan(rows: tuple[Scheduled, ...], drawing: list[int], seats: SeatTable, vocab_size: int) -> DrawPlan:
    seat_of = np.array([rows[number].sequence.seat for number in drawing], np.int64)
    draw_rows, indices = [], []
    forbidden: list[tuple[int, np.ndarray]] = []
    biased: list[tuple[int, np.ndarray, np.ndarray]] = []
    for logit_row, number in enumerate(drawing):
        want = rows[number].want
        assert want is not None
        draw_rows += [logit_row] * want.count
        indices += range(want.first_index, want.first_index + want.count)
        ids = [token for token in _forbidden(rows[number]) if token < vocab_size]  # files may name ends beyond it
        if ids:
            forbidden.append((logit_row, np.array(sorted(ids), np.int64)))
        if pairs := rows[number].sequence.request.sampling.logit_bias:
            biased.append((logit_row, np.array([i for i, _ in pairs], np.int64), np.array([b for _, b in pairs], np.float32)))
    penalised = [(row, int(seat)) for row, seat in enumerate(seat_of) if seats.has_penalties[seat]]
    numbers = seats.penalties[[seat for _, seat in penalised]] if penalised else np.zeros((0, 3), np.float32)
    return DrawPlan(
        rows=np.array(draw_rows, np.int64),
        indices=np.array(indices, np.int64),
        temperature=seats.temperature[seat_of],
        top_k=seats.top_k[seat_of],
        top_p=seats.top_p[seat_of],
        min_p=seats.min_p[seat_of],
        seeds=seats.seeds[seat_of],
        positions=np.array([rows[number].start + rows[number].num_tokens for number in drawing], np.int64),
        forbidden=forbidden,
        biased=biased,
        penalised=penalised,
        presence=numbers[:, 0],
        frequency=numbers[:, 1],
        repetition=numbers[:, 2],
    )


def _forbidden(row: Scheduled) -> set[int]:
    """End tokens cannot be drawn before `min_tokens`."""
    request = row.sequence.request
    if row.sequence.num_output_tokens >= request.sampling.min_tokens:
        return set()
    ends = set(request.sampling.stop_token_ids)
    return ends if request.sampling.ignore_eos else ends | request.end_token_ids


def _logprob_rows(rows: tuple[Scheduled, ...], drawing: list[int]) -> list[tuple[int, int]]:
    reported = []
    draw = 0
    for number in drawing:
        want, wanted = rows[number].want, rows[number].sequence.request.sampling.logprobs
        assert want is not None
        if wanted is not None:
            reported += [(draw + k, wanted) for k in range(want.count)]
        draw += want.count
    return reported


def _prompt_score(row: Scheduled, number: int, query_start: np.ndarray) -> PromptScore | None:
    if not row.score_prompt:
        return None
    # The last prompt token has no successor in the prompt: its row belongs to the first drawn token.
    last = min(row.start + row.num_tokens, row.sequence.num_prompt_tokens - 1)
    count = last - row.start
    if count <= 0:
        return None
    first_row = int(query_start[number])
    targets = np.array(row.sequence.tokens[row.start + 1 : last + 1], np.int64)
    num_top = row.sequence.request.sampling.prompt_logprobs or 0
    return PromptScore(number, np.arange(first_row, first_row + count), targets, num_top)
