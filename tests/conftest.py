"""Shared by all tests: one thread per test process, since tiny networks gain nothing from two and lose much to waiting.

Kernels run in Triton's interpreter where there is no GPU; Triton reads that when it is first imported, so it stands here.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KVANT_PACKED_GIB", "0")  # networks of a test's own are loaded once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")
