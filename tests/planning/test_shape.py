"""The matrices behind a floor: names, shapes and bytes, for heads that are the embedding and heads that are not."""

import json
import math

import pytest

from kvant.config.engine import EngineConfig
from kvant.engine.create import plan
from kvant.planning.shape import matrices, network_of
from kvant.planning.work import Row
from tests.runner.test_memory import MACHINE
from tests.tiny_folder import LLAMA


def opened(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return plan(EngineConfig(model=f"dummy:{tmp_path}", device="cpu", dtype="float32"), MACHINE)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_that_multiplies(tmp_path, tied):
    model = opened(tmp_path, tie_word_embeddings=tied)
    found = matrices(model.config, model.checkpoint.tensors, "torch", "bfloat16")
    assert len(found) == 2 * 7 + 1
    assert [m.name for m in found if m.is_head] == ["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert all(m.num_bytes == 2 * math.prod(m.shape) for m in found)
    network = network_of(model.config, found, "torch", "bfloat16")
    per_layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert (network.linears.values, network.head.values) == (2 * per_layer, 272 * 64)
    assert network.step([Row(0, 1)], 1)["attention"].num_bytes == 2 * (2 * 2 * 16 * 2) * 2  # read and written once


def test_the_native_executor_multiplies_what_is_stored(tmp_path):
    model = opened(tmp_path)
    found = matrices(model.config, model.checkpoint.tensors, "native", "bfloat16")
    assert all(m.num_bytes == 4 * math.prod(m.shape) and m.format == "F32" for m in found)
