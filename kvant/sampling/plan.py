"""DrawPlan: how the rows of one step draw, as arrays, built on the host from the seats. Unused features cost nothing."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DrawPlan:
    """R rows of logits, Z draws from them (a request of n choices draws n times from its prompt's last row).

    `forbidden` lists (row, ids) that cannot be drawn, `biased` (row, ids, what is added to their logits), `penalised` the
    rows with penalties and their seats.
    """

    rows: np.ndarray  # [Z] the row each draw is from
    indices: np.ndarray  # [Z] which choice of the request it is for
    temperature: np.ndarray  # [R] fp32; 0 is greedy
    top_k: np.ndarray  # [R] int64; 0 is off
    top_p: np.ndarray  # [R] fp32; 1 is off
    min_p: np.ndarray  # [R] fp32; 0 is off
    seeds: np.ndarray  # [R] int64
    positions: np.ndarray  # [R] int64 position of the token to be drawn
    forbidden: list[tuple[int, np.ndarray]] = field(default_factory=list)
    biased: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    penalised: list[tuple[int, int]] = field(default_factory=list)  # (row, seat)
    presence: np.ndarray | None = None  # [rows of `penalised`] fp32
    frequency: np.ndarray | None = None
    repetition: np.ndarray | None = None
