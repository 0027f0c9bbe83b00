"""Speed of bare native steps: decode at several batch sizes and contexts, and prompts. Minimum and median of many.

python -m benchmarks.native.speed MODEL.gguf [isa] [quick]
"""

import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.native.models import gemma3, llama, read
from benchmarks.native.stepping import batch
from kvant.native.build import load


def measure(model, cache, steps, repeats: int) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        for step in steps:
            started = time.perf_counter()
            model.run(step, cache)
            times.append(time.perf_counter() - started)
    return min(times), float(np.median(times))


def main(path: str, isa: str = "native", quick: str = "") -> None:
    library = load(print, isa=isa)
    assert library is not None
    file = read(Path(path))
    program = gemma3(file) if file.fields["general.architecture"] == "gemma3" else llama(file)
    model = program.finish(library, threads=2)
    groups = len(model.groups)
    rng = np.random.default_rng(0)
    blocks = 40
    cache = model.new_cache([1 + 32 * blocks] * groups)
    ids = rng.integers(0, 40_000, 4096)
    for length in (128, 512):
        show(
            f"prompt {length}",
            length,
            measure(model, cache, [batch([(0, list(ids[:length]))], groups, blocks)], 3 if quick else 10),
        )
    for context in (64, 512):
        for rows in (1, 2, 4, 8, 16, 32):
            steps = [batch([(context + n, [int(ids[n])])] * rows, groups, blocks) for n in range(8)]
            show(f"context {context}, rows {rows}", rows, measure(model, cache, steps, 3 if quick else max(4, 24 // rows)))


def show(what: str, tokens: int, times: tuple[float, float]) -> None:
    best, middle = times
    print(f"{what:22s} best {best * 1e3:8.2f} ms {tokens / best:7.0f} tok/s   median {tokens / middle:7.0f} tok/s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
