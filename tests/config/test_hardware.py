"""detect() against the /proc and /sys of machines that are not here: each case lays out the files it needs in a folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvant.config.hardware import Gpu, _visible, detect

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CPUINFO = "processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: fpu sse2 avx2 fma avx512f avx512_bf16 amx_tile\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    defaults = {
        "proc/cpuinfo": CPUINFO,
        "proc/meminfo": f"MemTotal: {16 * GIB // KIB} kB\nMemFree: {2 * GIB // KIB} kB\nMemAvailable: {12 * GIB // KIB} kB\n",
    }
    for name, text in {**defaults, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def look(root: Path, files: dict[str, str] | None = None, cpus: range = range(8)):
    return detect(machine(root, files or {}), affinity=cpus, which=lambda name: None)


def test_processor(tmp_path):
    seen = look(tmp_path)
    assert seen.cpu_name == "Fast 9000"
    assert seen.cpu_flags == {"avx2", "fma", "avx512f", "avx512_bf16", "amx_tile"}
    assert (seen.num_cpus, seen.num_cores) == (8, 8)
    assert seen.gpus == ()


def test_hyperthreads_are_one_core(tmp_path):
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)
    }
    assert look(tmp_path, siblings).num_cores == 4
    assert detect(tmp_path, affinity=[0, 4, 1], which=lambda name: None).num_cores == 2


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),  # half a core is still one thread
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        # the group above has less than the process's own
        (
            {
                "proc/self/cgroup": "0::/pod/app\n",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/pod/app/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "garbage\n\n", "sys/fs/cgroup/cpu.max": "x y z\n"}, 8),
    ],
)
def test_cpu_quota(tmp_path, files, cores):
    seen = look(tmp_path, files)
    assert (seen.num_cores, seen.num_cpus) == (cores, 8)


V2 = {"proc/self/cgroup": "0::/app\n"}
V1 = {"proc/self/cgroup": "5:memory:/app\n0::/\n"}


@pytest.mark.parametrize(
    "files, total, available",
    [
        ({}, 16 * GIB, 12 * GIB),
        # v2: limit - (usage - page cache)
        (
            {
                **V2,
                "sys/fs/cgroup/app/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/app/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/app/memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB}\n",
            },
            4 * GIB,
            3 * GIB,
        ),
        # the machine has less than the group may take
        (
            {**V2, "sys/fs/cgroup/app/memory.max": f"{14 * GIB}\n", "sys/fs/cgroup/app/memory.current": "0\n"},
            14 * GIB,
            12 * GIB,
        ),
        ({**V2, "sys/fs/cgroup/app/memory.max": "max\n", "sys/fs/cgroup/app/memory.current": "5\n"}, 16 * GIB, 12 * GIB),
        # memory.high below memory.max
        (
            {**V2, "sys/fs/cgroup/app/memory.max": f"{8 * GIB}\n", "sys/fs/cgroup/app/memory.high": f"{2 * GIB}\n"},
            2 * GIB,
            2 * GIB,
        ),
        # the group above is tighter
        (
            {
                **V2,
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB // 2}\n",
                "sys/fs/cgroup/app/memory.max": f"{4 * GIB}\n",
            },
            GIB,
            GIB // 2,
        ),
        # v1, whose memory.stat counts subgroups under total_
        (
            {
                **V1,
                "sys/fs/cgroup/memory/app/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/app/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/app/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
            },
            2 * GIB,
            2 * GIB - GIB // 2,
        ),
        # v1 inside a container: the path is the host's, the mount's root is the group
        (
            {
                "proc/self/cgroup": "5:memory:/docker/0123\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{100 * MIB}\n",
            },
            GIB,
            GIB - 100 * MIB,
        ),
        ({**V1, "sys/fs/cgroup/memory/app/memory.limit_in_bytes": "9223372036854771712\n"}, 16 * GIB, 12 * GIB),
        # more used than allowed
        ({**V2, "sys/fs/cgroup/app/memory.max": f"{GIB}\n", "sys/fs/cgroup/app/memory.current": f"{2 * GIB}\n"}, GIB, 0),
        # a group outside of this namespace
        ({"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, GIB, GIB),
        # a kernel before 3.14 has no MemAvailable
        ({"proc/meminfo": f"MemTotal: {GIB // KIB} kB\nMemFree: {MIB // KIB} kB\n"}, GIB, MIB),
    ],
)
def test_memory(tmp_path, files, total, available):
    seen = look(tmp_path, files)
    assert (seen.memory_total, seen.memory_available) == (total, available)


def test_without_proc(tmp_path):
    seen = detect(tmp_path, affinity=[0], which=lambda name: None)
    assert seen.cpu_flags == frozenset()
    assert 0 < seen.memory_available < seen.memory_total


def test_compiler(tmp_path):
    assert look(tmp_path).compiler is None
    found = detect(machine(tmp_path, {}), affinity=[0], which={"clang++": "/bin/clang++", "c++": "/bin/c++"}.get)
    assert found.compiler == "/bin/c++"


def test_gpus_are_asked_only_where_a_device_exists(tmp_path):
    gpu = Gpu(name="H200", memory_total=141 * GIB, memory_free=140 * GIB, compute_capability=(9, 0))
    assert detect(machine(tmp_path, {}), affinity=[0], gpus=lambda: (gpu,)).gpus == (gpu,)
    machine(tmp_path, {"dev/nvidia0": ""})
    detect(tmp_path, affinity=[0])  # with a device file and without (or with) a driver: no error either way


@pytest.mark.parametrize(
    "listed, indices",
    [(None, [0, 1, 2, 3]), ("", []), ("-1", []), ("2", [2]), ("3, 0", [3, 0]), ("1,9,2", [1]), ("GPU-abc", [])],
)
def test_visible_gpus(listed, indices):
    assert _visible(4, listed) == indices


def test_this_machine_without_torch():
    script = (
        "import sys; from kvant.config.hardware import detect; print(detect().num_cores); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1
