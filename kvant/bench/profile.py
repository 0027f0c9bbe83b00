"""Where a step's time goes, operation by operation, each with its share and the fraction of its limit.

Decode steps: two runs of the same prompts, one some steps longer than the other; what the longer one spent more is what those
steps cost. Prompts: one run that ends with the first tokens.

    native   the executor's own clock, per recorded operation
    torch    kernels as the driver reports them, on a CPU torch's operators (torch.profiler), by name; which part of the
             network a kernel belongs to is told by its name, and the floor is the part's

What no operation covers is shown as well: the host between the steps, or an idle GPU.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvant.bench.report import Row
from kvant.bench.running import prompt_steps, run
from kvant.bench.target import Say, Target
from kvant.bench.workload import Workload
from kvant.native.program import Kind
from kvant.planning.work import Row as Part
from kvant.planning.work import Work

STEPS = 16
BRIEF = 2  # tokens of the shorter run
NAME_LENGTH = 60
# Parts of the network by what a kernel's name holds; the first that fits.
PARTS = {
    "attention": r"decode|prefill|attention|flash|fmha|gather_kernel|merge",
    "products": r"_row|skinny|linear|logits|gemm|gemv|nvjet|cutlass|matmul|mm_",
    "norms": r"norm",
    "sampling": r"sampl|gumbel|draw|argmax|sort|topk|softmax|cumsum|scan",
    "rotary and cache": r"rotary|store",
}


class Spent(NamedTuple):
    """What one operation took, in a run or in a step."""

    seconds: float
    count: float


@dataclass(slots=True)
class Snapshot:
    """What a run spent: per operation, and in all. Kernels may overlap, so that the whole is less than its parts."""

    operations: dict[str, Spent] = field(default_factory=dict)
    busy: float = 0.0  # seconds in which any operation ran

    def add(self, name: str, seconds: float, count: float) -> None:
        known = self.operations.get(name, Spent(0.0, 0))
        self.operations[name] = Spent(known.seconds + seconds, known.count + count)


class Step(NamedTuple):
    """One step, taken apart."""

    seconds: float
    busy: float
    operations: dict[str, Spent]  # per step


def profile(target: Target, workload: Workload, say: Say) -> list[Row]:
    """A decode step of `workload`'s streams: one row per operation, the largest first, and what no operation covers."""
    say(f"profiling a decode step of {workload.name}")
    middle = BRIEF + prompt_steps(target, workload) + STEPS // 2
    rows = [Part(len(prompt) + middle - 1, 1) for prompt in workload.prompts]
    return _rows(target, decode_step(target, workload), _works(target, rows))


def profile_prompts(target: Target, workload: Workload, say: Say) -> list[Row]:
    """The same for the steps that compute all of `workload`'s prompts."""
    say(f"profiling the prompts of {workload.name}")
    first = workload.with_output_len(1)
    wall = _least(target, first)
    with _meter(target)(target, prompt_steps(target, workload)) as spent:
        run(target.llm, first)
    rows = [Part(0, len(prompt)) for prompt in workload.prompts]
    return _rows(target, Step(wall, spent.busy, spent.operations), _works(target, rows))


def decode_step(target: Target, workload: Workload) -> Step:
    """The mean of `STEPS` decode steps in which all streams run.

    A stream goes on until all prompts are computed, however many steps that takes: then the steps that only the longer run
    has are all alike.
    """
    meter = _meter(target)
    num_before = BRIEF + prompt_steps(target, workload)
    brief, whole = (workload.with_output_len(num_before + extra) for extra in (0, STEPS))
    run(target.llm, brief)
    wall = _least(target, whole) - _least(target, brief)  # without the meter, which slows the host
    with meter(target, num_before) as before:
        run(target.llm, brief)
    with meter(target, num_before + STEPS) as after:
        run(target.llm, whole)
    per_step = {name: _more(spent, before.operations.get(name)) for name, spent in after.operations.items()}
    busy = max(0.0, after.busy - before.busy) / STEPS
    return Step(wall / STEPS, busy, {name: spent for name, spent in per_step.items() if spent.count > 0})


def _more(after: Spent, before: Spent | None) -> Spent:
    """What the longer run spent more, per step."""
    before = before or Spent(0.0, 0)
    return Spent(max(0.0, after.seconds - before.seconds) / STEPS, (after.count - before.count) / STEPS)


