"""Attention on an NVIDIA GPU through our own kernels, straight from the blocks.

    rows with one query       kernels/paged_decode.py, cut over the length of the cache
    a few of them alone       kernels/few_decode.py, which turns and stores what is new, too
    chunks                    kernels/gathered_prefill.py where the copying pays, else kernels/paged_prefill.py

What kind of rows a step has is known on the host; everything else, lengths above all, is read on the device. A step of
decode rows alone therefore asks the host for nothing but its number of rows, and can be captured in a CUDA graph: padding
rows have one key, in the null block.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.attention.pattern import AttentionRule
from kvant.attention.storage import KVStorage
from kvant.batch import Batch
from kvant.errors import UnsupportedError
from kvant.kernels import few_decode, gathered_prefill, paged_decode, paged_prefill
from kvant.kernels.deferred import untangle
from kvant.kernels.paged_attention import Paged, Scores
from kvant.kernels.rotary import rotary_and_store, rotary_and_store_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
LEAST_CAPABILITY = (8, 0)  # asynchronous copies into shared memory, bf16 products

COPY_ENGINE_SINCE = (9, 0)

# Copying a key costs what 16 queries save on it (docs/kernels.md).
GATHER_FROM = 64  # queries of the longest chunk
KEYS_PER_QUERY = 16


class Kind(NamedTuple):
    """What rows a step has."""

    decode: bool
    chunks: bool


class TritonAttention:
    """One step's attention over the cache. `staged` is the batch on the host (numpy), `batch` on the device."""

    def __init__(self, staged: Batch, batch: Batch, storage: KVStorage):
        if batch.ancestors is not None:
            raise UnsupportedError("attention backend 'triton' does not know draft trees; use --attention-backend reference")
        self.staged = staged
        self.batch = batch
        self.storage = storage
        lengths = np.diff(staged.query_start)
        self.kind = Kind(decode=bool((lengths == 1).any()), chunks=bool((lengths > 1).any()))
        # Per group, made by its first layer: how many query heads there are is seen only then.
        self._plans: dict[int, paged_decode.DecodePlan] = {}
        self._few_plans: dict[int, few_decode.FewPlan] = {}
        self._gathered: dict[int, gathered_prefill.Gathered | None] = {}

    def attend(self, q: Any, k: Any, v: Tensor, rule: AttentionRule) -> Tensor:
        """`q` [T, N, H], `k`, `v` [T, K, H] of the new tokens -> [T, N, H]; the cache holds their keys and values then.

        Queries and keys may still have to be normed and turned. That, and the write to the cache, is part of the attention
        where there are only a few decode rows, and a launch of its own where not.
        """
        number, _ = self.storage.place[rule.layer]
        keys, values = self.storage.of_layer(rule.layer)
        slots = self.batch.groups[number].slot_mapping
        q, k, norms, rotation = untangle(q, k)
        if not self.kind.chunks and len(q) <= few_decode.FEW:
            return self._attend_few(q, rule, few_decode.Fresh(k, v, self.batch.positions, slots, norms, rotation))
        return self._attend_stored(rotary_and_store(q, k, v, self.batch.positions, rotation, slots, keys, values, norms), rule)

    def _paged(self, q: Tensor, rule: AttentionRule) -> Paged:
        number, _ = self.storage.place[rule.layer]
        group = self.batch.groups[number]
        size = self.storage.groups[number].block_size
        keys, values = self.storage.of_layer(rule.layer)
        return Paged(q, keys, values, group.block_table, size, self.batch.query_start, group.kv_lens)

    def _attend_few(self, q: Tensor, rule: AttentionRule, fresh: few_decode.Fresh) -> Tensor:
        """`q` as the projection wrote it; the cache does not hold the new keys and values yet."""
        paged = self._paged(q, rule)
        number, _ = self.storage.place[rule.layer]
        if number not in self._few_plans:
            self._few_plans[number] = few_decode.plan(paged, few_decode.choose_cut(paged))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scores = Scores(rule.scale, rule.window, rule.soft_cap)
        few_decode.few_decode(paged, scores, self._few_plans[number], fresh, out)
        return out

    def _attend_stored(self, q: Tensor, rule: AttentionRule) -> Tensor:
        """`q` turned; the cache holds the new tokens already."""
        number, _ = self.storage.place[rule.layer]
        paged = self._paged(q, rule)
        scores = Scores(rule.scale, rule.window, rule.soft_cap)
        out = torch.empty_like(q)
        if self.kind.decode:
            paged_decode.paged_decode(paged, scores, self._plan(number, paged, rule.window), out)
        if self.kind.chunks:
            gathered = self._gather(number, paged, rule.window)
            if gathered is None:
                paged_prefill.paged_prefill(paged, scores, out)
            else:
                gathered_prefill.gathered_prefill(paged, scores, gathered, out)
        return out

    def _plan(self, number: int, paged: Paged, window: int | None) -> paged_decode.DecodePlan:
        if number not in self._plans:
            self._plans[number] = paged_decode.plan(paged, window, paged_decode.choose_cut(paged))
        return self._plans[number]

    def _gather(self, number: int, paged: Paged, window: int | None) -> gathered_prefill.Gathered | None:
        if number not in self._gathered:
            self._gathered[number] = self._places(number, paged, window)
        return self._gathered[number]

    def _places(self, number: int, paged: Paged, window: int | None) -> gathered_prefill.Gathered | None:
        size = paged.q.shape[-1]
        if paged.q.is_cuda and torch.cuda.get_device_capability(paged.q.device) < COPY_ENGINE_SINCE:
            return None
        if paged.q.element_size() == 4 or size < 32 or size & (size - 1):
            return None  # no tile of the copy engine
        lengths = np.diff(self.staged.query_start)
        kv_lens = self.staged.groups[number].kv_lens
        keys = gathered_prefill.choose_tile(size).keys
        places = gathered_prefill.places(self.staged.query_start, kv_lens, window, keys, paged.q.device)
        queries = int(lengths[lengths > 1].sum())
        pays = lengths.max() >= GATHER_FROM and queries * KEYS_PER_QUERY >= places.num_rows
        return places if pays else None


