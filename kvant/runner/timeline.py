"""Which kernels ran when, for a trace. One class per executor, the same two verbs:

run     runs a prepared step
take    the kernels since the last call: (name, start, end), on the host's perf_counter_ns

native   the executor's clock gives each operation's length; they follow one another, so their starts are sums
cuda     the driver's own records (torch.profiler), on its clock, which counts from 1970 as `time.time_ns` does
"""

from time import perf_counter_ns
from typing import Any

Kernel = tuple[str, int, int]


class NativeTimeline:
    """Of a NativeRunner."""

    def __init__(self) -> None:
        self._kernels: list[Kernel] = []

    def run(self, runner: Any, prepared: Any) -> Any:
        with runner.model.profiled() as times:
            start = perf_counter_ns()
            result = runner.run(prepared)
        for operation, length in zip(runner.model.operations, times.tolist(), strict=True):
            self._kernels.append((operation.label, start, start + length))
            start += length
        return result

    def take(self, clock_offset: int) -> list[Kernel]:
        kernels, self._kernels = self._kernels, []
        return kernels


class CudaTimeline:
    """Of a TorchRunner on a GPU. Records from the first step of a trace to its flush, and on."""

    def __init__(self) -> None:
        self._recording: Any = None

    def run(self, runner: Any, prepared: Any) -> Any:
        import torch

        if self._recording is None:
            self._recording = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._recording.start()
        return runner.run(prepared)

    def take(self, clock_offset: int) -> list[Kernel]:
        import torch

        if self._recording is None:
            return []
        torch.cuda.synchronize()
        recording, self._recording = self._recording, None
        recording.stop()
        began = recording.profiler.kineto_results.trace_start_ns() - clock_offset
        return [
            (event.name, began + round(1e3 * event.time_range.start), began + round(1e3 * event.time_range.end))
            for event in recording.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]


class NoTimeline:
    """Of torch on a CPU, where a step has thousands of operators and each takes longer to record than to run."""

    def run(self, runner: Any, prepared: Any) -> Any:
        return runner.run(prepared)

    def take(self, clock_offset: int) -> list[Kernel]:
        return []


def timeline(runner: Any, device: str) -> NativeTimeline | CudaTimeline | NoTimeline:
    """The one for `runner`."""
    if runner.executor == "native":
        return NativeTimeline()
    return CudaTimeline() if device == "cuda" else NoTimeline()
