"""How far an engine's distributions are from a reference's, position by position.

    p      the reference's next-token distribution at a position, q the engine's, t the token of the text that follows
    nll    -log p(t) and -log q(t); perplexity is e to their mean
    KL     sum_v p(v) (log p(v) - log q(v)) in nats: what is lost by believing q where p is true (Kullback and Leibler, 1951)
    top-1  whether both find the same token most probable

Perplexity alone is a weak witness: errors in both directions cancel. KL and top-1 agreement cannot hide any.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Distances(NamedTuple):
    """One value per scored position, arrays of equal shape."""

    nll: np.ndarray  # fp64, nats, of the engine
    base_nll: np.ndarray  # fp64, nats, of the reference
    kl: np.ndarray  # fp64, nats
    same_top: np.ndarray  # bool

    @staticmethod
    def empty(*shape: int) -> "Distances":
        """Room for `shape` positions; NaN until they are scored."""
        numbers = [np.full(shape, np.nan) for _ in range(3)]
        return Distances(*numbers, np.zeros(shape, bool))

    def put(self, where: Any, other: "Distances") -> None:
        """Stores `other` at `where`, an index of these arrays."""
        for mine, new in zip(self, other, strict=True):
            mine[where] = new

    def at(self, where: Any) -> "Distances":
        return Distances(*(array[where] for array in self))


def compare(base: Tensor, logits: Tensor, targets: Tensor) -> Distances:
    """Distances of `logits` [R, V] from `base` [R, V], both fp32, where `targets` [R] are the tokens that follow."""
    log_p, log_q = base.log_softmax(-1), logits.log_softmax(-1)
    chosen = targets[:, None]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)
    same = base.argmax(-1) == logits.argmax(-1)
    nll = (-log.gather(1, chosen)[:, 0].double().numpy() for log in (log_q, log_p))
    return Distances(*nll, kl.numpy(), same.numpy())


def summary(distances: Distances) -> dict[str, float]:
    """Figures over all positions.

    `change_percent` is the perplexity's, `change_error` its standard error: of the mean of paired differences, so that what
    both find hard does not count. Raises ValueError where a position was not scored or is not finite.
    """
    d = Distances(*(array.reshape(-1) for array in distances))
    if not all(np.isfinite(array).all() for array in d[:3]):
        raise ValueError("a position has no finite distance")
    difference = d.nll - d.base_nll
    ratio = math.exp(difference.mean())
    figures = {
        "tokens": d.nll.size,
        "perplexity": math.exp(d.nll.mean()),
        "reference_perplexity": math.exp(d.base_nll.mean()),
        "change_percent": 100 * (ratio - 1),
        "change_error": 100 * ratio * difference.std() / math.sqrt(d.nll.size),
        "mean_kl": d.kl.mean(),
        "p99_kl": np.quantile(d.kl, 0.99),
        "top1_percent": 100 * d.same_top.mean(),
    }
    return {name: value if name == "tokens" else float(f"{value:.5g}") for name, value in figures.items()}
