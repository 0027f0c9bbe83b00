"""The three standard streams, made safe to use whoever started the program, and let go of without a last complaint."""

import io
import os
import sys


def prepare() -> None:
    """A stream that is closed becomes one of nothing; what cannot be read or shown becomes "?", and does not end the answer."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # Kept open for good. It takes the free number, so that no other file becomes "standard output".
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def finish() -> OSError | None:
    """Writes what is still held back. What cannot be written is given up, and why is returned."""
    problem = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            problem = problem or error
            _silence(stream)
    return problem


def _silence(stream: object) -> None:
    """Points a stream's file at nothing: Python flushes once more when it ends, and would print a traceback."""
    if isinstance(stream, io.TextIOWrapper):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
