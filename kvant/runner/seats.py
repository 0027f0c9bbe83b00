"""Seats: what the device side keeps of a running sequence, by seat number, so that a step sends only what changed.

    seat 7:  block tables of every group · temperature, top-k, ... · seed · token counts (only with penalties)

A seat is written when a sequence takes it and touched afterwards only where its block tables grew. Everything here can be
rebuilt from the sequence's tokens, so preemption drops it without a word.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from kvant.config.model import CacheGroup
from kvant.types import Scheduled, Sequence


class SeatTable:
    """Arrays over all seats, on the host."""

    def __init__(self, num_seats: int, groups: Seq[CacheGroup], max_model_len: int):
        self.groups = tuple(groups)
        # One entry more than the context needs: drafts and a step in flight may reach into the next block.
        widths = [-(-max_model_len // group.block_size) + 1 for group in groups]
        self.block_tables = [np.zeros((num_seats, width), np.int32) for width in widths]
        self.temperature = np.zeros(num_seats, np.float32)
        self.top_k = np.zeros(num_seats, np.int64)
        self.top_p = np.ones(num_seats, np.float32)
        self.min_p = np.zeros(num_seats, np.float32)
        self.seeds = np.zeros(num_seats, np.int64)
        self.penalties = np.zeros((num_seats, 3), np.float32)  # presence, frequency, repetition
        self.has_penalties = np.zeros(num_seats, np.bool_)
        self.counts: dict[int, TokenCounts] = {}

    def update(self, row: Scheduled) -> None:
        """Brings the row's seat up to date."""
        sequence, seat = row.sequence, row.sequence.seat
        assert seat is not None
        if row.newly_seated:
            self._take(seat, sequence)
        for table, blocks, first in zip(self.block_tables, sequence.tables, row.table_from, strict=True):
            if first < len(blocks):
                table[seat, first : len(blocks)] = blocks[first:]

    def _take(self, seat: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.temperature[seat] = 0.0 if sampling.greedy else sampling.temperature
        self.top_k[seat] = max(sampling.top_k, 0)
        self.top_p[seat] = sampling.top_p
        self.min_p[seat] = sampling.min_p
        self.seeds[seat] = sequence.request.seed
        self.has_penalties[seat] = sampling.has_penalties
        self.penalties[seat] = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        self.counts.pop(seat, None)
        for table in self.block_tables:
            table[seat] = 0


class TokenCounts:
    """How often each token occurs in one sequence: what penalties need. Grows with the sequence."""

    def __init__(self, vocab_size: int, zeros: Any):
        self.generated = zeros(vocab_size)  # fp32 [V]
        self.seen = zeros(vocab_size)  # fp32 [V], prompt included; > 0 means seen
        self.num_counted = 0

    def catch_up(self, sequence: Sequence, add: Any) -> None:
        """Counts the tokens that came since the last call; `add(target, ids)` is the device's scatter-add."""
        fresh = sequence.tokens[self.num_counted :]
        if not fresh:
            return
        prompt_part = max(0, sequence.num_prompt_tokens - self.num_counted)
        add(self.seen, fresh)
        if fresh[prompt_part:]:
            add(self.generated, fresh[prompt_part:])
        self.num_counted = len(sequence.tokens)
