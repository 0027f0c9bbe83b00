"""Every kernel compiles for the GPUs we name, whether or not one is there, and uses the shared memory and the tensor cores
that it should. Programs of their own: here Triton interprets."""

import json
import os
import subprocess
import sys

import pytest

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes a program may have: A100, H100


@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles(capability):
    command = [sys.executable, "-m", "tests.kernels.compile_all", str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 13
    for row in rows:
        assert row["shared"] <= SHARED[capability], f"{row['name']} needs {row['shared']} bytes of shared memory"
    if capability == 90:
        assert {row["name"] for row in rows if row["wgmma"]} == {
            "_skinny_kernel",
            "_prefill_kernel",
            "_attend_kernel",
        }
