"""Batches made by hand: `num` sequences that own consecutive blocks."""

import numpy as np

from kvant.batch import Batch, GroupBatch

BLOCK = 16


def batch(chunks: list[tuple[int, list[int]]], num_groups: int, blocks_per_sequence: int, all_logits: bool = False) -> Batch:
    """One step: sequence s computes `chunks[s] = (start, ids)`. Logits of every sequence's last token, or of all tokens."""
    lengths = [len(ids) for _, ids in chunks]
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + len(ids)) for start, ids in chunks]).astype(np.int64)
    owner = np.repeat(np.arange(len(chunks)), lengths)
    table = 1 + np.arange(len(chunks) * blocks_per_sequence, dtype=np.int32).reshape(len(chunks), -1)
    slots = table[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    kv_lens = np.array([start + len(ids) for start, ids in chunks], np.int32)
    group = GroupBatch(slots, table, kv_lens)
    rows = np.arange(len(positions)) if all_logits else query_start[1:] - 1
    ids = np.concatenate([np.asarray(ids, np.int64) for _, ids in chunks])
    return Batch(ids, positions, query_start, np.arange(len(chunks)), rows.astype(np.int64), (group,) * num_groups)
