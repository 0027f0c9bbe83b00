"""Speed of bare native steps: decode at several batch sizes and contexts, and prompts. Minimum and median of many.

python -m benchmarks.native.speed [MODEL] [--isa avx2] [--quick]
"""

import argparse
import os
import time

import numpy as np

from benchmarks.native.stepping import batch
from kvant.config.engine import DEFAULT_MODEL
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.models.load import build, load_weights, open_model
from kvant.native.build import ISAS, load
from kvant.native.executor import NativeModel
from kvant.native.record import record


def network(name: str, isa: str, threads: int) -> NativeModel:
    """The recorded network of a model, compiled for `isa`."""
    library = load(print, isa=isa)
    assert library is not None
    checkpoint = open_model(name)
    config = ModelConfig.from_dict(checkpoint.config)
    model = build(config, Mesh())
    load_weights(model, checkpoint.tensors, None)
    return record(model, config.cache_groups()).finish(library, threads=threads)


def measure(model, cache, steps, repeats: int) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        for step in steps:
            started = time.perf_counter()
            model.run(step, cache)
            times.append(time.perf_counter() - started)
    return min(times), float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    quick = arguments.quick
    model = network(arguments.model, arguments.isa, arguments.threads)
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
    main()
