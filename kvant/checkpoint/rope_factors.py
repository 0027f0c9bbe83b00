"""Llama 3.1's rope scaling, recovered from the factors that llama.cpp stores instead of it.

A GGUF of such a model holds a vector `rope_freqs.weight`, one divisor per rotary frequency, and nothing about the four
numbers it was made of. Left unread, the model is right for short texts and wrong for long ones. All published models
share three of the numbers; the fourth, the factor, is the vector's largest entry. So the vector is computed again, and
the scaling is believed only if it comes out the same.
"""

import math
from typing import Any

import numpy as np

from kvant.errors import UnsupportedError

LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT = 8192


def llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` behind `factors` [H/2], or None where they are all 1.

    Raises `UnsupportedError` for factors of any other origin.
    """
    if np.all(factors == 1.0):
        return None
    factor = float(factors.max())
    if (
        not math.isfinite(factor)
        or factor <= 0
        or not np.allclose(factors, llama3_factors(len(factors), theta, factor), rtol=1e-4)
    ):
        raise UnsupportedError("rope_freqs.weight holds factors that are not Llama 3's; only those can be used here")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }


def llama3_factors(pairs: int, theta: float, factor: float) -> np.ndarray:
    """What each of `pairs` frequencies is divided by: 1 for short waves, `factor` for long ones, blended between.

    With w the wavelength and s = (C / w - low) / (high - low):   1 / ((1 - s) / factor + s)
    """
    waves = 2 * math.pi * theta ** (np.arange(pairs) / pairs)
    blend = (ORIGINAL_CONTEXT / waves - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
    blend = blend.clip(0, 1)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend))
