"""What one layer's attention computes, apart from how: which keys a query sees, and what is done to the scores."""

from typing import NamedTuple


class AttentionRule(NamedTuple):
    """softmax(cap(scale * q k^T)) v over at most `window` keys, the query's own included; `window` None: all before it."""

    layer: int
    scale: float
    window: int | None
    soft_cap: float | None
