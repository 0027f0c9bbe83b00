"""The memory plan's numbers for drawing and scoring, held against what torch really allocates."""

import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvant.config.memory import SAMPLER_BYTES, SCORE_BYTES
from kvant.sampling import host, logprobs, sampler
from kvant.sampling.plan import DrawPlan

ROWS, VOCAB = 16, 4096


class Peak(TorchDispatchMode):
    """Bytes of all storages that a tensor made inside is alive on, at most. Sees every operation, on any device."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self.holders = {}  # storage -> how many tensors are on it
        self.sizes = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor)
        return out

    def _meet(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.holders[key] = self.holders.get(key, 0) + 1
        self.sizes[key] = storage.nbytes()
        self.most = max(self.most, sum(self.sizes.values()))
        weakref.finalize(tensor, self._leave, key)

    def _leave(self, key):
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key], self.sizes[key]


def plan(rows=ROWS):
    return DrawPlan(
        rows=np.arange(rows),
        indices=np.zeros(rows, np.int64),
        temperature=np.ones(rows, np.float32),
        top_k=np.full(rows, VOCAB),
        top_p=np.full(rows, 0.9, np.float32),
        min_p=np.full(rows, 0.01, np.float32),
        seeds=np.arange(rows),
        positions=np.zeros(rows, np.int64),
        forbidden=[(0, np.array([1]))],
        biased=[],
        penalised=[],
        presence=np.zeros(0, np.float32),
        frequency=np.zeros(0, np.float32),
        repetition=np.zeros(0, np.float32),
    )


def test_drawing_takes_what_the_plan_says():
    halves = torch.randn(ROWS, VOCAB, dtype=torch.bfloat16)
    with Peak() as peak:
        logits = (halves * 1).float()  # what the head makes of its product
        sampler.draw(logits, plan())
    per_logit = peak.most / (ROWS * VOCAB)
    assert 0.95 * SAMPLER_BYTES["torch"] < per_logit <= SAMPLER_BYTES["torch"]


@pytest.mark.parametrize("num_top", [0, 20])
def test_scoring_takes_what_the_plan_says(num_top):
    halves = torch.randn(ROWS, VOCAB, dtype=torch.bfloat16)
    with Peak() as peak:
        logits = (halves * 1).float()
        logprobs.gather(logits, torch.zeros(ROWS, dtype=torch.int64), [num_top] * ROWS)
    # What torch holds inside logsumexp is not seen from here: one fp32 copy.
    assert 0.7 * SCORE_BYTES["torch"] < peak.most / (ROWS * VOCAB) <= SCORE_BYTES["torch"]


def test_the_native_executor_draws_row_after_row():
    rows = 128  # so many that what one row needs does not count
    logits = np.random.default_rng(0).standard_normal((rows, VOCAB), np.float32)
    host.draw(logits[:1], plan(1))  # what is imported at the first call is not counted
    tracemalloc.start()
    try:
        logits = logits.copy()
        host.draw(logits, plan(rows))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * SAMPLER_BYTES["native"] < peak / (rows * VOCAB) < 1.1 * SAMPLER_BYTES["native"]
