"""Trace: a timeline of steps, kernels and decisions, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    process     lane
    loop        steps        step 17 ─────────────────────────────────── step 18 ───────     tokens, who waits and why, who left
                verbs        schedule · prepare · run ───── · select · arrive ── · decode · commit
                kernels            q_proj + k_proj + v_proj · attention · o_proj ...
    sequences   seat 0       request-3, prompt [0, 512) ──────────────── request-3, token 513
                seat 1       request-4, token 87 ─────────────────────── request-4, token 88

Nothing in the engine knows of it: scheduler and runner are wrapped where the engine is made (`engine/create.py`), and where
no trace is asked for, nothing is wrapped. Times are of the host's clock, in microseconds since the trace began.

The file is valid JSON after every flush, whatever happens next: the end of the list is written each time, and overwritten by
what follows. Format: "Trace Event Format", Google, 2016.
"""

import json
import time
from pathlib import Path
from typing import Any

from kvant.errors import ConfigError
from kvant.types import Decision, Output, Schedule, StepInput

LOOP, SEQUENCES = 1, 2  # processes
STEPS, OTHER_STEPS, VERBS, KERNELS = 1, 2, 3, 4  # lanes of the loop
FLUSH_STEPS = 200  # at the latest, so that a server's trace does not fill the memory
TAIL = "\n]}\n"


class Trace:
    """Events on their way to a file. Raises `ConfigError` where it cannot be written."""

    def __init__(self, path: str):
        self._events: list[dict[str, Any]] = []
        self._lanes: set[tuple[int, int]] = set()
        self._began = time.perf_counter_ns()
        self.clock_offset = time.time_ns() - self._began  # to the clock that drivers use
        try:
            self._file = open(Path(path).expanduser(), "w", encoding="utf-8")  # noqa: SIM115 - stays open
            self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        except OSError as error:
            raise ConfigError(f"cannot write the trace file {path}: {error.strerror}", param="trace") from None
        self._end = self._file.tell()
        self._separator = "\n"
        for process, name in ((LOOP, "loop"), (SEQUENCES, "sequences")):
            self._name("process_name", process, 0, name)
        for lane, name in ((STEPS, "steps"), (OTHER_STEPS, "steps, overlapped"), (VERBS, "verbs"), (KERNELS, "kernels")):
            self._name("thread_name", LOOP, lane, name)
        self.flush()

    def span(self, process: int, lane: int, name: str, start: int, end: int, **details: Any) -> None:
        """Something that lasted from `start` to `end` (perf_counter_ns)."""
        if process == SEQUENCES and (process, lane) not in self._lanes:
            self._lanes.add((process, lane))
            self._name("thread_name", process, lane, f"seat {lane - 1}")
        event = {"name": name, "ph": "X", "pid": process, "tid": lane, "ts": self._micros(start), "dur": (end - start) / 1e3}
        self._events.append(event | ({"args": details} if details else {}))

    def moment(self, name: str, at: int, **details: Any) -> None:
        """Something that happened, on the lane of steps."""
        event = {"name": name, "ph": "i", "s": "p", "pid": LOOP, "tid": STEPS, "ts": self._micros(at)}
        self._events.append(event | ({"args": details} if details else {}))

    def flush(self) -> None:
        """Writes what is there; the file is complete then."""
        self._file.seek(self._end)
        for event in self._events:
            self._file.write(self._separator + json.dumps(event))
            self._separator = ",\n"
        self._end = self._file.tell()
        self._file.write(TAIL)
        self._file.flush()
        self._events.clear()

    def _micros(self, at: int) -> float:
        return (at - self._began) / 1e3

    def _name(self, what: str, process: int, lane: int, name: str) -> None:
        self._events.append({"name": what, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}})


class _Timed:
    """Hands everything on; the subclasses time some of it."""

    def __init__(self, inner: Any, trace: Trace):
        self._inner = inner
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _verb(self, name: str, start: int) -> int:
        """Ends a verb that began at `start`; returns the time now."""
        now = time.perf_counter_ns()
        self._trace.span(LOOP, VERBS, name, start, now)
        return now


