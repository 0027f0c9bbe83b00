"""The machine under a measurement: what it is, and how much of it others used meanwhile.

A benchmark that shares its cores measures the neighbours. `lap` says how many cores were busy with work that is neither
this process's nor that of the programs it started, so that a result from a quiet machine can be told from one of a busy
machine; `settle` waits for the neighbours to finish.
"""

import os
import platform
import resource
import time
from pathlib import Path

from kvant.config.hardware import detect

QUIET = 0.1  # cores: what a system does in the background
GLANCE = 0.5  # seconds


class Machine:
    """A stopwatch for other people's CPU time."""

    def __init__(self) -> None:
        self._last = self._read()

    def lap(self) -> float:
        """Cores that others used since the last lap, on average. Time stolen by the hypervisor counts as theirs."""
        now = self._read()
        wall, busy, own = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return max(0.0, busy - own) / wall

    def settle(self, end: float) -> None:
        """Returns once others have been quiet for a moment, or at `end` (of time.monotonic). Begins a new lap."""
        self._last = self._read()
        while time.monotonic() < end:
            time.sleep(GLANCE)
            if self.lap() < QUIET:
                return

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds: of the clock, of all busy cores, of this process and its finished children."""
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        )
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(usage.ru_utime + usage.ru_stime for usage in used)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, own

    @staticmethod
    def describe() -> dict[str, object]:
        """Processor, its cores and flags, system."""
        hardware = detect()
        return {
            "processor": hardware.cpu_name,
            "cores": hardware.num_cores,
            "flags": " ".join(sorted(hardware.cpu_flags)),
            "system": platform.system(),
            "python": platform.python_version(),
        }
