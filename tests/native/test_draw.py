"""Draws in C++ are those of the numpy reference, token for token; and their frequencies those of the distribution."""

import numpy as np
import pytest

from kvant.native.executor import RowDraws
from kvant.sampling import host
from kvant.sampling.plan import DrawPlan
from tests.native.test_operations import llama_layer


@pytest.fixture(scope="module")
def model(library):
    return llama_layer().finish(library, threads=3)


def random_plan(rows, draws, rng, **changes):
    def some(values, off):
        return np.where(rng.random(rows) < 0.5, values, off)

    values = dict(
        rows=np.repeat(np.arange(rows), draws),
        indices=np.tile(np.arange(draws), rows),
        temperature=rng.uniform(0.05, 2, rows).astype(np.float32),
        top_k=some(rng.integers(1, 600, rows), 0).astype(np.int64),
        top_p=some(rng.uniform(0.01, 0.9999, rows), 1).astype(np.float32),
        min_p=some(rng.uniform(0.001, 0.3, rows), 0).astype(np.float32),
        seeds=rng.integers(-(2**63), 2**63 - 1, rows),
        positions=rng.integers(0, 10_000, rows),
    )
    return DrawPlan(**{**values, **changes})


def full(value, dtype=np.float32):
    return np.array([value], dtype)


def drawn(model, logits, plan):
    keys = host.draw_keys(plan, np.arange(len(plan.rows)))
    with np.errstate(divide="ignore"):
        log_min_p = np.log(plan.min_p)
    rows = zip(logits, np.split(keys, len(logits)), plan.temperature, plan.top_k, plan.top_p, log_min_p, strict=True)
    return np.concatenate(model.draw([RowDraws(*row) for row in rows]))


@pytest.mark.parametrize("vocabulary", [1, 7, 16, 33, 400, 5000, 49152])
@pytest.mark.parametrize("kind", ["spread", "ties", "flat", "forbidden", "peaked", "far from zero"])
def test_draws_equal_the_reference(model, vocabulary, kind):
    rng = np.random.default_rng(vocabulary)
    logits = (rng.normal(size=(4, vocabulary)) * 4).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = 1.5
    elif kind == "forbidden":
        logits[:, 1::2] = -np.inf
    elif kind == "peaked":
        logits[:, vocabulary // 2] += 60
    elif kind == "far from zero":
        logits -= np.float32(3000)
    plan = random_plan(4, 5, rng)
    np.testing.assert_array_equal(drawn(model, logits, plan), host.draw(logits, plan))


@pytest.mark.parametrize("top_k", [1, 2, 255, 256, 257, 2000, 4999, 5000, 90000])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_keeps_what_the_reference_keeps(model, top_k, ties):
    rng = np.random.default_rng(top_k)
    logits = (rng.normal(size=(1, 5000)) * 0.4).astype(np.float32)  # flat: whatever stays is drawn
    if ties:
        logits = np.round(logits, 1)
    plan = random_plan(1, 300, rng, top_k=full(top_k, np.int64), top_p=full(1), min_p=full(0), temperature=full(1))
    np.testing.assert_array_equal(drawn(model, logits, plan), host.draw(logits, plan))


@pytest.mark.parametrize("top_p", [1e-6, 0.01, 0.5, 0.9, 0.99, 0.999999])
@pytest.mark.parametrize("top_k", [0, 40, 3000])
@pytest.mark.parametrize("ties", [False, True])
def test_top_p_keeps_what_the_reference_keeps(model, top_p, top_k, ties):
    rng = np.random.default_rng(top_k + 1)
    logits = (rng.normal(size=(1, 5000)) * 0.7).astype(np.float32)
    if ties:
        logits = np.round(logits, 1)
    plan = random_plan(1, 300, rng, top_k=full(top_k, np.int64), top_p=full(top_p), min_p=full(0), temperature=full(1))
    np.testing.assert_array_equal(drawn(model, logits, plan), host.draw(logits, plan))


@pytest.mark.parametrize("top_k", [0, 40, 300])
@pytest.mark.parametrize("top_p", [1, 0.5])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whole", [False, True])
def test_R19_rows_that_are_not_finite_draw_something(model, poison, whole, top_k, top_p):
    """The runner reports such rows; here they must only not read or write elsewhere, nor disturb their neighbours."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 333)).astype(np.float32)
    clean = logits.copy()
    logits[1, slice(None) if whole else slice(3, 333)] = poison
    changes = {"top_k": np.full(3, top_k), "top_p": np.full(3, top_p, np.float32)}
    plan = random_plan(3, 4, rng, **changes)
    ids, expected = drawn(model, logits, plan), host.draw(clean, plan)
    assert ((ids >= 0) & (ids < 333)).all()
    np.testing.assert_array_equal(ids[[0, 1, 2, 3, 8, 9, 10, 11]], expected[[0, 1, 2, 3, 8, 9, 10, 11]])


def test_frequencies_are_the_distribution(native):
    """Chi-square over 40,000 draws of 12 tokens: below the 99.99 % quantile of 11 degrees of freedom."""
    model = llama_layer().finish(native, threads=2)
    logits = np.random.default_rng(1).normal(size=(1, 12)).astype(np.float32)
    count = 40_000
    plan = random_plan(
        1, count, np.random.default_rng(2), temperature=full(0.8), top_k=full(0, np.int64), top_p=full(1), min_p=full(0)
    )
    observed = np.bincount(drawn(model, logits, plan), minlength=12)
    p = np.exp(logits[0].astype(np.float64) / 0.8)
    expected = count * p / p.sum()
    assert ((observed - expected) ** 2 / expected).sum() < 37.4


def test_rows_of_other_lengths_or_types_are_refused(native):
    model = llama_layer().finish(native, threads=2)
    good = RowDraws(np.zeros(8, np.float32), np.zeros(1, np.uint64), 1.0, 0, 1.0, -np.inf)
    for bad in (
        good._replace(logits=np.zeros(9, np.float32)),
        good._replace(logits=np.zeros(8)),
        good._replace(keys=np.zeros(1, np.int64)),
    ):
        with pytest.raises(ValueError, match="draws need"):
            model.draw([good, bad])
