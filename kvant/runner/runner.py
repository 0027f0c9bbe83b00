"""TorchRunner: the device side of a step. Four verbs, in this order:

prepare   schedule -> arrays on the device, attention planned
run       the network: block copies, then hidden states
select    logits of the wanted rows -> drawn ids, log-probabilities; no waiting for the device
arrive    the Selection reaches the host (a method of what `select` returns)
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.storage import KVStorage
from kvant.batch import Batch, Hidden
from kvant.config.memory import SCORE_ROWS
from kvant.runner.batch_builder import PromptScore, SelectPlan, build
from kvant.runner.pending import Pending, Prepared
from kvant.runner.seats import SeatTable, TokenCounts
from kvant.sampling import logprobs, sampler
from kvant.types import Schedule, TokenLogprobs


class TorchRunner:
    """Runs one network with torch on one device."""

    executor = "torch"

    def __init__(self, model: Any, storage: KVStorage, seats: SeatTable, attention: Any, num_tokens_known: int):
        self.model = model
        self.storage = storage
        self.seats = seats
        self.attention = attention  # class: (staged, batch, storage) -> one step's attention
        # Ids from here on are padding of the embedding matrix: the tokenizer has no text for them.
        self.vocab_size = num_tokens_known
        self.embedding_rows = model.config.vocab_size
        self.device = next(iter(storage.keys[0])).device

    @torch.inference_mode()
    def prepare(self, schedule: Schedule) -> Prepared:
        staged, plan = build(schedule, self.seats, self.vocab_size)
        batch = _to_device(staged, self.device)
        self._count_tokens(schedule, plan)
        return Prepared(batch, self.attention(staged, batch, self.storage), plan)

    @torch.inference_mode()
    def run(self, prepared: Prepared) -> Hidden:
        for number, group in enumerate(prepared.batch.groups):
            if group.kv_copies is not None:
                self.storage.copy_blocks(number, group.kv_copies)
        return self.model(prepared.batch, prepared.cache)

    @torch.inference_mode()
    def select(self, prepared: Prepared, hidden: Hidden, schedule: Schedule) -> Pending:
        plan = prepared.plan
        logits = self._logits(hidden.final[prepared.batch.logit_rows])
        ids = sampler.draw(logits, plan.draw, *self._counts(plan))
        reports: list[TokenLogprobs] = []
        if plan.logprobs:
            draws = torch.tensor([draw for draw, _ in plan.logprobs], device=self.device)
            rows = torch.from_numpy(plan.draw.rows).to(self.device)[draws]
            reports = logprobs.gather(logits[rows], ids[draws], [count for _, count in plan.logprobs])
        scores = {score.row: self._score(score, hidden.final) for score in plan.scores}
        return Pending(len(schedule.rows), plan, ids, sampler.finite(logits), reports, scores)

    def _logits(self, rows: Tensor) -> Tensor:
        return self.model.logits(rows)[:, : self.vocab_size]

    def _score(self, score: PromptScore, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        scored: list[TokenLogprobs] = []
        for first in range(0, len(score.batch_rows), SCORE_ROWS):
            part = slice(first, first + SCORE_ROWS)
            rows = torch.from_numpy(score.batch_rows[part]).to(self.device)
            targets = torch.from_numpy(score.targets[part]).to(self.device)
            scored += logprobs.gather(self._logits(hidden[rows]), targets, [score.num_top] * len(targets))
        return tuple(scored)

    def _count_tokens(self, schedule: Schedule, plan: SelectPlan) -> None:
        for logit_row, seat in plan.draw.penalised:
            counts = self.seats.counts.get(seat)
            if counts is None:
                counts = self.seats.counts[seat] = TokenCounts(self.vocab_size, self._zeros)
            counts.catch_up(schedule.rows[plan.drawing[logit_row]].sequence, _scatter_add)

    def _counts(self, plan: SelectPlan) -> tuple[Tensor | None, Tensor | None]:
        if not plan.draw.penalised:
            return None, None
        counts = [self.seats.counts[seat] for _, seat in plan.draw.penalised]
        return torch.stack([c.generated for c in counts]), torch.stack([c.seen for c in counts]) > 0

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, device=self.device)


def _scatter_add(target: Tensor, ids: list[int]) -> None:
    # Ids beyond the tokenizer's can stand in a prompt given as ids; they have no logit to penalise.
    known = torch.tensor([token for token in ids if token < target.shape[0]], device=target.device, dtype=torch.int64)
    target.index_add_(0, known, torch.ones_like(known, dtype=target.dtype))


def _to_device(staged: Batch, device: torch.device) -> Batch:
    def move(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

    groups = tuple(
        replace(
            g,
            slot_mapping=move(g.slot_mapping),
            block_table=move(g.block_table),
            kv_lens=move(g.kv_lens),
            kv_copies=move(g.kv_copies),
        )
        for g in staged.groups
    )
    moved = {name: move(getattr(staged, name)) for name in ("input_ids", "positions", "query_start", "seats", "logit_rows")}
    return replace(staged, groups=groups, **moved)
