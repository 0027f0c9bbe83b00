"""The executor under the compiler's sanitizers: no read or write out of place, no undefined arithmetic, no data race.

Each runs in a process of its own, with the sanitizer's runtime loaded first. Prompts, decode, mixed batches, odd shapes, and
all the pool's barriers pass through.
"""

import os
import subprocess
import sys

import pytest

from kvant.native import build

FLAGS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
RUNTIME = {"address": "libasan.so", "thread": "libtsan.so"}

SCENARIO = """
import sys
from pathlib import Path
import numpy as np
from kvant.native import build
build.COMMON[:] = [*build.COMMON, *sys.argv[3:]]
build.TIMEOUT = 500
library = build.load(print, Path(sys.argv[1]), isa=sys.argv[2])
assert library is not None
from tests.native import small, test_attention, test_draw, test_linear
from tests.native.test_executor import small_ids
from tests.native.test_operations import llama_layer
rng = np.random.default_rng(0)
for format in test_linear.FORMATS:
    for rows in (1, 5, 19, 40):
        weight = small.random_weight(format, 37 if format == "F32" else 48, 256, rng)
        small.apply(library, rng.normal(size=(rows, 256)).astype(np.float32), lambda p, v: p.linear(v, [weight]), threads=3)
for shape in ((1, 33), (17, 40), (5, 1)):
    weight = small.random_weight("F32", *shape, rng)
    for rows in (1, 18):
        small.apply(library, rng.normal(size=(rows, shape[1])).astype(np.float32), lambda p, v: p.linear(v, [weight]))
test_attention.test_a_mixed_batch(library, 32)
test_attention.test_prompt_then_decode(library, 2, 1, 36)
test_attention.test_R47_a_query_sees_exactly_its_window(library, 33)
model = llama_layer().finish(library, threads=3)
cache = model.new_cache([12])
for count in (1, 150, 2, 33, 1, 1, 4):
    step = model.run(small_ids(count), cache)
    test_draw.drawn(model, step.logits, test_draw.random_plan(len(step.logits), 3, rng))
    model.top_k(step.logits, 3), model.logits(np.zeros(20, np.int64))
print("passed")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("isa", ["native", "avx2", "portable"])
@pytest.mark.parametrize("sanitizer", FLAGS)
def test_under_sanitizers(tmp_path, sanitizer, isa):
    compiler = next((c.command[0] for c in build.find_compilers() if not c.is_zig), None)
    if compiler is None or not build.runs_here(isa):
        pytest.skip("no compiler, or another machine")
    runtime = subprocess.run(
        [compiler, f"-print-file-name={RUNTIME[sanitizer]}"], capture_output=True, text=True
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip(f"the compiler has no {RUNTIME[sanitizer]}")
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "report_signal_unsafe=0:exitcode=66",
        "OPENBLAS_NUM_THREADS": "1",  # its own threads would be watched too
    }
    command = [sys.executable, "-c", SCENARIO, str(tmp_path), isa, "-g", "-O1", *FLAGS[sanitizer]]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "passed" in result.stdout, (result.stdout + result.stderr)[-4000:]
