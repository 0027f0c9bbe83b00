"""NativeRunner: the same four verbs on the native executor. numpy arrays in, one call per step, no torch.

The network was recorded once (`native/record.py`); `run` passes pointers to the arrays that the batch builder wrote.
"""

from typing import Any

import numpy as np

from kvant.config.memory import SCORE_ROWS
from kvant.native.executor import RowDraws
from kvant.runner.batch_builder import PromptScore, build
from kvant.runner.pending import Pending, Prepared
from kvant.runner.seats import SeatTable, TokenCounts
from kvant.sampling import host
from kvant.sampling.plan import DrawPlan
from kvant.types import Schedule, TokenLogprobs


class NativeRunner:
    """Runs one recorded network on the CPU."""

    executor = "native"

    def __init__(self, model: Any, cache: Any, seats: SeatTable, num_tokens_known: int, embedding_rows: int):
        self.model = model  # native.executor.NativeModel
        self.cache = cache
        self.seats = seats
        self.vocab_size = num_tokens_known
        self.embedding_rows = embedding_rows

    def prepare(self, schedule: Schedule) -> Prepared:
        batch, plan = build(schedule, self.seats, self.vocab_size)
        for logit_row, seat in plan.draw.penalised:
            counts = self.seats.counts.get(seat)
            if counts is None:
                counts = self.seats.counts[seat] = TokenCounts(self.vocab_size, _zeros)
            counts.catch_up(schedule.rows[plan.drawing[logit_row]].sequence, _scatter_add)
        return Prepared(batch, self.cache, plan)

    def run(self, prepared: Prepared) -> Any:
        """Hidden states and logits of the wanted rows: views of the executor's memory, valid until the next run."""
        return self.model.run(prepared.batch, prepared.cache, drawable=self.vocab_size)

    def select(self, prepared: Prepared, step: Any, schedule: Schedule) -> Pending:
        plan = prepared.plan
        logits = step.logits[:, : self.vocab_size]
        ids = self._draw(logits, step.best, plan.draw)
        reports: list[TokenLogprobs] = []
        if plan.logprobs:
            draws = np.array([draw for draw, _ in plan.logprobs])
            reports = host.gather(logits[plan.draw.rows[draws]], ids[draws], [count for _, count in plan.logprobs])
        # Last: asking for more logits overwrites the ones above.
        scores = {score.row: self._score(score) for score in plan.scores}
        return Pending(len(schedule.rows), plan, ids, step.finite, reports, scores)

    def _score(self, score: PromptScore) -> tuple[TokenLogprobs, ...]:
        scored: list[TokenLogprobs] = []
        for first in range(0, len(score.batch_rows), SCORE_ROWS):
            part = slice(first, first + SCORE_ROWS)
            logits = self.model.logits(score.batch_rows[part])[:, : self.vocab_size]
            scored += host.gather(logits, score.targets[part], [score.num_top] * len(logits))
        return tuple(scored)

    def _draw(self, logits: np.ndarray, best: np.ndarray, plan: DrawPlan) -> np.ndarray:
        """Ids [Z] from `logits` [R, V], whose largest stand at `best` [R]."""
        counts = [self.seats.counts[seat] for _, seat in plan.penalised]
        edited = host.edited(logits, plan, [c.generated for c in counts], [c.seen for c in counts])
        for row, values in edited.items():
            best[row] = values.argmax()
        ids = best[plan.rows]
        random = host.random_draws(plan)
        if random.size:
            rows, starts = np.unique(plan.rows[random], return_index=True)  # a row's draws are neighbours
            keys = np.split(host.draw_keys(plan, random), starts[1:])
            ids[random] = np.concatenate(self.model.draw(_row_draws(logits, edited, plan, rows.tolist(), keys)))
        return ids


def _row_draws(
    logits: np.ndarray, edited: dict[int, np.ndarray], plan: DrawPlan, rows: list[int], keys: list[np.ndarray]
) -> list[RowDraws]:
    with np.errstate(divide="ignore"):
        log_min_p = np.log(plan.min_p)  # minus infinity where it is off
    return [
        RowDraws(edited.get(row, logits[row]), k, plan.temperature[row], plan.top_k[row], plan.top_p[row], log_min_p[row])
        for row, k in zip(rows, keys, strict=True)
    ]


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.float32)


def _scatter_add(target: np.ndarray, ids: list[int]) -> None:
    known = np.array([token for token in ids if token < len(target)], np.int64)
    np.add.at(target, known, 1)
