"""From a model's config to the numbers that its floor is made of: its matrices, and the bytes that each is held in."""

import math
from typing import Any, NamedTuple

from kvant.config.memory import ITEMSIZE
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.models.load import build
from kvant.planning.work import Matrices, Network, network

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NATIVE_KV_ITEMSIZE = 2


class Matrix(NamedTuple):
    """A matrix that multiplies."""

    name: str  # Hugging Face's
    shape: tuple[int, int]  # [out, in]
    num_bytes: int  # as it is held
    format: str

    @property
    def is_head(self) -> bool:
        return self.name in (EMBEDDING, HEAD)


def matrices(config: ModelConfig, tensors: Any, executor: str, dtype: str) -> list[Matrix]:
    """Every matrix that multiplies, in order. `tensors` is the checkpoint's source of weights; no weight is read.

    The embedding is among them only where it is the head too. The native executor multiplies with what the file holds, torch
    with values in `dtype`.
    """
    found = []
    for path, brick in build(config, Mesh()).walk():
        for name, shape in brick.wants().items():
            if len(shape) != 2 or (path + name == EMBEDDING and not config.tie_word_embeddings):
                continue
            if executor == "native":
                stored = tensors.find(path + name, shape)
                found.append(Matrix(path + name, shape, stored.num_bytes, stored.format))
            else:
                found.append(Matrix(path + name, shape, math.prod(shape) * ITEMSIZE[dtype], dtype))
    return found


def network_of(config: ModelConfig, all_matrices: list[Matrix], executor: str, dtype: str) -> Network:
    """The network behind the floors of `config`."""
    head = [matrix for matrix in all_matrices if matrix.is_head]
    linears = [matrix for matrix in all_matrices if not matrix.is_head]
    itemsize = NATIVE_KV_ITEMSIZE if executor == "native" else ITEMSIZE[dtype]
    return network(config, _sum(linears), _sum(head), itemsize)


def _sum(some: list[Matrix]) -> Matrices:
    return Matrices(sum(math.prod(matrix.shape) for matrix in some), sum(matrix.num_bytes for matrix in some))
