"""Every family through the kernels of a GPU (Triton's interpreter where there is none), fused as on a GPU, in fp32: against
transformers, and against the plain path."""

import pytest
import torch

from kvant.attention.triton import TritonAttention
from kvant.kernels import few_decode, language, one_row, paged_decode, rms_norm, rotary
from tests.kernels.compare import DEVICE
from tests.models import cases
from tests.models.cases import reference, tokens
from tests.network import Harness, from_transformers

TOLERANCE = 3e-5  # as for the plain path (test_families.py)


@pytest.fixture
def launched(monkeypatch):
    """Kernels run wherever tensors lie; the names of the launches are collected."""
    monkeypatch.setattr(language, "SIMULATED", True)
    names = []
    for module, kernel in (
        (one_row, "_one_row_kernel"),
        (rms_norm, "_rms_norm_kernel"),
        (rotary, "_rotary_and_store_kernel"),
        (few_decode, "_few_kernel"),
        (paged_decode, "_decode_kernel"),
    ):
        monkeypatch.setattr(module, kernel, Counting(getattr(module, kernel), kernel, names))
    return names


class Counting:
    def __init__(self, kernel, name, names):
        self.kernel, self.name, self.names = kernel, name, names

    def __getitem__(self, grid):
        self.names.append(self.name)
        return self.kernel[grid]


FAST = ("llama-bias", "qwen2-tied-yarn", "qwen3", "phi3-partial", "smollm3", "gemma2", "gemma3")  # one per way to be fused


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in cases.CASES])
def test_a_family_through_the_kernels(name, launched):
    hf = cases.theirs(cases.CASES[name]())
    ours = from_transformers(hf, cases.config_of(hf), device=DEVICE)
    harness = Harness(ours, attention=TritonAttention, device=DEVICE)
    ids = tokens(13, 1)
    # One row; a chunk, beyond gemma's window of 9, beside a row of another sequence.
    got = [harness.logits([("a", ids[:1], 0)]), harness.logits([("a", ids[1:], 1), ("b", ids[:1], 0)])]
    got[1], other = got[1][:-1], got[1][-1]
    expected = reference(hf, ids)
    assert torch.allclose(torch.cat(got).cpu(), expected, atol=TOLERANCE, rtol=1e-4)
    assert torch.allclose(other.cpu(), expected[0], atol=TOLERANCE, rtol=1e-4)


def launches(name: str, rows: int, launched: list[str]) -> dict[str, int]:
    """Launches per kernel of one decode step with `rows` rows."""
    hf = cases.theirs(cases.CASES[name]())
    harness = Harness(from_transformers(hf, cases.config_of(hf), device=DEVICE), attention=TritonAttention, device=DEVICE)
    launched.clear()
    harness.logits([(str(row), tokens(1, row), 0) for row in range(rows)])
    return {kernel: launched.count(kernel) for kernel in set(launched)}


def test_one_row_takes_norms_gates_and_additions_inside_the_products(launched):
    """Three layers of four products and attention, which turns and stores; only the last norm is on its own. The head, in
    fp32, is torch's."""
    expected = {"_one_row_kernel": 3 * 4, "_few_kernel": 3, "_rms_norm_kernel": 1}
    assert launches("llama", 1, launched) == expected
    assert launches("qwen3", 1, launched) == expected, "norms per head cost no launch"


def test_more_rows_add_and_norm_in_one_launch(launched):
    """Every norm of the stream adds first: two per layer and the last one."""
    assert launches("llama", 3, launched) == {"_rotary_and_store_kernel": 3, "_decode_kernel": 3, "_rms_norm_kernel": 2 * 3 + 1}
    # Gemma's sandwich: what is added is normalised in the same launch.
    assert launches("gemma3", 2, launched) == {"_few_kernel": 7, "_rms_norm_kernel": 2 * 7 + 1}


def test_a_layer_that_is_tapped_gives_its_sum(launched):
    hf = cases.theirs(cases.CASES["gemma3"]())
    for device_rows in (1, 2):
        taps = []
        for attention in (TritonAttention, None):
            ours = from_transformers(hf, cases.config_of(hf), device=DEVICE)
            ours.model.taps = frozenset({1})
            harness = Harness(ours, device=DEVICE, **({} if attention is None else {"attention": attention}))
            taps.append(harness.hidden([("a", tokens(device_rows, 3), 0)]).taps[1])
        assert torch.allclose(*taps, atol=TOLERANCE)
