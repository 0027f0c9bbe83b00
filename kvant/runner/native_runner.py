"""NativeRunner: the same four verbs on the native executor. numpy arrays in, one call per step, no torch.

The network was recorded once (`native/record.py`); `run` passes pointers to the arrays that the batch builder wrote.
"""

from typing import Any

import numpy as np

from kvant.config.memory import SCORE_ROWS
from kvant.runner.batch_builder import PromptScore, SelectPlan, build
from kvant.runner.pending import Pending, Prepared
from kvant.runner.seats import SeatTable, TokenCounts
from kvant.sampling import host
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
        return self.model.run(prepared.batch, prepared.cache)

    def select(self, prepared: Prepared, step: Any, schedule: Schedule) -> Pending:
        plan = prepared.plan
        logits = step.logits[:, : self.vocab_size]
        summary = self.model.summarize(logits)
        ids = host.draw(logits, plan.draw, *self._counts(plan), best=summary.ids)
        reports: list[TokenLogprobs] = []
        if plan.logprobs:
            draws = np.array([draw for draw, _ in plan.logprobs])
            reports = host.gather(logits[plan.draw.rows[draws]], ids[draws], [count for _, count in plan.logprobs])
        # Last: asking for more logits overwrites the ones above.
        scores = {score.row: self._score(score) for score in plan.scores}
        return Pending(len(schedule.rows), plan, ids, summary.finite, reports, scores)

    def _score(self, score: PromptScore) -> tuple[TokenLogprobs, ...]:
        scored: list[TokenLogprobs] = []
        for first in range(0, len(score.batch_rows), SCORE_ROWS):
            part = slice(first, first + SCORE_ROWS)
            logits = self.model.logits(score.batch_rows[part])[:, : self.vocab_size]
            scored += host.gather(logits, score.targets[part], [score.num_top] * len(logits))
        return tuple(scored)

    def _counts(self, plan: SelectPlan) -> tuple[np.ndarray | None, np.ndarray | None]:
        if not plan.draw.penalised:
            return None, None
        counts = [self.seats.counts[seat] for _, seat in plan.draw.penalised]
        return np.stack([c.generated for c in counts]), np.stack([c.seen for c in counts]) > 0


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.float32)


def _scatter_add(target: np.ndarray, ids: list[int]) -> None:
    known = np.array([token for token in ids if token < len(target)], np.int64)
    np.add.at(target, known, 1)
