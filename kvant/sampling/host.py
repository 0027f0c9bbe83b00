"""The sampler on the host: the same arithmetic as `sampler.py` and `logprobs.py`, for the runner that needs no torch.

The two are held equal by tests, number for number: a request must not change its text because another machine runs it.
Drawing itself has a fast twin in C++ (`native/draw.h`), which the native runner uses; `draw` is its reference.
"""

from collections.abc import Sequence

import numpy as np

from kvant.config.sampling import GREEDY_TEMPERATURE
from kvant.sampling.plan import DrawPlan
from kvant.types import TokenLogprobs

Array = np.ndarray


def draw(logits: Array, plan: DrawPlan, counts: Sequence[Array] = (), seen: Sequence[Array] = ()) -> Array:
    """`logits` [R, V] fp32 -> ids [Z] int64; see `sampler.draw`."""
    logits = logits.copy()
    for row, values in edited(logits, plan, counts, seen).items():
        logits[row] = values
    ids = logits.argmax(-1)[plan.rows]
    random = random_draws(plan)
    if random.size == 0:
        return ids
    keys = draw_keys(plan, random)
    for row in np.unique(plan.rows[random]):
        filtered = _filtered(logits[row], plan, int(row))
        # Noise can lift a token by 26 over another at the most; whoever stands lower needs none.
        candidates = np.flatnonzero(filtered > -26.1)
        if candidates.size:  # else the row is not a number, which the caller reports
            for draw in np.flatnonzero(plan.rows[random] == row):
                ids[random[draw]] = candidates[(filtered[candidates] + gumbel(keys[draw], candidates)).argmax()]
    return ids


def random_draws(plan: DrawPlan) -> Array:
    """Which of the plan's draws are not greedy."""
    return np.flatnonzero(plan.temperature[plan.rows] >= GREEDY_TEMPERATURE)


def draw_keys(plan: DrawPlan, draws: Array) -> Array:
    """uint64 [len(draws)]: the keys of their noise."""
    rows = plan.rows[draws]
    return row_keys(plan.seeds[rows], plan.indices[draws], plan.positions[rows])


def gather(logits: Array, tokens: Array, num_top: list[int]) -> list[TokenLogprobs]:
    """`logits` [P, V], `tokens` [P]; see `logprobs.gather`."""
    reports = []
    for row, token, top in zip(logits, tokens.tolist(), num_top, strict=True):
        best = row.max()
        normaliser = best + np.log(np.exp(row - best).sum(dtype=np.float64))
        ids = np.argpartition(row, -top)[-top:] if 0 < top < len(row) else np.arange(len(row) if top else 0)
        ids = ids[np.lexsort((ids, -row[ids]))]
        alternatives = tuple((int(i), float(row[i] - normaliser)) for i in ids)
        reports.append(TokenLogprobs(token, float(row[token] - normaliser), int((row > row[token]).sum()) + 1, alternatives))
    return reports


def row_keys(seeds: Array, indices: Array, positions: Array) -> Array:
    """int64 [R] each -> uint64 [R]; the keys of `random.row_keys`."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    seeds, indices, positions = (x.astype(np.int64).view(np.uint64) for x in (seeds, indices, positions))
    mixed = _mix64(seeds + golden)
    mixed = _mix64(mixed ^ (indices * golden))
    return _mix64(mixed + positions * golden)


def gumbel(key: np.uint64, tokens: Array) -> Array:
    """Noise [len(tokens)] of the token ids `tokens`; the numbers of `random.gumbel`."""
    low, high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    mixed = _mix32(_mix32(tokens.astype(np.uint32) ^ low) + high)
    return -np.log(-np.log((mixed + 0.5) * 2.0**-32))


def _mix64(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: Array) -> Array:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def edited(logits: Array, plan: DrawPlan, counts: Sequence[Array] = (), seen: Sequence[Array] = ()) -> dict[int, Array]:
    """Copies [V] of the rows whose logits penalties, biases or forbidden tokens change, by row. Other rows cost nothing."""
    rows: dict[int, Array] = {}

    def own(row: int) -> Array:
        return rows.setdefault(row, logits[row].copy()) if row not in rows else rows[row]

    for number, (row, _) in enumerate(plan.penalised):
        assert plan.presence is not None and plan.frequency is not None and plan.repetition is not None
        ids = np.flatnonzero(seen[number])  # what was generated was seen
        some, count, repetition = own(row)[ids], counts[number][ids], plan.repetition[number]
        repeated = np.where(some > 0, some / repetition, some * repetition)
        own(row)[ids] = repeated - plan.frequency[number] * count - plan.presence[number] * (count > 0)
    for row, ids, biases in plan.biased:
        own(row)[ids] += biases
    for row, ids in plan.forbidden:
        own(row)[ids] = -np.inf
    return rows


def _filtered(logits: Array, plan: DrawPlan, row: int) -> Array:
    """Logits [V] in fp64 of one row after temperature and filters, the best token's at 0."""
    with np.errstate(over="ignore", invalid="ignore"):  # a row that is not finite, or all forbidden, gives no candidates
        scaled = logits / plan.temperature[row]
        scaled = scaled - scaled.max()
    top_k, top_p, min_p = int(plan.top_k[row]), plan.top_p[row], plan.min_p[row]
    if top_k:
        k = min(top_k, len(scaled))
        scaled[scaled < np.partition(scaled, -k)[-k]] = -np.inf
    if top_p < 1:
        scaled[scaled < _top_p_threshold(scaled, top_p)] = -np.inf
    if min_p:
        scaled[scaled < np.log(min_p)] = -np.inf  # the best token stands at 0
    return scaled.astype(np.float64)


def _top_p_threshold(scaled: Array, top_p: float) -> float:
    """The last logit of the smallest set whose probability reaches `top_p`."""
    ordered = np.sort(scaled[scaled > -np.inf])[::-1]
    probabilities = np.exp(ordered)
    probabilities = probabilities / probabilities.sum()
    before = probabilities.cumsum(dtype=np.float64) - probabilities
    kept = max(1, int((before < top_p).sum()))
    return float(ordered[kept - 1])
