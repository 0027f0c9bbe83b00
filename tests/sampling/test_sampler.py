"""Drawing: filters against transformers' own warpers, the distribution of draws, independence from the batch, extremes."""

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvant.sampling import logits as edit
from kvant.sampling import sampler
from kvant.sampling.plan import DrawPlan
from kvant.sampling.random import gumbel, row_keys


def plan(rows=1, draws_per_row=1, **changes) -> DrawPlan:
    values = dict(
        rows=np.repeat(np.arange(rows), draws_per_row),
        indices=np.tile(np.arange(draws_per_row), rows),
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int64),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seeds=np.arange(rows, dtype=np.int64) + 5,
        positions=np.full(rows, 17, np.int64),
    )
    return DrawPlan(**{**values, **changes})


def random_logits(rows=1, vocab=97, seed=0, scale=3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def full(value, rows=1, dtype=np.float32):
    return np.full(rows, value, dtype)


def survivors(logits, **filters) -> torch.Tensor:
    return sampler._filtered(logits, np.arange(len(logits)), plan(rows=len(logits), **filters)).softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 96, 500])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_filters_equal_transformers(temperature, top_k, top_p, min_p):
    logits = random_logits(seed=top_k)
    expected = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    got = survivors(
        logits, temperature=full(temperature), top_k=full(top_k, dtype=np.int64), top_p=full(top_p), min_p=full(min_p)
    )
    assert torch.allclose(got.float(), expected.softmax(-1), atol=1e-6)


def test_draws_follow_the_distribution():
    logits = random_logits(vocab=12, scale=1.0)
    count = 20_000
    drawn = sampler.draw(logits, plan(draws_per_row=count, temperature=full(0.8), top_k=full(9, dtype=np.int64)))
    expected = survivors(logits, temperature=full(0.8), top_k=full(9, dtype=np.int64))[0] * count
    seen = torch.bincount(drawn, minlength=12).double()
    kept = expected > 0
    assert (seen[~kept] == 0).all()
    chi_square = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 29.6  # 8 degrees of freedom: 1 in 4,000


def test_noise_is_gumbel_and_unrelated_along_every_counter():
    seeds, positions = torch.arange(40).repeat_interleave(40), torch.arange(40).repeat(40)
    noise = gumbel(row_keys(seeds, torch.zeros_like(seeds), positions), 50)
    uniform = torch.exp(-torch.exp(-noise))  # the distribution function of what should be its own distribution
    histogram = torch.histc(uniform, 64, 0, 1)
    expected = uniform.numel() / 64
    assert ((histogram - expected) ** 2 / expected).sum() < 115  # 63 degrees of freedom: 1 in 10,000
    cube = uniform.view(40, 40, 50)
    for a, b in ((cube[1:], cube[:-1]), (cube[:, 1:], cube[:, :-1]), (cube[..., 1:], cube[..., :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.015


def test_a_rounding_error_changes_a_draw_only_at_a_near_tie():
    logits = random_logits(vocab=5000, scale=1.0)
    moved = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(9)) * 0.01
    draws = plan(draws_per_row=500)
    assert (sampler.draw(logits, draws) != sampler.draw(moved, draws)).float().mean() < 0.04


def test_a_row_draws_the_same_in_any_batch():
    logits = random_logits(rows=6, vocab=301)
    mixed = plan(
        rows=6,
        temperature=np.array([0, 0.7, 1, 1.3, 0.7, 1], np.float32),
        top_k=np.array([0, 0, 40, 3, 7, 0], np.int64),
        top_p=np.array([1, 0.9, 1, 0.5, 1, 1], np.float32),
        min_p=np.array([0, 0, 0.1, 0, 0, 0.3], np.float32),
    )
    together = sampler.draw(logits, mixed)
    for row in range(6):
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        alone = plan(**{name: getattr(mixed, name)[row : row + 1] for name in names})
        assert sampler.draw(logits[row : row + 1], alone)[0] == together[row]


def test_R13_choices_of_one_row_differ_and_repeat():
    logits = random_logits(vocab=1000, scale=0.5)
    first = sampler.draw(logits, plan(draws_per_row=16))
    assert torch.equal(first, sampler.draw(logits, plan(draws_per_row=16)))
    assert len(set(first.tolist())) > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": full(0)},
        {"temperature": full(1.1e-5)},
        {"top_k": full(1, dtype=np.int64)},
        {"top_p": full(1e-9)},
        {"min_p": full(1.0)},
    ],
)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e30])
def test_R17_extremes_come_to_greedy(changes, size):
    logits = random_logits(rows=1, vocab=50, seed=3) * size
    drawn = sampler.draw(logits, plan(draws_per_row=32, **changes))
    assert (drawn == logits.argmax()).all()


def test_R17_at_least_one_candidate_is_kept():
    kept = survivors(random_logits(rows=4), top_k=full(1, 4, np.int64), top_p=full(1e-12, 4), min_p=full(1, 4))
    assert (kept.sum(-1) == 1).all() and (kept > 0).sum() == 4


def test_R18_a_forbidden_token_is_never_drawn():
    logits = random_logits(vocab=5, scale=0.1)
    drawn = sampler.draw(logits, plan(draws_per_row=500, forbidden=[(0, np.array([1, 3]))]))
    assert set(drawn.tolist()) == {0, 2, 4}


def test_R19_a_row_that_is_not_finite_leaves_the_others_alone():
    logits = random_logits(rows=3, vocab=50)
    clean = sampler.draw(logits, plan(rows=3))
    broken = logits.clone()
    broken[1, 7] = float("nan")
    assert sampler.finite(broken).tolist() == [True, False, True]
    assert sampler.draw(broken, plan(rows=3))[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_R16_penalties_by_the_formula():
    logits = random_logits(vocab=8)
    prompt, generated = [1, 1, 4], [2, 4, 4]
    counts, seen = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.bool)
    for token in generated:
        counts[0, token] += 1
    seen[0, prompt + generated] = True
    got = edit.penalise(logits, counts, seen, torch.tensor([[0.5]]), torch.tensor([[0.25]]), torch.tensor([[1.3]]))
    repeated = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + generated]), logits.clone())
    for token in range(8):
        occurrences = generated.count(token)
        expected = repeated[0, token] - 0.25 * occurrences - 0.5 * (occurrences > 0)
        assert got[0, token] == pytest.approx(expected.item(), abs=1e-6)
