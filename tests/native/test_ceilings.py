"""The ceilings are rates of this machine: plausible, and made of work that was really done."""

import numpy as np
import pytest

from kvant.native import abi
from kvant.native.build import load, runs_here
from kvant.native.ceilings import LEAST_BYTES, measure


@pytest.fixture(scope="module", params=["native", "avx2", "portable"])
def library(request):
    if not runs_here(request.param):
        pytest.skip(f"this processor has no {request.param}")
    loaded = load(lambda text: pytest.fail(text), isa=request.param)
    assert loaded is not None
    return loaded


def test_rates_are_plausible(library):
    ceilings = measure(library, 1, 1)
    assert ceilings.bytes_read == LEAST_BYTES
    assert 1e8 < ceilings.bandwidth < 1e12
    assert 1e8 < ceilings.compute < 1e14 or ceilings.compute == 0


def test_more_work_takes_longer(library):
    data = np.ones(1 << 20, np.uint64)
    read = library.functions.kvant_read_seconds
    once = min(read(abi.address(data), data.size, 4, 1) for _ in range(5))
    often = min(read(abi.address(data), data.size, 40, 1) for _ in range(5))
    assert 4 < often / once < 25
