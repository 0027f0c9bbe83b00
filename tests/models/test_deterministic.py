"""The deterministic mode on a GPU: a request's logits have the same bits alone, in any batch, in any chunks, after a cached
prefix, and when computed anew. In Triton's interpreter the same schedule is held against the plain path, in fp32."""

import pytest
import torch

from kvant.attention.select import choose
from kvant.attention.triton import DeterministicAttention
from kvant.errors import ConfigError
from kvant.kernels import language
from kvant.quantization.scheme import Placement
from tests.kernels.compare import DEVICE
from tests.models import cases
from tests.models.cases import reference, tokens
from tests.network import Harness, from_transformers

REQUEST = tokens(70, 5)


def harness(name: str, dtype=torch.float32) -> Harness:
    hf = cases.theirs(cases.CASES[name]())
    placement = Placement(device=DEVICE, dtype=dtype, deterministic=True)
    ours = from_transformers(hf, cases.config_of(hf), placement=placement)
    return Harness(ours, num_blocks=400, attention=DeterministicAttention, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_is_right(name, monkeypatch):
    monkeypatch.setattr(language, "SIMULATED", True)
    ids = tokens(13, 1)
    ours = harness(name)
    got = [ours.logits([("a", ids[:1], 0)]), ours.logits([("a", ids[1:], 1), ("b", ids[:1], 0)])[:-1]]
    expected = reference(cases.theirs(cases.CASES[name]()), ids)
    assert torch.allclose(torch.cat(got).cpu(), expected, atol=3e-5, rtol=1e-4)


def others(count: int, length: int):
    """Requests that share a batch with the one that is watched."""
    return [(f"other {number}", tokens(length, 100 + number), 0) for number in range(count)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "phi3-partial", "gemma2", "gemma3"])
def test_R35_the_same_bits_in_any_company(name, dtype):
    alone = harness(name, dtype).logits([("a", REQUEST, 0)])
    for chunk in (1, 2, 7, 33, 69):
        ours = harness(name, dtype)  # chunks; a prefix that is cached is a chunk that was computed before
        parts = [ours.logits([("a", REQUEST[p : p + chunk], p)]) for p in range(0, len(REQUEST), chunk)]
        assert torch.equal(torch.cat(parts), alone), f"chunks of {chunk}"
    for company in (others(1, 1), others(30, 3), others(15, 1), others(3, 55), others(100, 1)):
        ours = harness(name, dtype)
        got = ours.logits([*company[1:], ("a", REQUEST[:40], 0), company[0]])
        first = sum(len(ids) for _, ids, _ in company[1:])
        assert torch.equal(got[first : first + 40], alone[:40]), f"beside {len(company)} others"
        # Decoding in a batch, each of the others one token further, too.
        further = [(other, tokens(1, 7), len(ids)) for other, ids, _ in company]
        got = ours.logits([*further, ("a", REQUEST[40:41], 40)])
        assert torch.equal(got[-1], alone[40])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_R35_real_sizes():
    """Matrices whose K is cut into parts, and rows on both sides of what one program takes."""
    from kvant.kernels.linear import fixed_linear
    from tests.kernels.compare import assert_close, rand

    for outs, size in ((1024, 4096), (4096, 14336), (576, 1536), (6144, 1024)):
        x, weight = rand(700, size, dtype=torch.bfloat16), rand(outs, size, dtype=torch.bfloat16)
        whole = fixed_linear(x, weight)
        assert_close(whole, x.double() @ weight.double().T)
        for first, last in ((0, 1), (5, 7), (10, 26), (30, 70), (69, 133), (133, 262), (1, 700)):
            assert torch.equal(fixed_linear(x[first:last], weight), whole[first:last]), (outs, size, last - first)


def test_only_our_kernels_can_promise_it():
    ours = harness("llama")
    with pytest.raises(ConfigError, match="leave it at auto"):
        choose("sdpa", ours.storage, deterministic=True)
