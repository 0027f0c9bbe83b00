"""Shared by all tests: one thread per test process, since tiny networks gain nothing from two and lose much to waiting."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
