"""The host's sampler is the device's, number for number."""

import numpy as np
import pytest
import torch

from kvant.sampling import host, logprobs, random, sampler
from tests.sampling.test_sampler import plan, random_logits

ROWS = 24


def random_plan(seed: int):
    rng = np.random.default_rng(seed)

    def some(values, off):
        return np.where(rng.random(ROWS) < 0.5, values, off)

    return plan(
        rows=ROWS,
        draws_per_row=3,
        temperature=some(rng.uniform(0.2, 2, ROWS), 0).astype(np.float32),
        top_k=some(rng.integers(1, 60, ROWS), 0).astype(np.int64),
        top_p=some(rng.uniform(0.05, 0.99, ROWS), 1).astype(np.float32),
        min_p=some(rng.uniform(0.01, 0.3, ROWS), 0).astype(np.float32),
        seeds=rng.integers(-(2**63), 2**63 - 1, ROWS),
        positions=rng.integers(0, 10_000, ROWS),
        forbidden=[(2, np.array([1, 5])), (7, np.array([0]))],
        biased=[(2, np.array([1, 8]), np.array([9, 4], np.float32)), (4, np.array([3]), np.array([-2.5], np.float32))],
        penalised=[(1, 0), (4, 1)],
        presence=np.array([0.5, 0], np.float32),
        frequency=np.array([0, 0.3], np.float32),
        repetition=np.array([1.2, 0.9], np.float32),
    )


@pytest.mark.parametrize("seed", range(12))
def test_draws_equal(seed):
    logits = random_logits(rows=ROWS, vocab=400, seed=seed)
    counts = torch.randint(0, 3, (2, 400)).float()
    seen = counts > 0
    chosen = random_plan(seed)
    on_device = sampler.draw(logits, chosen, counts, seen)
    on_host = host.draw(logits.numpy(), chosen, counts.numpy(), seen.numpy())
    assert on_device.tolist() == on_host.tolist()


def test_noise_equals():
    rng = np.random.default_rng(0)
    counters = [rng.integers(-(2**63), 2**63 - 1, 20) for _ in range(3)]
    expected = random.gumbel(random.row_keys(*(torch.from_numpy(x) for x in counters)), 500).numpy()
    for row, key in enumerate(host.row_keys(*counters)):
        assert np.allclose(host.gumbel(key, np.arange(500)), expected[row], rtol=1e-12, atol=1e-15)


def test_R20_reports_are_log_softmax_of_the_raw_logits():
    logits = random_logits(rows=5, vocab=300)
    tokens, num_top = torch.tensor([3, 50, 299, 0, 7]), [0, 1, 5, 20, 3]
    expected = logits.log_softmax(-1)
    for reports in (logprobs.gather(logits, tokens, num_top), host.gather(logits.numpy(), tokens.numpy(), num_top)):
        for row, (report, count) in enumerate(zip(reports, num_top, strict=True)):
            assert report.token_id == tokens[row]
            assert report.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
            order = expected[row].argsort(descending=True)
            assert report.rank == (order == tokens[row]).nonzero().item() + 1
            assert [token for token, _ in report.top] == order[:count].tolist()
            assert [value for _, value in report.top] == pytest.approx(expected[row][order[:count]].tolist(), abs=1e-5)
