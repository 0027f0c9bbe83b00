"""A program in a terminal of its own: type, and wait for what it shows."""

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE = 20.0  # seconds; only a failing test waits that long


class Terminal:
    """`kvant ARGUMENTS` with a FakeLLM of these settings, seen through a pseudo-terminal."""

    def __init__(self, cache: Path, *arguments: str, environment: dict[str, str] | None = None, **fake: Any):
        self.master, slave = pty.openpty()
        self.shown = ""
        self._seen = 0
        variables = {**os.environ, "KVANT_CACHE": str(cache), "FAKE": json.dumps(fake), "TERM": "xterm", "COLUMNS": "200"}
        variables.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.fake", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**variables, **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )
        os.close(slave)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt_at_prompt(self) -> None:
        """Ctrl-C while the program waits for a line: the prompt is shown a moment before it really waits."""
        time.sleep(0.1)
        self.type(CTRL_C)

    def ask(self, line: str) -> None:
        self.type(line + "\n")

    def expect(self, text: str) -> str:
        """Waits until `text` is shown after what was expected before; gives what stands between."""
        end = time.monotonic() + PATIENCE
        while (at := self.shown.find(text, self._seen)) < 0:
            if not self._read(end):
                raise AssertionError(f"{text!r} was not shown; shown was:\n{self.shown[self._seen :]}")
        between, self._seen = self.shown[self._seen : at], at + len(text)
        return between

    def exit_code(self) -> int:
        end = time.monotonic() + PATIENCE
        while self._read(end):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, end: float) -> bool:
        """Reads what is there, waiting for it; False at the end of the program or of patience."""
        if not select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
