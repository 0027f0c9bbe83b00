"""Random weights made where they are needed: the torch twin of `config/random_weights.py`, bit by bit the same."""

import torch
from torch import Tensor

from kvant.config.random_weights import FIRST_MULTIPLIER, GOLDEN, SECOND_MULTIPLIER, RandomTensor

CHUNK = 1 << 26  # values at a time: 256 MB of them, twice


def make(recipe: RandomTensor, device: str, dtype: torch.dtype) -> Tensor:
    """The values of `recipe` on `device`: in the stored format first, then in `dtype`, as a file's would be."""
    out = torch.empty(recipe.num_values, dtype=dtype, device=device)
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[recipe.format]
    for first in range(0, recipe.num_values, CHUNK):
        last = min(first + CHUNK, recipe.num_values)
        out[first:last] = _values(recipe, first, last, device).to(stored)
    return out.view(recipe.shape)


def _values(recipe: RandomTensor, first: int, last: int, device: str) -> Tensor:
    h = torch.arange(_signed(first), _signed(first) + last - first, dtype=torch.int64, device=device).to(torch.int32)
    h.mul_(_signed(GOLDEN)).add_(_signed(recipe.seed))
    h.bitwise_xor_(_shifted(h, 16)).mul_(_signed(FIRST_MULTIPLIER))
    h.bitwise_xor_(_shifted(h, 13)).mul_(_signed(SECOND_MULTIPLIER))
    h.bitwise_xor_(_shifted(h, 16))
    return _shifted(h, 8).float().mul_(2**-24).sub_(0.5).mul_(recipe.width).add_(recipe.center)


def _shifted(h: Tensor, bits: int) -> Tensor:
    """A shift of 32 unsigned bits; torch's carries the sign along."""
    return (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(number: int) -> int:
    """The signed number with the same 32 bits."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)
