"""The machine under a measurement: what it is, and how much of it others used meanwhile.

A benchmark that shares its cores measures the neighbours. `lap` says how many cores were busy with work that is neither
this process's nor that of the programs it started, so that a result can be told from a quiet machine and from a busy one.
"""

import os
import platform
import resource
from pathlib import Path

from kvant.config.hardware import detect


class Machine:
    """A stopwatch for other people's CPU time."""

    def __init__(self) -> None:
        self.laps: list[float] = []
        self._last = self._read()

    def lap(self) -> float:
        """Cores that others used since the last lap, on average. Time stolen by the hypervisor counts as theirs."""
        now = self._read()
        wall, busy, own = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        self.laps.append(round(max(0.0, busy - own) / wall, 3))
        return self.laps[-1]

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds: of the clock, of all busy cores, of this process and its finished children."""
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        )
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(usage.ru_utime + usage.ru_stime for usage in used)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return os.times().elapsed, busy, own

    @staticmethod
    def describe() -> dict[str, object]:
        """Processor, its cores and flags, system."""
        hardware = detect()
        return {
            "processor": hardware.cpu_name,
            "cores": hardware.num_cores,
            "flags": sorted(hardware.cpu_flags),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        }
