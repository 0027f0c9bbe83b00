"""A small process that starts a program and watches it: time to its first byte, its memory, its text.

    python -I launcher.py PROGRAM ARGUMENTS...
    prints {"first_byte": s, "seconds": s, "peak_bytes": n, "exit_code": n, "text": "..."}

Why a process of its own: a program's largest resident size, as the kernel reports it, begins with that of the process that
started it. A benchmark that holds a model would lend its hundreds of megabytes to whatever it starts; this one holds ten.
It must therefore import nothing but a few modules of the standard library.
"""

import json
import os
import subprocess
import sys
import time


def watch(command: list[str]) -> dict[str, object]:
    """Runs `command` to its end."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    written = os.read(process.stdout.fileno(), 1)
    first_byte = time.perf_counter() - start
    written += process.stdout.read()
    # Not process.wait(): only this call says how much memory the process held.
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "first_byte": first_byte,
        "seconds": seconds,
        "peak_bytes": usage.ru_maxrss * 1024,
        "exit_code": process.returncode,
        "text": written.decode(errors="replace").strip(),
    }


if __name__ == "__main__":
    json.dump(watch(sys.argv[1:]), sys.stdout)
