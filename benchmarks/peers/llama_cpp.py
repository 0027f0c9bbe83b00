"""llama.cpp as its own benchmark programs measure it, one process per measurement.

    Load(1, N, 1)    llama-bench -p N -n 0           the prompt alone, after an untimed one
    Load(1, D, N)    llama-bench -p 0 -n N -d D      N tokens after D of context; filling the context is not timed
    Load(B, P, N)    llama-batched-bench             B sequences of their own, side by side

These programs decode tokens drawn at random and never look at the logits: choosing tokens and turning them into text costs
them nothing. Both flash-attention settings are tried in turn; the caller keeps the better one.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.scenario import Launch, Load, Pace, launch

SETTINGS = ("off", "on")  # of --flash-attn; the default takes "on" wherever it works, which is slower in some rows


class LlamaCpp:
    """The programs of one build, for one model file."""

    def __init__(self, programs: dict[str, Path], model: Path, threads: int):
        self.programs = programs
        self.common = ["-m", str(model), "-t", str(threads)]

    def pace(self, load: Load, flash_attention: str) -> Pace:
        """One run of `load`."""
        if load.streams == 1:
            return self._bench(load, flash_attention)
        size = load.streams * (load.prompt + load.new)
        lengths = ["-npp", str(load.prompt), "-ntg", str(load.new), "-npl", str(load.streams), "-c", str(size)]
        line = self._json("llama-batched-bench", *lengths, "-fa", flash_attention, "--output-format", "jsonl")
        return Pace(line["speed_pp"], line["speed_tg"], load.streams * load.new / line["t"])

    def start(self, text: str, tokens: int, context: int) -> Launch:
        """A process of its own that answers `text` with at most `tokens` tokens. Without its warm-up, which costs time."""
        program = str(self.programs["llama-completion"])
        plain = ["-no-cnv", "--no-display-prompt", "--no-warmup", "--simple-io", "--no-escape", "--temp", "0"]
        return launch([program, *self.common, "-p", text, "-n", str(tokens), "-c", str(context), *plain])

    def _bench(self, load: Load, flash_attention: str) -> Pace:
        if load.new == 1:
            lengths = ["-p", str(load.prompt), "-n", "0"]
        else:
            lengths = ["-p", "0", "-n", str(load.new), "-d", str(load.prompt)]
        speed = self._json("llama-bench", *lengths, "-r", "1", "-o", "jsonl", "-fa", flash_attention)["avg_ts"]
        return Pace(speed, None, None) if load.new == 1 else Pace(None, speed, None)

    def _json(self, program: str, *arguments: str) -> dict[str, Any]:
        command = [str(self.programs[program]), *self.common, *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or len(lines) != 1:
            raise RuntimeError(f"exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}")
        return dict(json.loads(lines[0]))
