"""Hardware: what this machine has for this process. Read once at start-up, without torch; nothing is decided here.

What a machine has and what a process may use are two things. The smallest of the following counts:

    cores     affinity mask  ·  physical cores behind it  ·  CPU quota of the cgroup and of every group above it
    memory    MemAvailable   ·  per cgroup: limit - (usage - page cache that the kernel gives back when asked)

Everything is read below `root`, so that a test can lay out the `/proc` and `/sys` of any machine in a folder. A file that
is missing or unreadable means "no limit"; on systems without `/proc` the numbers come from `sysconf`.
"""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvant.config.compilers import find_compilers
from kvant.config.environment import read_environment

CPU_FLAGS = (  # the ones that decide which arithmetic is fast, under the names of /proc/cpuinfo
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU. Memory in bytes; `memory_free` leaves out what other processes hold."""

    name: str
    memory_total: int
    memory_free: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What this process may use. Memory in bytes."""

    cpu_name: str
    cpu_flags: frozenset[str]  # of CPU_FLAGS
    num_cpus: int  # hardware threads
    num_cores: int  # physical cores, cut to the CPU quota: what a thread each is worth having for
    memory_total: int  # of the machine, or the cgroup's limit where that is less
    memory_available: int
    compiler: str | None  # the C++ compiler that comes first
    gpus: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None  # CUDA version that the installed torch was built for; None: a CPU build, or no torch


def detect(
    root: Path = Path("/"),
    *,
    affinity: Collection[int] | None = None,
    which: Callable[[str], str | None] = shutil.which,
    gpus: Callable[[], tuple[Gpu, ...]] | None = None,
) -> Hardware:
    """Reads the machine. `root`, `affinity` (CPU numbers), `which` and `gpus` stand in for the real ones in tests."""
    cpus = set(affinity if affinity is not None else _affinity())
    cpuinfo = _text(root / "proc/cpuinfo")
    total, available = _memory(root)
    return Hardware(
        cpu_name=_cpu_name(cpuinfo),
        cpu_flags=_cpu_flags(cpuinfo),
        num_cpus=len(cpus),
        num_cores=_num_cores(root, cpus),
        memory_total=total,
        memory_available=available,
        compiler=next((str(compiler) for compiler in find_compilers(which)), None),
        gpus=(gpus or (lambda: _gpus(root)))(),
        torch_cuda=_torch_cuda(),
    )


# --- processor ----------------------------------------------------------------------------------------------------------


def _affinity() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _cpu_name(cpuinfo: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpu_flags(cpuinfo: str) -> frozenset[str]:
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match[1].split() if match else ()) & frozenset(CPU_FLAGS)


def _num_cores(root: Path, cpus: set[int]) -> int:
    """Physical cores behind `cpus`, at most the CPU quota.

    The quota is rounded down: a thread more than it pays for is stopped in the middle of a step while the others wait.
    """
    siblings = {cpu: _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    cores = len({listed.strip() or str(cpu) for cpu, listed in siblings.items()})
    quotas = [quota for group in _cgroups(root, "cpu") if (quota := _cpu_quota(group))]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def _cpu_quota(group: Path) -> float | None:
    """CPUs' worth of time that one cgroup may use, or None."""
    words = _text(group / "cpu.max").split()  # v2: "max 100000" or "150000 100000"
    if len(words) != 2:
        words = [_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()]  # v1: -1 is none
    if not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])


# --- memory -------------------------------------------------------------------------------------------------------------


def _memory(root: Path) -> tuple[int, int]:
    """(total, available) bytes."""
    fields = _numbers(_text(root / "proc/meminfo").replace(":", " "))
    if "MemTotal" in fields:
        total = fields["MemTotal"] * 1024
        available = fields.get("MemAvailable", fields.get("MemFree", 0)) * 1024
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
        available = total // 2  # nobody says how much is in use: half is a guess that leaves the rest alone
    for group in _cgroups(root, "memory"):
        limit = _memory_limit(group)
        if limit is None or limit >= total:
            continue
        total = limit
        available = min(available, max(0, limit - _memory_held(group)))
    return total, available


def _memory_limit(group: Path) -> int | None:
    """The limit of one cgroup in bytes. memory.high counts too: beyond it the kernel slows the process to a crawl."""
    texts = [_text(group / name).strip() for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text.isdecimal()]  # v2 says "max" for none, v1 a huge number
    return min(limits, default=None)


def _memory_held(group: Path) -> int:
    """Bytes that one cgroup uses and cannot simply give back: usage without the page cache of files."""
    usage = next(
        (
            int(text)
            for name in ("memory.current", "memory.usage_in_bytes")
            if (text := _text(group / name).strip()).isdecimal()
        ),
        0,
    )
    stat = _numbers(_text(group / "memory.stat"))
    cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))  # v1 sums: total_
    return max(0, usage - cache)


# --- cgroups ------------------------------------------------------------------------------------------------------------


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups that bind this process for `controller`: its own and every one above it.

    /proc/self/cgroup has lines `0::/path` (v2) and `4:memory:/path` (v1). In a container the path may be the host's and
    not exist here; the mount's root is then the container's own group, which the walk upwards ends at anyway.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # a group outside of this namespace
            parts = []
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


# --- GPUs ---------------------------------------------------------------------------------------------------------------


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA's GPUs as the driver lists them (nvml.h), in the order of their bus ids.

    The driver library is loaded only where a device file exists. CUDA_VISIBLE_DEVICES is honoured as far as it lists
    numbers.
    """
    if not any((root / "dev" / name).exists() for name in ("nvidiactl", "nvidia0", "dxg")):
        return ()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count, visible = ctypes.c_uint(), read_environment().visible_gpus
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return tuple(gpu for index in _visible(count.value, visible) if (gpu := _gpu(nvml, index)))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _NvmlMemory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        or nvml.nvmlDeviceGetName(handle, name, len(name))
        or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    if failed:
        return None
    return Gpu(
        name=name.value.decode(errors="replace"),
        memory_total=memory.total,
        memory_free=memory.free,
        compute_capability=(major.value, minor.value),
    )


def _visible(count: int, listed: str | None) -> list[int]:
    """Indices that CUDA_VISIBLE_DEVICES leaves of `count`; like CUDA, it stops at the first entry that names no device."""
    if listed is None:
        return list(range(count))
    indices: list[int] = []
    for entry in listed.split(","):
        if not entry.strip().isdecimal() or int(entry) >= count:
            break
        indices.append(int(entry))
    return indices


def _torch_cuda() -> str | None:
    """The CUDA version in torch/version.py, read as text: importing torch takes two seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", _text(Path(found.origin).with_name("version.py")), re.MULTILINE)
    return match[1] if match else None


# --- reading ------------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _numbers(text: str) -> dict[str, int]:
    """Lines of `name number ...` as a dictionary."""
    pairs = (line.split()[:2] for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