class TracedScheduler(_Timed):
    """A Scheduler whose decisions are written down."""

    def __init__(self, scheduler: Any, trace: Trace, runner: "TracedRunner"):
        super().__init__(scheduler, trace)
        self._runner = runner
        self._begun: dict[int, int] = {}  # step -> when its schedule began
        self._overlaps = False  # whether a step was ever scheduled before the one before it was committed
        self._reason = ""
        self._since_flush = 0

    def schedule(self, step_input: StepInput) -> Schedule:
        start = time.perf_counter_ns()
        schedule: Schedule = self._inner.schedule(step_input)
        now = self._verb("schedule", start)
        self._begun[schedule.step] = start
        self._overlaps = self._overlaps or len(self._begun) > 1
        for sequence in schedule.preempted:
            self._trace.moment(f"preempted: {sequence.request.request_id}", now, tokens=len(sequence.tokens))
        reason = self._inner.why_waiting(schedule)
        if reason != self._reason:
            self._trace.moment(f"the queue waits: {reason}" if reason else "nobody waits", now)
            self._reason = reason
        return schedule

    def commit(self, schedule: Schedule, decision: Decision) -> list[Output]:
        start = time.perf_counter_ns()
        if schedule.rows and self._runner.arrived is not None:
            self._trace.span(LOOP, VERBS, "decode", self._runner.arrived, start)
        outputs: list[Output] = self._inner.commit(schedule, decision)
        now = self._verb("commit", start)
        self._step(schedule, outputs, now)
        self._since_flush += 1
        if self._since_flush >= FLUSH_STEPS or not self._inner.has_work():
            self._since_flush = 0
            self._runner.write_kernels()
            self._trace.flush()
        return outputs

    def take_back(self) -> None:
        self._trace.moment("a step failed: all that ran waits again", time.perf_counter_ns())
        self._begun.clear()
        self._inner.take_back()

    def _step(self, schedule: Schedule, outputs: list[Output], now: int) -> None:
        ended = {output.request_id: output.finish_reason.value for output in outputs if output.finish_reason is not None}
        start = self._begun.pop(schedule.step, now)
        if not schedule.rows and not ended:
            return
        self._trace.span(
            LOOP,
            OTHER_STEPS if self._overlaps and schedule.step % 2 == 0 else STEPS,
            f"step {schedule.step}",
            start,
            now,
            tokens=schedule.num_tokens,
            sequences=len(schedule.rows),
            drawn=sum(len(output.token_ids) for output in outputs),
            waiting=self._inner.num_waiting,
            why_waiting=self._reason,
            preempted=[sequence.request.request_id for sequence in schedule.preempted],
            block_copies=sum(map(len, schedule.kv_copies)),
            ended=ended,
        )


class TracedRunner(_Timed):
    """A runner whose verbs, rows and kernels are written down. `kernels` says what ran during `run` (runner/timeline.py)."""

    def __init__(self, runner: Any, trace: Trace, kernels: Any):
        super().__init__(runner, trace)
        self._kernels = kernels
        self._run_began = 0
        self.arrived: int | None = None  # when the last Selection reached the host

    def prepare(self, schedule: Schedule) -> Any:
        start = time.perf_counter_ns()
        prepared = self._inner.prepare(schedule)
        self._verb("prepare", start)
        return prepared

    def run(self, prepared: Any) -> Any:
        self._run_began = start = time.perf_counter_ns()
        result = self._kernels.run(self._inner, prepared)
        self._verb("run", start)
        return result

    def select(self, prepared: Any, hidden: Any, schedule: Schedule) -> "TracedPending":
        start = time.perf_counter_ns()
        pending = self._inner.select(prepared, hidden, schedule)
        now = self._verb("select", start)
        for row in schedule.rows:
            name, end = row.sequence.request.request_id, row.start + row.num_tokens
            what = f"token {end}" if row.num_tokens == 1 else f"[{row.start}, {end})"
            if row.sequence.seat is not None:
                self._trace.span(
                    SEQUENCES, row.sequence.seat + 1, f"{name}, {what}", self._run_began, now, choice=row.sequence.index
                )
        return TracedPending(pending, self._trace, self)

    def write_kernels(self) -> None:
        """Puts the kernels that ran since the last call on their lane."""
        for name, start, end in self._kernels.take(self._trace.clock_offset):
            self._trace.span(LOOP, KERNELS, name, start, end)


class TracedPending(_Timed):
    """A Selection on its way."""

    def __init__(self, pending: Any, trace: Trace, runner: TracedRunner):
        super().__init__(pending, trace)
        self._runner = runner

    def arrive(self) -> Any:
        start = time.perf_counter_ns()
        selection = self._inner.arrive()
        self._runner.arrived = self._verb("arrive", start)
        return selection
