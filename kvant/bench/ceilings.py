"""What this machine reaches at best, measured in the same run as everything that is divided by it.

    native CPU   reading as many bytes as the model has, again and again; the product instruction on registers
    torch        x -> -x over a large tensor (bytes read and written); the faster of two square matrix products

Data are random: a matrix product on zeros runs up to 13 % faster, because fewer transistors switch.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kvant.planning.work import Ceilings

GPU_COPY_BYTES = 4 << 30
CPU_COPY_BYTES = 256 << 20
GPU_PRODUCTS, CPU_PRODUCTS = (4096, 8192), (1024,)
SECONDS = 0.3  # of each measurement


class Measured(NamedTuple):
    """The ceilings, and how they were measured."""

    ceilings: Ceilings
    how: str


def measure(runner: Any, device: str, dtype: str, threads: int, num_bytes: int) -> Measured:
    """The ceilings for `runner`'s kind of arithmetic. `num_bytes`: what a step of the model reads. Takes about a second."""
    if runner.executor == "native":
        from kvant.native import ceilings

        native = ceilings.measure(runner.model.library, threads, num_bytes)
        how = f"reading {native.bytes_read >> 20} MiB again and again; products on registers; {threads} threads"
        return Measured(Ceilings(native.bandwidth, native.compute or float("inf")), how)
    return torch_ceilings(device, dtype)


def torch_ceilings(device: str, dtype: str) -> Measured:
    """The same with torch's own kernels, on a GPU or a CPU."""
    import torch

    kind, on_gpu = getattr(torch, dtype), device != "cpu"
    num_bytes, sizes = (GPU_COPY_BYTES, GPU_PRODUCTS) if on_gpu else (CPU_COPY_BYTES, CPU_PRODUCTS)
    source = torch.randn(num_bytes // 2 // kind.itemsize, device=device, dtype=kind)
    target = torch.empty_like(source)
    # A kernel, since `copy_` may go to a GPU's copy engine, which is slower.
    bandwidth = num_bytes / best_seconds(partial(torch.neg, source, out=target), device)
    del source, target
    rates = []
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
        rates.append(2 * size**3 / best_seconds(partial(torch.mm, a, b), device))
    how = f"copying {num_bytes >> 20} MiB; {dtype} products of {' and '.join(map(str, sizes))} rows, random data"
    return Measured(Ceilings(bandwidth, max(rates)), how)


def best_seconds(call: Callable[[], Any], device: str) -> float:
    """The shortest of several batches, per call. Warmed up before."""
    wait = _waiter(device)
    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    count = max(1, int(SECONDS / 5 / max(1e-7, time.perf_counter() - start)))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        times.append((time.perf_counter() - start) / count)
    return min(times)


def _waiter(device: str) -> Callable[[], None]:
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize
