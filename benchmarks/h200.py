"""The speed of the network on one NVIDIA GPU, scenario by scenario, each with its floor and a check that it computes the same.

    python -m benchmarks.h200                                          all, within --seconds
    python -m benchmarks.h200 one-stream/qwen3-0.6b decode-attention   some

Weights are random, in the public shapes of `benchmarks/shapes/`. One set of ceilings, measured first, is behind every floor.

    one-stream, 64-streams   prompt 128 random ids, greedy: (time of 288 tokens - time of 32) / 256, best of 5
    nano                     nano-vllm's protocol: 256 requests, 142,827 prompt and 133,966 output tokens
    prefill-16x2048          16 prompts of 2,048 ids, one token each, best of 3
    decode-attention         share of the copy bandwidth; the least of 64 x 8k, 256 x 1k, 1 x 128k; blocks in random order
    prefill-attention-...    ours from blocks over cuDNN's on contiguous keys; the least of 4k, 8k, 16k
    gpu-idle-256             percent of untraced wall time that no kernel covers, in steps of the nano workload's 256 streams
    startup                  from the start of a process to its first token: random weights; a sharded checkpoint of 16 GB

Check: first and later greedy tokens of every model against the plain path in fp32 (`plain.py`), kernels against fp64 or the
reference. A scenario that fails is named at the end and does not disturb the others; what was measured is written after each.
"""

import argparse
import gc
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import kernels
from benchmarks.checkpoint import write
from benchmarks.plain import agreement
from benchmarks.results import merge
from kvant.bench.ceilings import Measured, best_seconds, torch_ceilings
from kvant.bench.latency import latency
from kvant.bench.profile import decode_step
from kvant.bench.report import Row, origin, rate
from kvant.bench.running import run, seconds
from kvant.bench.startup import PROMPT, bare_start, start_once
from kvant.bench.target import Target, open_target
from kvant.bench.throughput import throughput
from kvant.bench.workload import nano, uniform
from kvant.config.engine import EngineConfig
from kvant.planning.work import Row as Part

SHAPES = Path(__file__).parent / "shapes"
CONTEXT, STREAMS = 4096, 256
CHECKED_ROWS = 16  # of a batch, in the plain path
LATER = 9  # the token that is checked beside the first
GAP = 0.02  # relative error that a kernel in bf16 may have
DISK_BYTES = 20 << 30


class Result(NamedTuple):
    """A row, and how it was checked."""

    row: Row
    check: str


class CheckFailed(Exception):
    """The fast path computes something else: its time does not count."""


# --- models -------------------------------------------------------------------------------------------------------------


class Model:
    """A model that is loaded when the first of its scenarios runs, and dropped after the last."""

    def __init__(self, name: str, measured: Measured):
        self.name, self.shape, self.measured = name, SHAPES / f"{name}.json", measured
        self._target: Target | None = None

    @property
    def target(self) -> Target:
        if self._target is None:
            config = EngineConfig(
                model=f"dummy:{self.shape}", max_model_len=CONTEXT, max_num_seqs=STREAMS, enable_prefix_caching=False
            )
            self._target = open_target(config, say, self.measured)
            for notice in self._target.llm.notices:
                say(f"notice: {notice}")
        return self._target

    def close(self) -> None:
        self._target = None
        gc.collect()
        torch.cuda.empty_cache()

    def check(self, streams: int) -> str:
        """Greedy tokens of `streams` prompts that are computed together, against the plain path."""
        work = uniform(streams, 64, LATER, self.target.runner.vocab_size, seed=2)
        _, answers = run(self.target.llm, work)
        prompts = [list(prompt) for prompt in work.prompts[:CHECKED_ROWS]]
        found = []
        for number in (0, LATER - 1):
            known = [prompt + answer[:number] for prompt, answer in zip(prompts, answers, strict=False)]
            agreed = agreement(self.shape, known, [answer[number] for answer in answers[: len(known)]], "cuda")
            if not agreed.holds:
                raise CheckFailed(f"token {number + 1} of {self.name}, {streams} streams: {agreed}")
            found.append(f"token {number + 1}: {agreed.num_equal} of {agreed.num_prompts} equal, gap {agreed.largest_gap:.4f}")
        return f"{streams} streams against fp32: " + "; ".join(found)

    # --- its scenarios -------------------------------------------------------------------------------------------------

    def one_stream(self) -> Result:
        check = self.check(1)
        return Result(latency(self.target, uniform(1, 128, 288, self.target.runner.vocab_size), 5, say)[2], check)

    def streams(self, count: int) -> Result:
        check = self.check(count)
        return Result(latency(self.target, uniform(count, 128, 288, self.target.runner.vocab_size), 5, say)[3], check)

    def nano(self) -> Result:
        check = self.check(STREAMS)
        return Result(throughput(self.target, nano(self.target.runner.vocab_size), 1, say)[1], check)

    def prefill(self) -> Result:
        check = self.check(CHECKED_ROWS)
        work = uniform(16, 2048, 1, self.target.runner.vocab_size)
        seconds(self.target, work)
        floor = self.target.network.seconds([Part(0, 2048)] * 16, 16, self.target.ceilings)
        return Result(rate("", 16 * 2048, [seconds(self.target, work) for _ in range(3)], floor, "tok/s"), check)

    def idle(self) -> Result:
        step = decode_step(self.target, nano(self.target.runner.vocab_size))
        share = 1 - step.busy / step.seconds
        note = f"{self.name}: a step takes {1e3 * step.seconds:.3f} ms, kernels cover {1e3 * step.busy:.3f} ms of it"
        return Result(Row("", 100 * share, "%", 0.0, 1 - share, None, note), "a ratio of two times of one run")


