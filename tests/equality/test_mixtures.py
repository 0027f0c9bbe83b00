"""Everything at once, drawn at random: each request still says what it says alone.

One run mixes choices, stops, penalties, log-probabilities of answers and prompts, forbidden ends, shared and repeated prompts,
prompts that fill the context, late arrivals, aborts, preemptions and failing steps, on an engine of extreme options.
"""

import random

import pytest
import torch

from kvant.config.sampling import SamplingParams
from tests.engine.tiny import VOCABULARY, drive, engine_of, tiny
from tests.equality.test_features import TOLERANCE, _compare_one

LENGTH = 128  # of the context
END = 7


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    return tiny(request.param)


class Mixture:
    """One random run: what is asked of which engine, and what happens meanwhile."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.prompts, self.sampling, self.arrivals = {}, {}, {}
        heads = [self._tokens(length) for length in (16, 31, 48, 100)]
        for number in range(self.draw.randint(4, 9)):
            name = f"r{number}"
            self.prompts[name] = self._prompt(heads)
            self.sampling[name] = self._params(LENGTH - len(self.prompts[name]))
            self.arrivals[name] = self.draw.choice((0, 0, 1, 5, 30))
        self.engine = dict(
            block_size=self.draw.choice((8, 16, 32, 128)),
            budget=self.draw.choice((1, 3, 17, 64, 512)),
            max_num_seqs=self.draw.choice((4, 5, 40)),
            caching=self.draw.random() < 0.7,
        )
        # From what one sequence of the whole context needs to plenty.
        self.engine["num_blocks"] = self.draw.choice((1, 1, 2, 8)) * -(-LENGTH // self.engine["block_size"]) + 2
        self.troubles = (
            15  # so many preemptions and failures: with a token per step more of them would leave no time to compute
        )
        self.aborted = {name for name in self.prompts if self.draw.random() < 0.12}

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(count)]

    def _prompt(self, heads: list[list[int]]) -> list[int]:
        kind = self.draw.random()
        if kind < 0.15:
            return self._tokens(LENGTH - 1)
        if kind < 0.3 and self.prompts:
            return list(self.draw.choice(list(self.prompts.values())))
        if kind < 0.5:
            return list(self.draw.choice(heads))
        return self.draw.choice((*heads, [])) + self._tokens(self.draw.randint(1, 25))

    def _params(self, room: int) -> SamplingParams:
        draw = self.draw
        most = draw.choice((None, *(count for count in (1, 5, 20) if count <= room)))
        return SamplingParams(
            n=draw.choice((1, 1, 2, 4)),
            temperature=draw.choice((0, 0.7, 1.3)),
            top_k=draw.choice((0, 0, 5)),
            top_p=draw.choice((1.0, 0.9)),
            min_p=draw.choice((0.0, 0.05)),
            seed=draw.choice((-(2**63), -1, 0, 5, 2**63 - 1)),
            max_tokens=most,
            min_tokens=draw.randint(0, most or 20),
            stop=draw.choice(((), (), ("7,",), ("3,1", "99"))),
            stop_token_ids=draw.choice(((), (), (11, 12))),
            ignore_eos=draw.random() < 0.3,
            presence_penalty=draw.choice((0, 0, 0.8)),
            frequency_penalty=draw.choice((0, 0, 0.5)),
            repetition_penalty=draw.choice((1, 1, 1.4)),
            logprobs=3,
            prompt_logprobs=draw.choice((None, None, 0, 2)),
        )

    def disturb(self, engine, step: int) -> None:
        if step == 3:
            for name in sorted(self.aborted):
                engine.abort(name)
        running = engine.scheduler.running
        if running and self.troubles > 0 and self.draw.random() < 0.1:
            self.troubles -= 1
            engine.scheduler.preempt(self.draw.choice(running))


class Lost(Exception):
    """A step that fails."""


def failing(engine, mixture: Mixture):
    """Every now and then the runner gives up, before, in or after the network."""
    for verb in ("prepare", "run", "select"):
        whole = getattr(engine.runner, verb)

        def sometimes(*arguments, whole=whole):
            if mixture.troubles > 0 and mixture.draw.random() < 0.02:
                mixture.troubles -= 1
                raise Lost
            return whole(*arguments)

        setattr(engine.runner, verb, sometimes)
    return engine


@pytest.mark.parametrize("seed", range(14))
def test_each_request_says_what_it_says_alone(model, seed):
    mixture = Mixture(seed)
    engine = failing(engine_of(model, max_model_len=LENGTH, end=(END,), **mixture.engine), mixture)
    answers = drive(engine, mixture.prompts, mixture.sampling, mixture.disturb, mixture.arrivals, survives=Lost)
    assert not engine.has_work() and engine.scheduler.num_running == 0
    assert all(pool.num_free == pool.capacity for pool in engine.scheduler.manager.pools)
    assert set(answers) == {(name, index) for name, params in mixture.sampling.items() for index in range(params.n)}
    ties = 0
    for name in mixture.prompts.keys() - mixture.aborted:
        ties += _check_alone(model, answers, name, mixture)
    print(f"{ties} near-ties below {TOLERANCE}")
    assert ties <= 2


def _check_alone(model, answers, name: str, mixture: Mixture) -> int:
    prompt, params = mixture.prompts[name], mixture.sampling[name]
    engine = engine_of(model, max_model_len=LENGTH, end=(END,), caching=False, budget=512)
    ties = 0
    for (_, index), expected in drive(engine, {"x": prompt}, params).items():
        got = answers[name, index]
        ties += _compare_one(got, expected, (name, index))
        if index == 0 and params.prompt_logprobs is not None:
            ours, theirs = got.prompt_logprobs, expected.prompt_logprobs
            assert len(ours) == len(prompt) and ours[0] is None
            assert [x.token_id for x in ours[1:]] == prompt[1:]
            torch.testing.assert_close([x.logprob for x in ours[1:]], [x.logprob for x in theirs[1:]], atol=TOLERANCE, rtol=0)
    return ties
