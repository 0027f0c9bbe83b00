"""What is measured, in words that every engine understands, and what an engine gives back.

Load      so many streams, each a prompt and so many new tokens: all engines get the same
Pace      seconds and speeds of one run of a load, taken apart into the prompt's part and the new tokens' part
Launch    a program from its start to the first byte of its answer
"""

import os
import subprocess
import time
from typing import NamedTuple


class Load(NamedTuple):
    """`streams` prompts of `prompt` tokens that arrive together; `new` tokens each (1: only the prompt's speed counts)."""

    streams: int
    prompt: int
    new: int


class Pace(NamedTuple):
    """Tokens per second. None: this load does not measure it."""

    prompt: float | None  # prompt tokens, until the first new token is known
    decode: float | None  # new tokens while all streams run; the prompts' time is left out
    whole: float | None  # new tokens over everything, prompts included


class Launch(NamedTuple):
    """One run of a program."""

    first_byte: float  # seconds from the start of the process
    peak_bytes: int  # largest resident memory
    text: str  # what it wrote


def launch(command: list[str]) -> Launch:
    """Runs `command`. Raises with its complaint where it fails or says nothing."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    written = os.read(process.stdout.fileno(), 1)
    first_byte = time.perf_counter() - start
    written += process.stdout.read()
    # Not process.wait(): only this call says how much memory the process held.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode or not written:
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(command)}")
    return Launch(first_byte, usage.ru_maxrss * 1024, written.decode(errors="replace").strip())
