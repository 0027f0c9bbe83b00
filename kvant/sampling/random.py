"""Counter-based random numbers: the noise of a token depends on (seed, choice, position, token) and on nothing else.

There is no generator and no state, so a preempted, replayed or differently batched request meets the same noise again. A
token is drawn by the Gumbel-max trick: argmax(logit + noise) is a draw from softmax(logit). Unlike inverting a cumulative sum
it is stable: logits that moved by a rounding error change the drawn token only where two candidates nearly tie.

Each row's counters are mixed to a 64-bit key (the finaliser of SplitMix64; Steele et al., 2014); key and token id are mixed to
32 bits (the finaliser of MurmurHash3, twice). The noise lies between -3.13 and 22.88, so tokens whose probability is below
1e-10 of the best one's are never drawn.
"""

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_LOW = 0xFFFFFFFF


def row_keys(seeds: Tensor, indices: Tensor, positions: Tensor) -> Tensor:
    """int64 [R] each -> one 64-bit key per row, [R] int64."""
    mixed = _mix64(seeds + _GOLDEN)
    mixed = _mix64(mixed ^ (indices * _GOLDEN))
    return _mix64(mixed + positions * _GOLDEN)


def gumbel(keys: Tensor, num_tokens: int) -> Tensor:
    """`keys` [R] -> the standard Gumbel noise of tokens 0 ... num_tokens - 1, [R, num_tokens] float64."""
    tokens = torch.arange(num_tokens, device=keys.device)
    mixed = _mix32(tokens[None, :] ^ (keys & _LOW)[:, None])
    mixed = _mix32((mixed + _shift(keys, 32)[:, None]) & _LOW)
    return -torch.log(-torch.log((mixed.double() + 0.5) * 2.0**-32))


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST  # int64 products wrap around, as they must
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _mix32(x: Tensor) -> Tensor:
    """On values below 2^32 in int64, whose products keep their low 32 bits when they wrap."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
