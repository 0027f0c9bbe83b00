"""What this CPU reaches at best, measured with the executor's own threads and instructions (ceilings.h)."""

from typing import NamedTuple

import numpy as np

from kvant.native import abi
from kvant.native.build import Library

LEAST_BYTES = 16 << 20  # below this the second-level caches answer, which no step of a model does
READ_BYTES = 1 << 30  # read in all, per measurement
PRODUCT_ROUNDS = 4_000_000
REPEATS = 5


class Ceilings(NamedTuple):
    """Rates of all threads together."""

    bandwidth: float  # bytes per second that are read, of `bytes_read` bytes again and again
    compute: float  # operations per second; 0 where the product's instruction is not granted
    bytes_read: int


def measure(library: Library, threads: int, num_bytes: int) -> Ceilings:
    """Reads an array of `num_bytes` (at least 16 MiB) and multiplies on registers; the best of five, which is
    what a ceiling is. Takes about a second."""
    num_bytes = max(LEAST_BYTES, num_bytes)
    data = np.random.default_rng(0).integers(0, 2**63, num_bytes // 8, np.uint64)
    rounds = max(1, READ_BYTES // num_bytes)
    functions = library.functions
    functions.kvant_read_seconds(abi.address(data), data.size, 1, threads)  # pages and caches become warm
    seconds = [functions.kvant_read_seconds(abi.address(data), data.size, rounds, threads) for _ in range(REPEATS)]
    rates = [functions.kvant_product_rate(PRODUCT_ROUNDS, threads) for _ in range(REPEATS)]
    return Ceilings(rounds * data.nbytes / min(seconds), max(rates), data.nbytes)