# --- attention alone ----------------------------------------------------------------------------------------------------


def decode_attention(measured: Measured) -> Result:
    """The first three of the kernel benchmark's decode cases."""
    top = kernels.Ceilings(*measured.ceilings)
    lines = _take(kernels.decode_lines(top), ["decode/64x8k", "decode/256x1k", "decode/1x128k"])
    worst = min(line.fraction for line in lines)
    note = ", ".join(f"{line.name.removeprefix('decode/')}: {line.fraction:.3f}" for line in lines)
    return Result(Row("", worst, "of the copy bandwidth", 1.0, worst, None, note), _errors(lines))


def prefill_attention(measured: Measured) -> Result:
    """The first three of its causal prompts, against cuDNN."""
    top = kernels.Ceilings(*measured.ceilings)
    lines = _take(kernels.prefill_lines(top), ["prefill/1x4k", "prefill/1x8k", "prefill/1x16k"])
    ratios = {line.name.removeprefix("prefill/1x"): line.torch / line.ours for line in lines}
    worst = min(ratios.values())
    note = ", ".join(f"{name}: {ratio:.3f}" for name, ratio in ratios.items())
    return Result(Row("", worst, "of cuDNN's speed", 1.0, worst, None, note), _errors(lines))


def _take(lines: Iterator[kernels.Line], names: list[str]) -> list[kernels.Line]:
    found: dict[str, kernels.Line] = {}
    while len(found) < len(names):
        line = next(lines)
        if line.name in names:
            found[line.name] = line
    return [found[name] for name in names]


def _errors(lines: list[kernels.Line]) -> str:
    worst = max(line.error for line in lines)
    if not worst < GAP:
        raise CheckFailed(f"attention is {worst:.4f} from its reference")
    return f"largest relative error {worst:.5f}"


# --- start-up -----------------------------------------------------------------------------------------------------------


def start(config: EngineConfig, floor: float, expected: int | None = None) -> tuple[Row, int]:
    """The best of two starts, after one that is not counted."""
    starts = [start_once(config) for _ in range(3)]
    tokens = {one.token for one in starts}
    if len(tokens) != 1 or (expected is not None and tokens != {expected}):
        raise CheckFailed(f"starts say {tokens}, expected {expected}")
    best = min(starts[1:], key=lambda one: one.first)
    note = (
        f"imports {best.imported:.2f} s, loading {best.ready - best.imported:.2f} s, prompt {best.first - best.ready:.2f} s; "
        f"the first of all: {starts[0].first:.2f} s"
    )
    times = [one.first for one in starts[1:]]
    return Row("", best.first, "s", floor, floor / best.first, (max(times) - min(times)) / min(times), note), tokens.pop()


def startup(shape: Path) -> Result:
    row, token = start(EngineConfig(model=f"dummy:{shape}"), bare_start("torch", "cuda"))
    return Result(row, _checked_start(shape, token))


