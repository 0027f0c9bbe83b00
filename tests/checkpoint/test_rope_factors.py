"""Llama 3.1's scaling, recovered from the vector that llama.cpp's converter writes."""

import math

import numpy as np
import pytest

from kvant.checkpoint.rope_factors import llama3_scaling
from kvant.errors import UnsupportedError


def converted(size: int, theta: float, factor: float) -> np.ndarray:
    """The factors as a converter computes them, one frequency after the other."""
    factors = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (i / size)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("size, factor", [(128, 8.0), (64, 32.0)])
def test_R44_the_scaling_of_llama_3_is_recovered(size, factor):
    assert llama3_scaling(converted(size, 500_000.0, factor), 500_000.0) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_ones_scale_nothing():
    assert llama3_scaling(np.ones(32, np.float32), 1e4) is None


@pytest.mark.parametrize("change", [1.01, np.nan, np.inf, -1.0])
def test_R44_other_factors_are_refused(change):
    factors = converted(128, 500_000.0, 8.0)
    factors[40] *= np.float32(change)
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        llama3_scaling(factors, 500_000.0)
