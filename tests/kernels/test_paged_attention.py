"""Both attention kernels against the formula: mixed lengths, windows, soft caps, odd heads, poisoned caches and outputs."""

import pytest
import torch

from kvant.kernels import gathered_prefill, paged_decode, paged_prefill
from kvant.kernels.paged_attention import Paged, Scores, paged_attention_reference
from tests.kernels.compare import DTYPES, assert_close
from tests.kernels.paged import paged

DECODE = paged_decode.Cut(parts=3, least=1, tile=16, warps=4, stages=2)
PREFILL = paged_prefill.Tile(rows=16, keys=16, warps=4, stages=2)
RULES = [Scores(0.3), Scores(0.3, window=21), Scores(0.3, soft_cap=2.0)]


def run(case: Paged, scores: Scores, cut=DECODE, tile=PREFILL) -> torch.Tensor:
    """Both kernels over one batch; what neither writes stays NaN."""
    out = torch.full_like(case.q, float("nan"))
    paged_decode.paged_decode(case, scores, paged_decode.plan(case, scores.window, cut), out)
    paged_prefill.paged_prefill(case, scores, out, tile)
    return out


@pytest.mark.parametrize("scores", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batch(dtype, scores):
    """A first chunk, decode rows of very different lengths, a chunk after a cached prefix, one over a whole block."""
    case = paged([(1, 50), (5, 5), (1, 1), (3, 40), (1, 17), (16, 32)], dtype=dtype)
    assert_close(run(case, scores), paged_attention_reference(case, scores), slack=2)


@pytest.mark.parametrize("scores", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_gathered(dtype, scores, kv_heads):
    """Chunks of every kind among decode rows, which it leaves alone."""
    case = paged([(1, 20), (5, 5), (3, 60), (1, 1), (17, 33)], kv_heads=kv_heads, dtype=dtype)
    tile = gathered_prefill.Tile(rows=16, keys=16, warps=4, stages=2)
    places = gathered_prefill.places(
        case.query_start.cpu().numpy(), case.kv_lens.cpu().numpy(), scores.window, tile.keys, case.q.device
    )
    out = torch.full_like(case.q, float("nan"))
    gathered_prefill.gathered_prefill(case, scores, places, out, tile)
    several = case.query_start.diff().repeat_interleave(case.query_start.diff()) > 1
    assert_close(out[several], paged_attention_reference(case, scores)[several], slack=2)
    assert out[~several].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 1, 20), (6, 2, 8), (1, 1, 64)])
def test_odd_heads(heads, kv_heads, size):
    case = paged([(1, 37), (4, 20)], heads, kv_heads, size)
    assert_close(run(case, Scores(0.25)), paged_attention_reference(case, Scores(0.25)), slack=2)


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_every_cut_gives_the_same(parts):
    """One sequence over many parts, parts over many sequences, more parts than tiles."""
    case = paged([(1, 130), (1, 3), (1, 16), (1, 5), (1, 47)], kv_heads=1)
    cut = DECODE._replace(parts=parts)
    assert_close(run(case, Scores(0.3), cut), paged_attention_reference(case, Scores(0.3)), slack=2)


def test_counters_return_to_zero():
    case = paged([(1, 130), (1, 60)])
    plan = paged_decode.plan(case, None, DECODE)
    outs = [torch.full_like(case.q, float("nan")) for _ in range(2)]
    for out in outs:
        paged_decode.paged_decode(case, Scores(0.3), plan, out)
    assert not plan.arrived.any()
    assert torch.equal(*outs)


def test_ends_of_the_plan():
    case = paged([(1, 33), (2, 64), (1, 1), (1, 48)])
    assert paged_decode.plan(case, None, DECODE).ends.tolist() == [3, 3, 4, 7]
    assert paged_decode.plan(case, 16, DECODE).ends.tolist() == [2, 2, 3, 4]
