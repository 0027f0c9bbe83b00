"""Driving a network by hand, without scheduler or engine: what the tests of models and attention share."""

from dataclasses import replace

import numpy as np
import torch

from kvant.attention.sdpa import SDPAAttention
from kvant.attention.storage import KVStorage
from kvant.batch import Batch, GroupBatch, Hidden
from kvant.checkpoint.checkpoint import FileTensors
from kvant.config.formats import StoredTensor
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.models.load import build, load_weights
from kvant.quantization.scheme import Placement


def stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    """A torch tensor as a checkpoint would hand it over."""
    values = tensor.detach().contiguous().float().numpy()
    rows = values.reshape(-1, values.shape[-1])
    return StoredTensor(name, "F32", tuple(tensor.shape), rows.view(np.uint8).reshape(len(rows), -1))


def from_transformers(hf, config: ModelConfig, dtype=torch.float32, device="cpu", placement: Placement | None = None):
    """Our network with the weights of a transformers model."""
    state = hf.state_dict()
    if config.tie_word_embeddings:
        state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    model = build(config, Mesh())
    placement = placement or Placement(device=device, dtype=dtype)
    load_weights(model, FileTensors({n: stored(n, t) for n, t in state.items()}), placement)
    return model


class Harness:
    """One network, one cache, sequences that own consecutive blocks in a scrambled order."""

    def __init__(self, model, num_blocks: int = 64, attention=SDPAAttention, dtype=torch.float32, seed: int = 0, device="cpu"):
        self.model = model
        self.device = device
        self.attention = attention
        self.groups = model.config.cache_groups()
        self.storage = KVStorage(self.groups, [num_blocks] * len(self.groups), dtype, device)
        rng = np.random.default_rng(seed)
        # Poisoned: whoever reads a slot that nobody wrote gets NaN. The null block must be clean.
        for tensor in (t for group in self.storage.keys + self.storage.values for t in group):
            tensor[self.groups[0].block_size :] = float("nan")
        self._free = [list(rng.permutation(np.arange(1, num_blocks))) for _ in self.groups]
        self.tables: dict[str, list[list[int]]] = {}

    def batch(self, rows: list[tuple[str, list[int], int]]) -> Batch:
        """`rows`: (sequence, its new tokens, position of the first)."""
        starts = np.cumsum([0] + [len(tokens) for _, tokens, _ in rows])
        positions = np.concatenate([np.arange(first, first + len(tokens)) for _, tokens, first in rows])
        kv_lens = np.array([first + len(tokens) for _, tokens, first in rows], np.int32)
        groups = []
        for number, group in enumerate(self.groups):
            width = -(-int(kv_lens.max()) // group.block_size)
            table = np.zeros((len(rows), width), np.int32)
            slots = []
            for row, (name, tokens, first) in enumerate(rows):
                blocks = self.tables.setdefault(name, [[] for _ in self.groups])[number]
                while len(blocks) * group.block_size < kv_lens[row]:
                    blocks.append(int(self._free[number].pop()))
                table[row, : len(blocks)] = blocks
                slots += [
                    blocks[p // group.block_size] * group.block_size + p % group.block_size
                    for p in range(first, first + len(tokens))
                ]
            groups.append(GroupBatch(np.array(slots, np.int64), table, kv_lens))
        return Batch(
            input_ids=np.concatenate([np.array(tokens, np.int64) for _, tokens, _ in rows]),
            positions=positions.astype(np.int64),
            query_start=starts.astype(np.int32),
            seats=np.arange(len(rows)),
            logit_rows=np.arange(starts[-1]),
            groups=tuple(groups),
        )

    @torch.inference_mode()
    def logits(self, rows: list[tuple[str, list[int], int]]) -> torch.Tensor:
        """fp32 logits of every token of the batch."""
        return self.model.logits(self.hidden(rows).final)

    @torch.inference_mode()
    def hidden(self, rows: list[tuple[str, list[int], int]]) -> Hidden:
        """Hidden states of every token of the batch."""
        staged = self.batch(rows)
        batch = tensors(staged, self.device)
        return self.model(batch, self.attention(staged, batch, self.storage))


def tensors(staged: Batch, device="cpu") -> Batch:
    """A batch of numpy arrays as one of tensors."""

    def move(array):
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

    groups = tuple(
        replace(g, slot_mapping=move(g.slot_mapping), block_table=move(g.block_table), kv_lens=move(g.kv_lens))
        for g in staged.groups
    )
    names = ("input_ids", "positions", "query_start", "seats", "logit_rows")
    return replace(staged, groups=groups, **{name: move(getattr(staged, name)) for name in names})
