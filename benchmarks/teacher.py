"""Teacher forcing: a text is fed to a network whatever it would have said itself, and every position's logits are looked at.

The text is cut into windows, each with a context of its own. A `Mode` says how the tokens of a window reach the network,
because its arithmetic depends on how many rows are multiplied together (few: 8-bit activations; many: bf16 on tiles):

    prompt        a window of 512 in one step
    prompt_2048   a window of 2,048 in four steps of 512, as the scheduler cuts it
    decode        one token per step
    decode_8      eight windows side by side, one token of each per step
    decode_32     thirty-two

The reference is the same file in fp32 through the bricks on torch; tests/models hold those against transformers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.distance import Distances, compare
from benchmarks.native.stepping import BLOCK, batch
from kvant.attention.storage import KVStorage
from kvant.config.engine import EngineConfig
from kvant.config.hardware import detect
from kvant.engine.create import plan
from kvant.runner.factory import create_runner
from tests.network import tensors

ROWS = 64  # whose logits exist at the same time: 64 x 262,144 fp32 are 67 MB


class Mode(NamedTuple):
    """How a text is fed."""

    window: int  # tokens
    streams: int  # windows side by side
    chunk: int  # tokens of each per step


MODES = {
    "prompt": Mode(512, 1, 512),
    "prompt_2048": Mode(2048, 1, 512),
    "decode": Mode(512, 1, 1),
    "decode_8": Mode(512, 8, 1),
    "decode_32": Mode(512, 32, 1),
}


def windows(ids: list[int], size: int, bos: int | None) -> np.ndarray:
    """The text's tokens cut into whole windows [W, size] int64; `bos` stands at the beginning of each where it is given."""
    text = np.array(ids, np.int64)
    step = size if bos is None else size - 1
    whole = text[: len(text) // step * step].reshape(-1, step)
    return whole if bos is None else np.insert(whole, 0, bos, axis=1)


def _runner(config: EngineConfig) -> tuple[object, tuple]:
    """A runner as a user of `config` gets it, and its cache groups."""
    opened, resolved = plan(config, detect())
    return create_runner(resolved, opened, opened.config.vocab_size).runner, resolved.groups


class Reference:
    """fp32 hidden states of every window; their logits are made again when they are needed."""

    def __init__(self, model: str, threads: int):
        runner, self.groups = _runner(EngineConfig(model=model, dtype="float32", threads=threads, max_model_len=512))
        self.network, self.attention = runner.model, runner.attention
        self.vocab_size = runner.embedding_rows

    @torch.inference_mode()
    def read(self, ids: np.ndarray) -> None:
        """Computes the hidden states [W, L, D] of windows [W, L]."""
        self.ids = ids
        blocks = -(-ids.shape[1] // BLOCK)
        storage = KVStorage(self.groups, [1 + blocks] * len(self.groups), torch.float32, "cpu")
        hidden = []
        for window in ids:
            staged = batch([(0, list(window))], len(self.groups), blocks)
            step = tensors(staged)
            hidden.append(self.network(step, self.attention(staged, step, storage)).final)
        self.hidden = torch.stack(hidden)

    @torch.inference_mode()
    def logits(self, window: np.ndarray, position: np.ndarray) -> Tensor:
        """fp32 logits [R, V] of positions `position` [R] of windows `window` [R]."""
        return self.network.logits(self.hidden[torch.from_numpy(window), torch.from_numpy(position)])


class Native:
    """The native executor, as a user of `options` gets it."""

    def __init__(self, model: str, threads: int, **options: object):
        runner, groups = _runner(EngineConfig(model=model, threads=threads, max_model_len=512, max_num_seqs=1, **options))
        self.network, self.num_groups = runner.model, len(groups)

    def steps(self, ids: np.ndarray, mode: Mode) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Feeds windows [W, L]; yields (window [R], position [R], logits [R, V]: a view until the next)."""
        blocks = -(-mode.window // BLOCK)
        cache = self.network.new_cache([1 + mode.streams * blocks] * self.num_groups)
        for first in range(0, len(ids), mode.streams):
            group = range(first, min(first + mode.streams, len(ids)))
            for start in range(0, mode.window, mode.chunk):
                end = min(start + mode.chunk, mode.window)
                step = batch([(start, list(ids[w, start:end])) for w in group], self.num_groups, blocks)
                self.network.run(step, cache, logits=False)
                window, position = np.repeat(group, end - start), step.positions
                for row in range(0, len(position), ROWS):
                    part = slice(row, row + ROWS)
                    rows = np.arange(len(position))[part]
                    yield window[part], position[part], self.network.logits(rows)


@torch.inference_mode()
def score(engine: Native, reference: Reference, mode: Mode, most: int | None = None) -> Distances:
    """Distances [W, L - 1] of the engine, fed in `mode`, from the reference at every position with a token after it.

    `most`: the number of windows looked at; None: all that the reference has read.
    """
    ids = reference.ids[:most]
    assert ids.shape[1] == mode.window
    found = Distances.empty(len(ids), mode.window - 1)
    waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def settle() -> None:
        """Compares what waits: products of few rows waste most of a reference that computes in fp32."""
        if waiting:
            window, position, logits = (np.concatenate(part) for part in zip(*waiting, strict=True))
            targets = torch.from_numpy(ids[window, position + 1])
            base = reference.logits(window, position)
            found.put((window, position), compare(base, torch.from_numpy(logits), targets))
            waiting.clear()

    for window, position, logits in engine.steps(ids, mode):
        scored = position + 1 < mode.window
        waiting.append((window[scored], position[scored], logits[scored]))
        if sum(len(rows) for rows, _, _ in waiting) >= ROWS:
            settle()
    settle()
    return found
