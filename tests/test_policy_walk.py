"""Random walks over add, abort, fork, preempt, finish and reset. After every step the books balance, every query read the
right keys from the right slots, and in the end every request said what it says alone."""

import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvant.types import Abort, Add, FinishReason, MediaSpan, Request, ResetCache
from tests.scheduler.harness import VOCAB, Loop, digests, group, letters, lone_run, prompt_score, request

# Prompts share beginnings, so that prefixes hit and blocks are shared.
STEMS = [[(7 * i + j) % VOCAB for i in range(40)] for j in (1, 1, 2)]

windows = st.sampled_from([None, None, 1, 3, 4, 5, 9, 17])
layouts = st.lists(st.tuples(windows, st.sampled_from([2, 4, 4, 8])), min_size=1, max_size=3)


class PolicyWalk(RuleBasedStateMachine):
    @initialize(
        layout=layouts,
        tokens_of_memory=st.integers(min_value=24, max_value=100),
        seqs=st.sampled_from([1, 3, 5, 8]),
        tokens=st.sampled_from([1, 4, 17, 64, 64]),
        length=st.sampled_from([24, 64, 64]),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, layout, tokens_of_memory, seqs, tokens, length, caching):
        groups = tuple(group(window, size, f"{i}-{window}") for i, (window, size) in enumerate(layout))
        num_blocks = tuple(tokens_of_memory // size + 2 for _, size in layout)
        self.loop = Loop(groups, num_blocks, seqs=seqs, tokens=tokens, length=length, caching=caching)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.messages: list = []

    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(min_value=0, max_value=24),
        own=st.lists(st.integers(min_value=0, max_value=VOCAB - 1), max_size=6),
        n=st.sampled_from([1, 1, 1, 1, 2, 3]),
        max_tokens=st.sampled_from([1, 3, 12, 24, None]),
        min_tokens=st.sampled_from([0, 0, 1]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        stop=st.sampled_from([(), (), (letters([3]),), (letters([5, 6]), letters([9]))]),
        salt=st.sampled_from(["", "", "tenant"]),
        adapter=st.sampled_from([("", 0), ("", 0), ("a", 1), ("a", 2)]),
        media=st.sampled_from([(), (), (MediaSpan(2, 9, b"cat"),), (MediaSpan(2, 9, b"dog"),)]),
        end=st.booleans(),
    )
    def add(self, stem, shared, own, n, max_tokens, min_tokens, prompt_logprobs, stop, salt, adapter, media, end):
        name = f"r{len(self.requests)}"
        sampling = dict(n=n, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs, stop=stop)
        self.requests[name] = request(
            name,
            stem[:shared] + own,
            end=end,
            sampling=sampling,
            seed=len(self.requests),
            cache_salt=salt,
            adapter=adapter[0],
            adapter_version=adapter[1],
            media=media,
        )
        self.messages.append(Add(self.requests[name]))

    @rule(count=st.integers(min_value=1, max_value=3))
    def steps(self, count):
        for _ in range(count):
            self.loop.step(*self.messages)
            self.messages.clear()

    @rule(pick=st.integers(min_value=0, max_value=99))
    @precondition(lambda self: self.requests)
    def abort(self, pick):
        name = f"r{pick % len(self.requests)}"
        if self.unfinished(name):
            self.aborted.add(name)
        self.messages.append(Abort(name))

    @rule(pick=st.integers(min_value=0, max_value=99))
    @precondition(lambda self: self.loop.scheduler.running)
    def preempt(self, pick):
        running = self.loop.scheduler.running
        self.loop.scheduler.preempt(running[pick % len(running)])

    @rule()
    def reset(self):
        self.messages.append(ResetCache())

    @invariant()
    def books_balance(self):
        if hasattr(self, "loop"):
            self.loop.scheduler.check()

    def unfinished(self, name):
        choices = [self.loop.answers.get((name, i)) for i in range(self.requests[name].sampling.n)]
        return any(choice is None or choice.finish is None for choice in choices)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        self.loop.step(*self.messages)
        self.loop.drain()
        for name, asked in self.requests.items():
            for index in range(asked.sampling.n):
                self.check_answer(name, asked, index)
        assert self.loop.answers.keys() == {(name, i) for name, r in self.requests.items() for i in range(r.sampling.n)}

    def check_answer(self, name, asked, index):
        answer = self.loop.answers[name, index]
        if answer.finish is FinishReason.ERROR:
            self.check_refusal(asked, answer)
        elif answer.finish is FinishReason.ABORT:
            assert name in self.aborted
        else:
            alone = lone_run(asked, index, self.loop.context.max_model_len)
            assert (answer.tokens, answer.finish, answer.last.stop_reason) == (alone.tokens, alone.finish, alone.stop_reason)
        if answer.tokens and asked.sampling.prompt_logprobs is not None and index == 0:
            chain = digests(asked, list(asked.prompt_token_ids))
            scores = [prompt_score(asked.prompt_token_ids, chain, p) for p in range(1, len(chain))]
            assert answer.prompt_logprobs == (None, *scores)
        if answer.tokens and answer.finish in (FinishReason.ABORT, FinishReason.ERROR):
            alone = lone_run(asked, index, self.loop.context.max_model_len)
            assert answer.tokens == alone.tokens[: len(answer.tokens)]

    def check_refusal(self, asked, answer):
        """An error is right only where the request cannot run here."""
        limits, manager = self.loop.scheduler.limits, self.loop.manager
        num_tokens = len(asked.prompt_token_ids) + len(answer.tokens)
        assert answer.last.error
        assert (
            num_tokens == 0
            or num_tokens >= limits.max_model_len
            or asked.sampling.n > limits.max_num_seqs
            or not manager.fits_alone(num_tokens)
        )


TestPolicyWalk = PolicyWalk.TestCase
TestPolicyWalk.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_policy_runs_without_torch():
    """The whole loop of the walk, in a process of its own."""
    script = """
import sys
from tests.scheduler.harness import Loop, request
loop = Loop()
asked = request("r", range(9), sampling={"n": 3})
loop.run(asked)
loop.assert_lone(asked)
assert not {"torch", "numpy"} & set(sys.modules)
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
