"""The executor's threads: barriers under stress, fewer threads than asked for, sleep, forks, exits, signals, affinity."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvant.config.compilers import find_compilers
from tests.native.test_executor import small_ids
from tests.native.test_operations import llama_layer

STRESS = os.path.join(os.path.dirname(__file__), "pool_stress.cpp")


def stress(tmp_path, steps, *flags):
    from kvant.native.build import HERE

    compiler = next((each for each in find_compilers() if not each.is_zig), None)
    if compiler is None:
        pytest.skip("no C++ compiler of the system")
    program = str(tmp_path / "stress")
    command = [*compiler.command, "-std=c++17", "-O1", "-g", "-pthread", *flags, f"-I{HERE}", STRESS, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizer runtime")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, str(steps)], capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, (done.stdout + done.stderr)[-4000:]


def test_barriers_shared_work_and_exceptions_on_up_to_eight_threads(tmp_path):
    stress(tmp_path, 70)


@pytest.mark.slow
def test_the_same_for_long(tmp_path):
    stress(tmp_path, 3000)


@pytest.mark.slow
def test_the_same_under_the_thread_sanitizer(tmp_path):
    stress(tmp_path, 400, "-fsanitize=thread")


# --- one model, in this process -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(native):
    return llama_layer().finish(native, threads=2)


def test_threads_sleep_while_nobody_asks(model):
    model.run(small_ids(4), model.new_cache([12]))
    time.sleep(0.05)  # they spin for 0.4 ms
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05  # one spinning thread would make it 0.5


def test_a_forked_process_computes_with_threads_of_its_own(model):
    cache = model.new_cache([12])
    expected = model.run(small_ids(4), cache).hidden.copy()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # waiting for threads that are not there would be for ever
        same = all(np.array_equal(model.run(small_ids(4), cache).hidden, expected) for _ in range(3))
        other = llama_layer().finish(model.library, threads=2)
        del other
        threads = len(os.listdir("/proc/self/task"))
        os._exit(0 if same and threads >= 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(model.run(small_ids(4), cache).hidden, expected)


def test_a_forked_process_that_only_drops_the_model(native):
    model = llama_layer().finish(native, threads=3)
    model.run(small_ids(4), model.new_cache([12]))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        model.__del__()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- processes of their own ---------------------------------------------------------------------------------------------

BEGIN = """
import os, resource, sys, threading, time
import numpy as np
from kvant.native import build
from tests.native.test_executor import small_ids
from tests.native.test_operations import llama_layer
library = build.load(print)
"""


def run(code: str, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE, text=True, **options)


def said(process: subprocess.Popen) -> list[str]:
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    return out.split()


def test_fewer_threads_than_asked_for(native):
    """Address space for a few stacks only; limits on the number of threads end in the same error."""
    code = """
few = llama_layer().finish(library, threads=2)
expected = few.run(small_ids(40), few.new_cache([12])).hidden.copy()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (120 << 20), resource.RLIM_INFINITY))
many = llama_layer().finish(library, threads=256)
print(many.threads, np.array_equal(many.run(small_ids(40), many.new_cache([12])).hidden, expected))
"""
    threads, same = said(run(code))
    assert 1 <= int(threads) < 256 and same == "True"


def test_a_process_ends_while_its_threads_compute(native):
    code = """
model = llama_layer().finish(library, threads=3)
cache = model.new_cache([12])
def always():
    while True:
        model.run(small_ids(100), cache)
threading.Thread(target=always, daemon=True).start()
time.sleep(0.1)
print("ended")
"""
    assert said(run(code)) == ["ended"]


def test_ctrl_c_between_steps_leaves_a_working_model(native):
    code = """
model = llama_layer().finish(library, threads=2)
cache = model.new_cache([12])
expected = model.run(small_ids(100), cache).hidden.copy()
print("running", flush=True)
try:
    while True:
        model.run(small_ids(100), cache)
except KeyboardInterrupt:
    print(np.array_equal(model.run(small_ids(100), cache).hidden, expected))
"""
    process = run(code)
    assert process.stdout.readline() == "running\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert said(process) == ["True"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a system without affinity")
def test_threads_stay_on_the_cpus_that_the_user_chose(native):
    code = """
from pathlib import Path
from kvant.config.engine import EngineConfig
from kvant.config.hardware import detect
from kvant.config.resolve import choose_threads
model = llama_layer().finish(library, threads=2)
model.run(small_ids(4), model.new_cache([12]))
statuses = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
masks = {line.split()[1] for text in statuses for line in text.splitlines() if line.startswith("Cpus_allowed_list")}
print(choose_threads(EngineConfig(), detect()).value, *masks)
"""
    cpu = min(os.sched_getaffinity(0))
    assert said(run(code, preexec_fn=lambda: os.sched_setaffinity(0, {cpu}))) == ["1", str(cpu)]
