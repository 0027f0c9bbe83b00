"""llama.cpp's distance from the same fp32 reference, by its own `llama-perplexity --kl-divergence`.

That program compares a model with log-probabilities from a file, which another run of it wrote for the unrounded model. Here
Kvant's fp32 reference writes the file. Only the second half of each window counts (positions n/2 to n - 2):

    "_logits_" · int32 n (window), V, W (windows) · int32 tokens [W, n]
    for each window, each counted position:   fp32 scale · fp32 lowest · uint16 code [V rounded up to even]
                                              log p(v) = lowest + scale * code[v], never below the largest - 16

    prompt      --ubatch-size 512     decode_8    8 rows of one window at a time: the same arithmetic as eight streams

The file takes 1.1 GB for SmolLM2's vocabulary and 5.9 GB for Gemma's.
"""

import re
import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.teacher import Reference
from kvant.config.environment import child_environment

DEEPEST = 16.0  # nats below the largest
CODES = 65535
HEAD = 4  # uint16 that hold two floats
FIGURES = {
    "perplexity": r"Mean PPL\(Q\)\s*:\s*(\S+)",
    "reference_perplexity": r"Mean PPL\(base\)\s*:\s*(\S+)",
    "ratio": r"Mean PPL\(Q\)/PPL\(base\)\s*:\s*(\S+)",
    "ratio_error": r"Mean PPL\(Q\)/PPL\(base\)\s*:\s*\S+\s*\S+\s*(\S+)",
    "mean_kl": r"Mean\s+KLD:\s*(\S+)",
    "p99_kl": r"99\.0%\s+KLD:\s*(\S+)",
    "top1_percent": r"Same top p:\s*(\S+)",
}


def second_half(window: int) -> slice:
    """Positions that llama.cpp counts, of the `window - 1` that have a token after them."""
    return slice(window // 2, window - 1)


def write_reference(path: Path, reference: Reference, most: int | None) -> None:
    """The file that `--kl-divergence-base` reads, of the reference's first `most` windows."""
    ids = reference.ids[:most]
    count, size = ids.shape
    positions = np.arange(size)[second_half(size)]
    with path.open("wb") as file:
        file.write(b"_logits_")
        np.array([size, reference.vocab_size, count], np.int32).tofile(file)
        ids.astype(np.int32).tofile(file)
        for window in range(count):
            for part in np.array_split(positions, -(-len(positions) // 64)):
                encode(reference.logits(np.full(len(part), window), part)).tofile(file)


def encode(logits: Tensor) -> np.ndarray:
    """Rows of fp32 logits [R, V] as the file holds them: uint16 [R, 4 + V rounded up to even]."""
    rows, vocab = logits.shape
    top = logits.amax(-1, keepdim=True)
    lowest = torch.maximum(logits.amin(-1, keepdim=True), top - DEEPEST)
    scale = (top - lowest) / CODES
    codes = ((logits - lowest) / scale).round().clamp_(0, CODES)
    head = torch.cat((scale, lowest - logits.logsumexp(-1, keepdim=True)), 1).numpy().astype(np.float32)
    out = np.zeros((rows, HEAD + vocab + vocab % 2), np.uint16)
    out[:, :HEAD] = head.view(np.uint16)
    out[:, HEAD : HEAD + vocab] = codes.numpy().astype(np.uint16)
    return out


def measure(program: Path, model: Path, base: Path, threads: int, window: int, rows: int) -> dict[str, float]:
    """The figures of `distance.summary` for llama.cpp, multiplying `rows` rows at a time. Raises RuntimeError."""
    sizes = ["-c", str(window), "-b", str(window), "-ub", str(rows), "-t", str(threads), "-tb", str(threads)]
    command = [str(program), "-m", str(model), "--kl-divergence", "--kl-divergence-base", str(base), *sizes]
    # Not timed: threads that sleep at barriers instead of spinning leave the cores to others, and give the same numbers.
    patient = child_environment(OMP_WAIT_POLICY="passive")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=patient)
    return parse(done.stdout + done.stderr, done.returncode)


def parse(text: str, exit_code: int) -> dict[str, float]:
    found = {name: re.search(pattern, text) for name, pattern in FIGURES.items()}
    if exit_code or None in found.values():
        raise RuntimeError(f"exit code {exit_code} of llama-perplexity:\n{text[-2000:]}")
    figures = {name: float(match[1].rstrip("%")) for name, match in found.items() if match}
    ratio, error = figures.pop("ratio"), figures.pop("ratio_error")
    return figures | {"change_percent": round(100 * (ratio - 1), 4), "change_error": round(100 * error, 4)}