def _least(target: Target, workload: Workload, repeats: int = 3) -> float:
    return min(run(target.llm, workload)[0] for _ in range(repeats))


# --- meters -------------------------------------------------------------------------------------------------------------


@contextmanager
def _native(target: Target, num_steps: int) -> Iterator[Snapshot]:
    """Every operation of the native executor while the block runs, which is `num_steps` steps."""
    model = target.runner.model
    result = Snapshot()
    with model.profiled() as times:
        yield result
    for operation, nanoseconds in zip(model.operations, times.tolist(), strict=True):
        result.add(operation.label, nanoseconds * 1e-9, num_steps)
    result.busy = float(times.sum()) * 1e-9


@contextmanager
def _torch(target: Target, num_steps: int) -> Iterator[Snapshot]:
    """Every kernel and copy of the GPU while the block runs; on a CPU every operator of torch, without those it calls."""
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = target.config.device == "cuda"
    result = Snapshot()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        yield result
        if on_gpu:
            torch.cuda.synchronize()
    intervals = []
    for event in recorded.events():
        if not on_gpu:
            result.add(event.name, event.self_cpu_time_total * 1e-6, 1)
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            result.add(event.name, event.device_time_total * 1e-6, 1)
            intervals.append((event.time_range.start, event.time_range.end))
    spent = sum(spent.seconds for spent in result.operations.values())
    result.busy = covered(intervals) * 1e-6 if on_gpu else spent


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _meter(target: Target) -> Any:
    return _native if target.runner.executor == "native" else _torch


# --- floors -------------------------------------------------------------------------------------------------------------


def _works(target: Target, rows: list[Part]) -> dict[str, Work]:
    return _native_works(target, rows) if target.runner.executor == "native" else _part_works(target, rows)


def _native_works(target: Target, rows: list[Part]) -> dict[str, Work]:
    works: dict[str, Work] = {"attention": target.network.step(rows, 0)["attention"]}
    num_tokens = sum(row.num_tokens for row in rows)
    for operation in target.runner.model.operations:
        if operation.kind != Kind.LINEAR:
            continue
        known = works.get(operation.label, Work(0, 0))
        num_bytes = sum(weight.num_bytes for weight in operation.weights)
        values = sum(weight.shape[0] * weight.shape[1] for weight in operation.weights)
        times = 2 * (len(rows) if operation.label == "head" else num_tokens)
        works[operation.label] = Work(known.num_bytes + num_bytes, known.operations + times * values)
    return works


def _part_works(target: Target, rows: list[Part]) -> dict[str, Work]:
    step = target.network.step(rows, len(rows))
    linears, head = step["linears"], step["head"]
    products = Work(linears.num_bytes + head.num_bytes, linears.operations + head.operations)
    return {"attention": step["attention"], "products": products}


def _rows(target: Target, step: Step, works: dict[str, Work]) -> list[Row]:
    found: list[Row] = []
    if target.runner.executor == "torch":
        for name, work in works.items():
            seconds = sum(s.seconds for kernel, s in step.operations.items() if part_of(kernel) == name)
            if seconds:
                found.append(_row(f"all of {name}", seconds, step, work.seconds(target.ceilings)))
    floors = {name: work.seconds(target.ceilings) for name, work in works.items()}
    for name, spent in sorted(step.operations.items(), key=lambda item: -item[1].seconds):
        floor = floors.get(name) if target.runner.executor == "native" else None
        found.append(_row(name[:NAME_LENGTH], spent.seconds, step, floor, f"x{spent.count:g}"))
    rest = step.seconds - step.busy
    found.append(_row("everything else", max(0.0, rest), step, None, "outside the operations"))
    total = sum(floors.values())
    found.append(Row("step", 1e6 * step.seconds, "us", 1e6 * total, total / step.seconds, None, "wall time"))
    return found


def _row(name: str, seconds: float, step: Step, floor: float | None, note: str = "") -> Row:
    share = f"{100 * seconds / step.seconds:5.1f} % of the step"
    note = f"{share}, {note}" if note else share
    return Row(
        name,
        1e6 * seconds,
        "us",
        None if floor is None else 1e6 * floor,
        floor / seconds if floor and seconds else None,
        None,
        note,
    )


def part_of(kernel: str) -> str:
    """Which part of the network a kernel belongs to, by its name; "other" where it tells nothing."""
    lowered = kernel.lower()
    return next((name for name, pattern in PARTS.items() if re.search(pattern, lowered)), "other")
