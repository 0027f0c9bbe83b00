"""Which attention is chosen, and how a choice that cannot be is refused."""

import pytest
import torch

from kvant.attention.sdpa import SDPAAttention
from kvant.attention.select import choose
from kvant.attention.storage import KVStorage
from kvant.config.model import CacheGroup
from kvant.errors import ConfigError


@pytest.fixture
def storage():
    group = CacheGroup(name="full", layers=(0,), window=None, num_kv_heads=1, head_dim=8)
    return KVStorage([group], [2], torch.float32, "cpu")


def test_auto_on_a_cpu_is_sdpa(storage):
    assert choose("auto", storage) == (SDPAAttention, "")


def test_what_cannot_run_here_is_refused(storage):
    with pytest.raises(ConfigError, match="GPU"):
        choose("triton", storage)
    with pytest.raises(ConfigError, match=r"'flash' does not exist.*triton, sdpa, reference"):
        choose("flash", storage)