class DeterministicAttention(TritonAttention):
    """The same bits for a token alone, in any batch and in any chunk: one kernel and one shape for all rows, no sum that is
    cut by the load. Slower, for long contexts above all: a sequence's keys are walked by one program per key head."""

    def attend(self, q: Any, k: Any, v: Tensor, rule: AttentionRule) -> Tensor:
        number, _ = self.storage.place[rule.layer]
        slots = self.batch.groups[number].slot_mapping
        keys, values = self.storage.of_layer(rule.layer)
        q, k, norms, rotation = untangle(q, k)
        q = rotary_and_store_triton(q, k, v, self.batch.positions, rotation, slots, keys, values, norms, per_program=8)
        out = torch.empty_like(q)
        paged_prefill.fixed_attention(self._paged(q, rule), Scores(rule.scale, rule.window, rule.soft_cap), out)
        return out


def refuse_unsupported(storage: KVStorage) -> None:
    """Raises `UnsupportedError`, with every fact, where these kernels cannot run. To be called once, at start-up."""
    cache = storage.keys[0][0]
    heads = sorted({group.head_dim for group in storage.groups})
    problems = []
    if cache.dtype not in DTYPES:
        problems.append(f"keys and values in {cache.dtype} (there are: float32, float16, bfloat16)")
    if heads[-1] > LARGEST_HEAD:
        problems.append(f"heads of {heads[-1]} values (at most {LARGEST_HEAD})")
    where = cache.device.type
    if cache.is_cuda:
        capability = torch.cuda.get_device_capability(cache.device)
        where = f"{torch.cuda.get_device_name(cache.device)}, compute capability {capability[0]}.{capability[1]}"
        if capability < LEAST_CAPABILITY:
            problems.append("a GPU before compute capability 8.0")
    if problems:
        raise UnsupportedError(
            f"attention backend 'triton' does not support {' and '.join(problems)}; this is {where}, "
            f"head sizes {heads}, {cache.dtype}; use --attention-backend sdpa or reference"
        )
