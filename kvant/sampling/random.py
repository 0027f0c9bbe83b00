"""Counter-based random numbers: one uniform per (seed, choice, position), the same on every device and in any batch.

There is no generator and no state. The three counters are mixed by the finaliser of SplitMix64 (Steele et al., 2014), whose
64-bit output passes BigCrush for consecutive counters; so a preempted, replayed or differently batched request draws the same
numbers again.
"""

from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seeds: Tensor, indices: Tensor, positions: Tensor) -> Tensor:
    """int64 [R] each -> float64 [R] in [0, 1)."""
    mixed = _mix(seeds + _GOLDEN)
    mixed = _mix(mixed ^ (indices * _GOLDEN))
    mixed = _mix(mixed + positions * _GOLDEN)
    return _shift(mixed, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST  # int64 products wrap around, as they must
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
