"""What is measured, in words that every engine understands, and what an engine gives back.

Load      so many streams, each a prompt and so many new tokens: all engines get the same
Pace      seconds and speeds of one run of a load, taken apart into the prompt's part and the new tokens' part
Launch    a program from its start to the first byte of its answer
"""

import json
import subprocess
import sys
from pathlib import Path
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
    seconds: float  # until it ended
    peak_bytes: int  # largest resident memory
    text: str  # what it wrote


def launch(command: list[str], environment: dict[str, str] | None = None) -> Launch:
    """Runs `command`, with this process's variables unless told otherwise. Raises where it fails or says nothing."""
    watcher = [sys.executable, "-I", str(Path(__file__).with_name("launcher.py"))]
    seen = json.loads(run([*watcher, *command], environment))
    if seen.pop("exit_code") or not seen["text"]:
        raise RuntimeError(f"it failed or said nothing: {' '.join(command)}")
    return Launch(**seen)


def run(command: list[str], environment: dict[str, str] | None = None) -> bytes:
    """What `command` writes. Raises where it fails."""
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
