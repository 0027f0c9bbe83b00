"""Rotary frequencies: how far each pair of a head turns per position, for every kind of `RopeScaling`.

    plain   f[i] = base ** (-2i / D)                       i = 0 ... D/2 - 1

They are computed in fp32 and in the order in which transformers does it, on purpose: at position 100,000 the seventh digit
of a frequency is a visible angle, and models were trained with the digits that this order gives. The power itself is taken
in fp64 and rounded once, which is what torch's fp32 power gives in all but a few last places.
"""

import math

import numpy as np

from kvant.config.rope import RopeScaling

FP32 = np.float32


def frequencies(size: int, base: float, scaling: RopeScaling, context: int) -> np.ndarray:
    """Radians per position of each of the size/2 pairs, fp32.

    `context` is the longest context that will be run. A cached key has been turned once and for all, so where transformers
    looks at the length of a text (dynamic, longrope), here the longest one decides for all of them.
    """
    return _RULES[scaling.rope_type](size, base, scaling, context)


def _powers(size: int, base: float) -> np.ndarray:
    """base ** (2i / size)"""
    exponents = np.arange(0, size, 2, dtype=FP32) / FP32(size)
    return (base ** exponents.astype(np.float64)).astype(FP32)


def _plain(size: int, base: float, scaling: RopeScaling, context: int) -> np.ndarray:
    return FP32(1) / _powers(size, base)


def _linear(size: int, base: float, scaling: RopeScaling, context: int) -> np.ndarray:
    return FP32(1) / _powers(size, base) / FP32(scaling.factor)


def _dynamic(size: int, base: float, scaling: RopeScaling, context: int) -> np.ndarray:
    trained = scaling.original_max_position_embeddings
    stretch = scaling.factor * max(context, trained) / trained - (scaling.factor - 1)
    return FP32(1) / _powers(size, base * stretch ** (size / (size - 2)))


def _longrope(size: int, base: float, scaling: RopeScaling, context: int) -> np.ndarray:
    is_long = context > scaling.original_max_position_embeddings
    divisors = np.array(scaling.long_factor if is_long else scaling.short_factor, FP32)
    return FP32(1) / (divisors * _powers(size, base))


def _yarn(size: int, base: float, scaling: RopeScaling, context: int) -> np.ndarray:
    """Pairs that turn more than beta_fast times in the original context stay, those below beta_slow are divided."""
    powers = _powers(size, base)

    def pair_turning(times: float) -> float:
        return size * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001  # a step instead of a ramp
    kept = FP32(1) - ((np.arange(size // 2, dtype=FP32) - FP32(low)) / FP32(width)).clip(0, 1)
    divided = FP32(1) / (FP32(scaling.factor) * powers)
    return divided * (FP32(1) - kept) + FP32(1) / powers * kept


def _llama3(size: int, base: float, scaling: RopeScaling, context: int) -> np.ndarray:
    """Wavelengths beyond original / low_freq_factor are stretched by `factor`, below original / high_freq_factor kept."""
    plain = FP32(1) / _powers(size, base)
    original, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    waves = FP32(2 * math.pi) / plain
    blend = (FP32(original) / waves - FP32(low)) / FP32(high - low)
    blended = (FP32(1) - blend) * plain / FP32(scaling.factor) + blend * plain
    stretched = np.where(waves > FP32(original / low), plain / FP32(scaling.factor), blended)
    return np.where(waves < FP32(original / high), plain, stretched)


_RULES = {"default": _plain, "linear": _linear, "dynamic": _dynamic, "longrope": _longrope, "yarn": _yarn, "llama3": _llama3}
