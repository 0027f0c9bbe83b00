"""Both attention kernels against the formula: mixed lengths, windows, soft caps, odd heads, poisoned caches and outputs."""

import pytest
import torch

from kvant.kernels import few_decode, gathered_prefill, paged_decode, paged_prefill
from kvant.kernels.paged_attention import Paged, Scores, paged_attention_reference
from kvant.kernels.rotary import HeadNorms, Rotation, rotary_and_store_reference
from tests.kernels.compare import DEVICE, DTYPES, assert_close, rand
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


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("turning", "scale"), [(16, 1.0), (6, 1.4), (0, 1.0)])
@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=20), Scores(0.3, soft_cap=2.0)])
def test_fresh_keys_are_normed_turned_and_stored(scores, turning, scale, dtype, normed):
    """Equal to turning and storing first; every slot that is not a new token's keeps what it had."""
    if dtype != torch.float32 and (normed or turning != 16):
        pytest.skip("one case per dtype")
    case = paged([(1, 1), (1, 40), (1, 65), (1, 20)], size=16, dtype=dtype)
    tokens, size = 4, 16
    row = rand(tokens, 8 * size, dtype=dtype)
    q, k, v = (x.reshape(tokens, -1, size) for x in row.split((4 * size, 2 * size, 2 * size), -1))
    positions = case.kv_lens.long() - 1
    slots = case.block_table[torch.arange(tokens, device=DEVICE), positions // 16].long() * 16 + positions % 16
    rotation = Rotation(100.0 ** (-torch.arange(turning // 2, device=DEVICE) * 2 / turning), scale) if turning else None
    norms = HeadNorms(rand(size), rand(size), 1e-6) if normed else None
    keys, values = case.keys.clone(), case.values.clone()
    turned = rotary_and_store_reference(q, k, v, positions, rotation, slots, keys, values, norms)
    expected = paged_attention_reference(case._replace(q=turned, keys=keys, values=values), scores)
    case.keys[slots] = case.values[slots] = float("nan")
    out = torch.full((tokens, 4, size), float("nan"), dtype=dtype, device=DEVICE)
    for cut in (few_decode.Cut(1, 1, 32, 4, 2), few_decode.Cut(5, 1, 16, 4, 2), few_decode.Cut(5, 2, 16, 4, 2)):
        plan = few_decode.plan(case, cut)
        fresh = few_decode.Fresh(k, v, positions, slots, norms, rotation)
        few_decode.few_decode(case._replace(q=q), scores, plan, fresh, out)
        assert not plan.arrived.any(), "the counters did not return to zero"
        assert_close(out, expected, slack=3)
        assert_close(case.keys[slots], keys[slots], slack=2)
        assert torch.equal(case.values[slots], values[slots])
        case.keys[slots] = keys[slots]
        assert torch.equal(case.keys.nan_to_num(-7.0), keys.nan_to_num(-7.0))
        case.keys[slots] = float("nan")
