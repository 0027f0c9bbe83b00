"""The Triton backend against the reference, one step after the other over one cache, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvant.attention import triton as backend
from kvant.attention.pattern import AttentionRule
from kvant.attention.reference import ReferenceAttention
from kvant.attention.select import choose
from kvant.attention.storage import KVStorage
from kvant.attention.triton import TritonAttention, refuse_unsupported
from kvant.batch import Batch, GroupBatch
from kvant.config.model import CacheGroup
from kvant.errors import UnsupportedError
from kvant.kernels import gathered_prefill
from kvant.kernels.deferred import Normed, Turned
from kvant.kernels.rotary import Rotation, apply_rotary, rotary_table
from tests.kernels.compare import DEVICE, assert_close, rand

BLOCK, HEADS, KV_HEADS, SIZE = 16, 4, 2, 32


def storage_of(window=None, dtype=torch.float32) -> KVStorage:
    # Two layers: what is planned once must serve both.
    group = CacheGroup(name="g", layers=(0, 1), window=window, num_kv_heads=KV_HEADS, head_dim=SIZE, block_size=BLOCK)
    return KVStorage((group,), [64], dtype, DEVICE)


def step(lengths, seed=0) -> tuple[Batch, Batch]:
    """`lengths`: (new tokens, keys with them) per sequence -> the batch in numpy and on the device."""
    rng = np.random.default_rng(seed)
    order = list(rng.permutation(np.arange(1, 64)))
    width = max(-(-kv_len // BLOCK) for _, kv_len in lengths)
    table = np.zeros((len(lengths), width), np.int32)
    slots, positions = [], []
    for row, (new, kv_len) in enumerate(lengths):
        count = -(-kv_len // BLOCK)
        table[row, :count] = [order.pop() for _ in range(count)]
        place = np.arange(kv_len - new, kv_len)
        slots += (table[row, place // BLOCK] * BLOCK + place % BLOCK).tolist()
        positions += place.tolist()
    arrays = dict(
        input_ids=np.zeros(len(slots), np.int64),
        positions=np.array(positions),
        query_start=np.cumsum([0] + [new for new, _ in lengths]).astype(np.int32),
        seats=np.arange(len(lengths)),
        logit_rows=np.arange(len(slots)),
    )
    group = dict(slot_mapping=np.array(slots), block_table=table, kv_lens=np.array([kv_len for _, kv_len in lengths], np.int32))

    def move(values):
        return {name: torch.from_numpy(value).to(DEVICE) for name, value in values.items()}

    staged = Batch(**arrays, groups=(GroupBatch(**group),))
    return staged, Batch(**move(arrays), groups=(GroupBatch(**move(group)),))


def both(lengths, window=None, soft_cap=None, dtype=torch.float32):
    """Outputs of our backend and of the reference for two layers."""
    staged, batch = step(lengths)
    outs = []
    for kind in (TritonAttention, ReferenceAttention):
        torch.manual_seed(0)
        storage = storage_of(window, dtype)
        for tensor in storage.keys[0] + storage.values[0]:
            tensor[BLOCK:] = rand(*tensor[BLOCK:].shape, dtype=dtype)  # the prefix
        attention = kind(staged, batch, storage)
        tokens = len(staged.positions)
        for layer in (0, 1):
            q, k, v = (rand(tokens, heads, SIZE, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
            outs.append(attention.attend(q, k, v, AttentionRule(layer, SIZE**-0.5, window, soft_cap)))
    return outs[:2], outs[2:]


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (21, None), (None, 5.0)])
@pytest.mark.parametrize("lengths", [[(1, 40), (1, 1)], [(7, 7), (5, 40)], [(1, 33), (9, 20)]])
def test_equals_the_reference(lengths, window, soft_cap):
    ours, reference = both(lengths, window, soft_cap)
    for out, expected in zip(ours, reference, strict=True):
        assert_close(out, expected, slack=2)


@pytest.mark.parametrize("window", [None, 21])
def test_long_chunks_are_gathered(window, monkeypatch):
    monkeypatch.setattr(backend, "GATHER_FROM", 4)
    monkeypatch.setattr(gathered_prefill, "choose_tile", lambda size: gathered_prefill.Tile(16, 16, 4, 2))
    called = []
    run = gathered_prefill.gathered_prefill
    monkeypatch.setattr(gathered_prefill, "gathered_prefill", lambda *args: called.append(1) or run(*args))
    ours, reference = both([(1, 33), (9, 50), (6, 6)], window, dtype=torch.float16)
    assert called == [1, 1]
    for out, expected in zip(ours, reference, strict=True):
        assert_close(out, expected, slack=2)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("turning", "scale"), [(SIZE, 1.0), (SIZE // 4, 1.3)])
def test_turning_and_storing_in_one_launch(turning, scale, normed):
    """What the attention brick does in four operations."""
    staged, batch = step([(1, 20), (4, 4)])
    rule = AttentionRule(0, SIZE**-0.5, None, None)
    q, k, v = (rand(5, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inv_freq = 10000.0 ** (-torch.arange(turning // 2, device=DEVICE) * 2 / turning)
    rotation = Rotation(inv_freq, scale)
    fused, plain = (TritonAttention(staged, batch, storage_of()) for _ in range(2))
    weights = [rand(SIZE), rand(SIZE)]
    deferred = [Normed(x, weight, 1e-6, x.dtype) if normed else x for x, weight in zip((q, k), weights, strict=True)]
    out = fused.attend(*(Turned(x, batch.positions, rotation) for x in deferred), v, rule)
    if normed:
        q, k = (torch.nn.functional.rms_norm(x, (SIZE,), w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    cos, sin = rotary_table(rotation, batch.positions)
    expected = plain.attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, rule)
    assert_close(out, expected, slack=2)


def test_draft_trees_are_refused():
    staged, batch = step([(2, 2)])
    with pytest.raises(UnsupportedError, match="draft trees"):
        TritonAttention(staged, replace(batch, ancestors=torch.zeros(2, 1)), storage_of())


def test_unsupported_caches_are_refused_with_every_fact():
    refuse_unsupported(storage_of())
    wide = CacheGroup(name="g", layers=(0,), num_kv_heads=1, head_dim=512, block_size=BLOCK, window=None)
    with pytest.raises(UnsupportedError, match=r"float64.* and heads of 512 values"):
        refuse_unsupported(KVStorage((wide,), [2], torch.float64, "cpu"))


@pytest.mark.gpu
def test_auto_on_a_gpu_is_triton():
    assert choose("auto", storage_of()) == (TritonAttention, "")
