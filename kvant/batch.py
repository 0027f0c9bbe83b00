"""Batch: everything the network may know about one step. Arrays only; who owns which row is the scheduler's business.

The arrays are numpy where the batch is built and on the native path, torch tensors where torch runs the network: the
field names and shapes are the same. Letters: T tokens in the batch, S sequences, R rows whose logits are wanted, M blocks
per sequence, C copies, W words of a bit mask.

    input_ids   t0 t1 t2 | t3 | t4 t5        three sequences: a chunk of a prompt, a decode step, a verification
    query_start 0          3    4      6
    logit_rows        2      3   4  5        the rows whose hidden states meet the head
"""

from dataclasses import dataclass
from typing import Any

Array = Any  # numpy.ndarray or torch.Tensor; this floor imports neither


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """Where one layer group's keys and values lie."""

    slot_mapping: Array  # [T] int64: flat slot (block * block_size + offset) each token's keys and values are written to
    block_table: Array  # [S, M] int32: block of every block_size positions; 0 is the null block
    kv_lens: Array  # [S] int32: tokens in the cache after this step's writes
    kv_copies: Array | None = None  # [C, 2] int64: (source, target) blocks copied before the forward pass


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's input. All rows of a sequence are neighbours, in order of position."""

    input_ids: Array  # [T] int64
    positions: Array  # [T] int64, or [3, T] for models with several position axes
    query_start: Array  # [S + 1] int32
    seats: Array  # [S] int64
    logit_rows: Array  # [R] int64
    groups: tuple[GroupBatch, ...]
    ancestors: Array | None = None  # [T, W] bit mask of the drafts a draft follows; None: every row is causal
    adapter_rows: Array | None = None  # [S] adapter slot per sequence
    embed_rows: Array | None = None  # [X] rows whose embedding comes from `embeds` instead of the table
    embeds: Array | None = None  # [X, D]


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """What the network returns: the last hidden states, and those of layers somebody asked for."""

    final: Array  # [T, D]
    taps: dict[int, Array]  # layer -> [T, D]