def startup_checkpoint(shape: Path, scratch: Path) -> Result:
    """From a folder in the page cache: it has just been written."""
    if shutil.disk_usage(scratch).free < DISK_BYTES:
        raise CheckFailed(f"the checkpoint needs {DISK_BYTES >> 30} GiB in {scratch}; name another folder with --scratch")
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="kvant-checkpoint-"))
    try:
        num_bytes = write(shape, folder, "cuda")
        torch.cuda.empty_cache()
        floor = bare_start("torch", "cuda") + num_bytes / _upload_bandwidth()
        row, token = start(EngineConfig(model=str(folder)), floor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(row._replace(note=f"{num_bytes / 1e9:.1f} GB; {row.note}"), _checked_start(shape, token))


def _checked_start(shape: Path, token: int) -> str:
    agreed = agreement(shape, [PROMPT], [token], "cuda")
    torch.cuda.empty_cache()
    if not agreed.holds:
        raise CheckFailed(f"the first token after a start: {agreed}")
    return f"first token against fp32: gap {agreed.largest_gap:.4f}; the same in every start"


def _upload_bandwidth() -> float:
    """Bytes per second from pinned memory to the GPU."""
    source = torch.ones(1 << 30, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    bandwidth = source.numel() / best_seconds(partial(target.copy_, source, non_blocking=True), "cuda")
    del source, target
    torch.cuda.empty_cache()
    return bandwidth


# --- the run ------------------------------------------------------------------------------------------------------------

# In the order of the published table.
SCENARIOS = (
    "one-stream/qwen3-0.6b",
    "one-stream/llama-3.2-1b",
    "one-stream/llama-3-8b",
    "64-streams/llama-3-8b",
    "nano/qwen3-0.6b",
    "nano/llama-3.2-1b",
    "nano/llama-3-8b",
    "prefill-16x2048/llama-3-8b",
    "prefill-16x2048/qwen3-0.6b",
    "decode-attention",
    "prefill-attention-vs-cudnn",
    "gpu-idle-256",
    "startup/llama-3-8b",
    "startup-checkpoint/llama-3-8b",
)
LONGEST = 150  # seconds that one scenario may take


def jobs(measured: Measured, scratch: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Every scenario and what measures it, model by model, so that each is loaded once."""
    yield "decode-attention", partial(decode_attention, measured)
    yield "prefill-attention-vs-cudnn", partial(prefill_attention, measured)
    for name in ("qwen3-0.6b", "llama-3.2-1b", "llama-3-8b"):
        model = Model(name, measured)
        yield f"one-stream/{name}", model.one_stream
        if name == "llama-3-8b":
            yield f"64-streams/{name}", partial(model.streams, 64)
        if name != "llama-3.2-1b":
            yield f"prefill-16x2048/{name}", model.prefill
        yield f"nano/{name}", model.nano
        if name == "qwen3-0.6b":
            yield "gpu-idle-256", model.idle
        model.close()
    shape = SHAPES / "llama-3-8b.json"
    yield "startup/llama-3-8b", partial(startup, shape)
    yield "startup-checkpoint/llama-3-8b", partial(startup_checkpoint, shape, scratch)


def measure(wanted: list[str], output: Path, scratch: Path, allowed: float, commit: str | None) -> list[str]:
    """Runs what is wanted and writes it; returns what failed."""
    began = time.monotonic()
    say("measuring the ceilings")
    measured = torch_ceilings("cuda", "bfloat16")
    bandwidth, compute = measured.ceilings
    say(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 products {compute / 1e12:.0f} TFLOP/s ({measured.how})")
    about = origin() | ({"commit": commit} if commit else {}) | {"ceilings": measured.ceilings._asdict()}
    failed = []
    for scenario, job in jobs(measured, scratch):
        if scenario not in wanted:
            continue
        left = allowed - (time.monotonic() - began)
        if left < 10:
            failed.append(f"{scenario}: not begun, the {allowed:.0f} seconds are over")
            continue
        since = time.monotonic()
        try:
            with at_most(min(LONGEST, left)):
                result = job()
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{scenario}: {type(error).__name__}: {str(error)[:300]}")
            gc.collect()
            torch.cuda.empty_cache()
            continue
        row = result.row._replace(scenario=scenario)
        show(row, time.monotonic() - since)
        merge(output, [row._asdict() | {"check": result.check} | about], SCENARIOS)
    return failed


@contextmanager
def at_most(allowed: float) -> Iterator[None]:
    """Ends what takes longer, by a TimeoutError."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"took more than {allowed:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, allowed)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def show(row: Row, took: float) -> None:
    value = f"{row.value:12,.4g}" if row.value < 1000 else f"{row.value:12,.0f}"
    floor = "" if row.floor is None else f"floor {row.floor:,.4g}"
    fraction = "" if row.fraction is None else f"{100 * row.fraction:5.1f} %"
    print(f"{row.scenario:30s} {value} {row.unit:8s} {floor:18s} {fraction}  [{took:.0f} s] {row.note}", flush=True)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="some of them; by default all")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("h200.json"))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where a 16 GB checkpoint may lie")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing after so many seconds")
    parser.add_argument("--commit", help="what the rows say they were measured at, where there is no git")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"there is no scenario {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs an NVIDIA GPU")
    wanted = arguments.scenarios or list(SCENARIOS)
    failed = measure(wanted, arguments.output, arguments.scratch, arguments.seconds, arguments.commit)
    for line in failed:
        print(f"FAILED {line}", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
