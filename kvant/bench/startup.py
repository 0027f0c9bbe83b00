"""Start-up: from the start of a process to its first token, each time in a process of its own.

    start ── interpreter, imports ──▶ imported ── model loaded ──▶ ready ── one prompt ──▶ first token

The first run is not counted: it compiles what is compiled once per machine. The floor is what every program of this kind
pays: a process that starts Python and, where torch computes, imports torch and takes the device.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any, NamedTuple

from kvant.bench.report import Row, timed
from kvant.bench.target import Say
from kvant.config.engine import EngineConfig
from kvant.config.hardware import detect
from kvant.engine.create import plan
from kvant.errors import GenerationError

PROMPT = list(range(1, 33))
TIMEOUT = 600  # seconds

START = """
import json, sys, time
options = json.loads(sys.argv[1])
from kvant import LLM, SamplingParams
imported = time.time()
llm = LLM(**options)
ready = time.time()
output = llm.generate([json.loads(sys.argv[2])], SamplingParams(temperature=0, max_tokens=1, detokenize=False))[0].outputs[0]
print(json.dumps({"imported": imported, "ready": ready, "first": time.time(), "token": output.token_ids[0]}), flush=True)
"""
BARE = {
    "torch": "import sys, torch; torch.zeros(1, device=sys.argv[1]).cpu()",
    "native": "import numpy",
}
SAY_WHEN = "\nimport json, time; print(json.dumps({'first': time.time()}))"


class Start(NamedTuple):
    """Seconds since the process was started; the first token."""

    imported: float
    ready: float
    first: float
    token: int


def startup(config: EngineConfig, num_iters: int, say: Say) -> list[Row]:
    """The best of `num_iters` starts, after one that is not counted, and its parts."""
    _, resolved = plan(config, detect())
    say("one start to fill the caches")
    start_once(config)
    starts = []
    for number in range(num_iters):
        say(f"start {number + 1} of {num_iters}")
        starts.append(start_once(config))
    floor = min(bare_start(resolved.executor, resolved.config.device) for _ in range(2))
    best = min(starts, key=lambda start: start.first)
    return [
        timed("start, to the first token", [start.first for start in starts], floor, "s", "floor: a bare process"),
        timed("  interpreter and imports", [best.imported], None),
        timed("  model loaded", [best.ready - best.imported], None),
        timed("  prompt of 32 tokens", [best.first - best.ready], None),
    ]


def start_once(config: EngineConfig) -> Start:
    """One start of `config` in a process of its own."""
    times = _process(START, json.dumps(asdict(config)), json.dumps(PROMPT))
    return Start(times["imported"], times["ready"], times["first"], times["token"])


def bare_start(executor: str, device: str) -> float:
    """Seconds until a process has done what comes before anything of ours."""
    took: float = _process(BARE[executor] + SAY_WHEN, device)["first"]
    return took


def _process(script: str, *arguments: str) -> dict[str, Any]:
    """What `script` prints, its times as seconds since the process was started."""
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode:
        raise GenerationError(f"a start failed: {' '.join(done.stderr.split())[-400:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: value - start if name != "token" else value for name, value in result.items()}
