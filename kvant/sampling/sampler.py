"""Sampler: logits of one step's rows in, token ids out.

The order is fixed: penalties, biases, forbidden tokens, temperature, top-k, top-p, min-p, draw. A draw takes the largest of
logit + noise, the noise being the request's own for this position (`random.py`).
"""

import numpy as np
import torch
from torch import Tensor

from kvant.config.sampling import GREEDY_TEMPERATURE
from kvant.sampling import logits as edit
from kvant.sampling.plan import DrawPlan
from kvant.sampling.random import gumbel, row_keys


def draw(logits: Tensor, plan: DrawPlan, counts: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
    """`logits` [R, V] fp32 -> ids [Z] int64. `counts` and `seen` [rows of plan.penalised, V] feed the penalties.

    Rows that hold NaN draw something arbitrary; the caller reports them (`finite`).
    """
    logits = _edited(logits, plan, counts, seen)
    ids = logits.argmax(-1)[_tensor(plan.rows, logits)]
    random = np.flatnonzero(plan.temperature[plan.rows] >= GREEDY_TEMPERATURE)
    if random.size == 0:
        return ids
    rows, place = np.unique(plan.rows[random], return_inverse=True)
    filtered = _filtered(logits, rows, plan)
    of_draw = plan.rows[random]
    seeds, positions = _tensor(plan.seeds[of_draw], logits), _tensor(plan.positions[of_draw], logits)
    keys = row_keys(seeds, _tensor(plan.indices[random], logits), positions)
    ids[_tensor(random, logits)] = (filtered[_tensor(place, logits)] + gumbel(keys, logits.shape[-1])).argmax(-1)
    return ids


def finite(logits: Tensor) -> Tensor:
    """Which rows [R] of `logits` [R, V] can be drawn from: no NaN and no infinity at the top. A maximum shows both."""
    return torch.isfinite(logits.max(-1).values)


def _edited(logits: Tensor, plan: DrawPlan, counts: Tensor | None, seen: Tensor | None) -> Tensor:
    if plan.forbidden or plan.biased or plan.penalised:
        logits = logits.clone()  # the raw logits are still needed: log-probabilities are of those
    if plan.penalised:
        rows = _tensor(np.array([row for row, _ in plan.penalised]), logits)
        presence, frequency, repetition = (
            _tensor(numbers, logits)[:, None] for numbers in (plan.presence, plan.frequency, plan.repetition)
        )
        logits[rows] = edit.penalise(logits[rows], counts, seen, presence, frequency, repetition)
    for row, ids, biases in plan.biased:
        logits[row, _tensor(ids, logits)] += _tensor(biases, logits)
    for row, ids in plan.forbidden:
        edit.forbid(logits, row, _tensor(ids, logits))
    return logits


def _filtered(logits: Tensor, rows: np.ndarray, plan: DrawPlan) -> Tensor:
    """Logits [len(rows), V] in fp64 after temperature and filters, the best token's at 0."""
    scaled = logits[_tensor(rows, logits)] / _tensor(plan.temperature[rows], logits)[:, None]
    # Tiny temperatures overflow to infinity; relative to the best token everything stays finite.
    scaled = scaled - scaled.max(-1, keepdim=True).values
    for values, off, threshold in (
        (plan.top_k[rows], 0, edit.top_k_threshold),
        (plan.top_p[rows], 1, edit.top_p_threshold),
        (plan.min_p[rows], 0, edit.min_p_threshold),
    ):
        used = np.flatnonzero(values != off)
        if used.size == len(rows):
            scaled = edit.keep(scaled, threshold(scaled, _tensor(values, logits)))
        elif used.size:
            some = _tensor(used, logits)
            scaled[some] = edit.keep(scaled[some], threshold(scaled[some], _tensor(values[used], logits)))
    return scaled.double()


def _tensor(array: np.ndarray | None, like: Tensor) -> Tensor:
    assert array is not None
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
