"""Spoiled model files end in an answer or in one clear line, soon, in little memory, and run nothing.

The work is done in processes of their own (`run.py`), whose memory can be read and whose death would be seen. A failure names
its case: `python -m tests.fuzz.run --only KIND --first NUMBER --count 1` repeats it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvant.checkpoint.gguf import read_gguf
from kvant.errors import CheckpointError
from tests.checkpoint.files import gguf_bytes
from tests.fuzz.models import boundaries, gguf_model
from tests.fuzz.run import SECONDS

ROOT = Path(__file__).parent.parent.parent
PEAK_KIB = 320 << 10  # Python, numpy, the native step and the tokenizers take 80 MB, some tokenizers in between 60 more
KINDS = 14


def fuzz(count: int, first: int = 0, kind: str | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.fuzz.run", "--count", str(count), "--first", str(first)]
    command += [] if kind is None else ["--only", kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == []
    assert result["slowest"][0] < SECONDS, result["slowest"]
    assert result["peak_kib"] < PEAK_KIB
    return result


def test_R37_R38_spoiled_models_answer_or_say_why_not():
    outcomes = fuzz(count=12)["outcomes"]
    assert len(outcomes) == KINDS
    assert sum(sum(counts.values()) for counts in outcomes.values()) == 12 * KINDS
    for kind in ("gguf metadata", "gguf template", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert len(outcomes[kind]) > 1, kind  # neither everything refused nor everything accepted


def test_R37_a_gguf_cut_at_every_border_of_its_fields(tmp_path):
    good, path = gguf_bytes(*gguf_model()), tmp_path / "model.gguf"
    cuts = {max(border + shift, 0) for border in boundaries() for shift in (-1, 0, 1)}
    assert len(cuts) > 300
    for cut in sorted(cuts):
        path.write_bytes(good[:cut])
        with pytest.raises(CheckpointError):
            read_gguf(path)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 2000, 3000])
def test_R37_R38_thousands_of_spoiled_models(first):
    fuzz(count=300, first=first)


@pytest.mark.slow
def test_R37_R38_memory_is_flat():
    """Four times as many models need no more memory."""
    few, many = (fuzz(count=count, first=5000, kind="gguf metadata")["peak_kib"] for count in (300, 1200))
    assert many - few < 16 << 10
