"""Engine: the loop. A step is a paragraph: schedule, prepare, run, select, decide, commit.

    schedule   who computes how many tokens                       policy, plain Python
    prepare    sequences -> arrays, by seat                       runner
    run        the network                                        runner
    select     draw; log-probabilities                            runner, on the device
    decode     what the strategies make of it                     policy, plain Python
    commit     append, finish, free                               policy

The loop knows no kinds of request and no phases. It is synchronous: whoever calls `step` drives it.
"""

from itertools import count
from typing import Any

from kvant.config.sampling import SamplingParams
from kvant.decoding.stopping import DecodeContext
from kvant.decoding.strategy import decode, width
from kvant.engine.inbox import Inbox
from kvant.errors import ContextLengthError, RequestError
from kvant.scheduler.scheduler import Scheduler
from kvant.types import Abort, Add, Decision, Output, Request, StepInput


class Engine:
    """One model on one runner, serving any number of requests at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Any,
        context: DecodeContext,
        end_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.context = context
        self.end_token_ids = end_token_ids
        self.inbox = Inbox()
        self._seed = seed
        self._numbers = count()

    def step(self, step_input: StepInput) -> list[Output]:
        """One step over everything that is running. Returns what is new, request by request."""
        schedule = self.scheduler.schedule(step_input)
        if not schedule.rows:
            return self.scheduler.commit(schedule, Decision(advances=()))
        prepared = self.runner.prepare(schedule)
        hidden = self.runner.run(prepared)
        selection = self.runner.select(prepared, hidden, schedule).arrive()
        return self.scheduler.commit(schedule, decode(schedule, selection, self.context))

    def request(self, token_ids: list[int], sampling: SamplingParams, **details: Any) -> Request:
        """A Request for these prompt tokens, checked against the model. Raises `RequestError` and its children."""
        number = next(self._numbers)
        self._check(token_ids, sampling)
        request = Request(
            request_id=details.pop("request_id", f"request-{number}"),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            end_token_ids=self.end_token_ids,
            # Unseeded requests get numbers of their own, far apart; a seeded engine repeats them run after run.
            seed=sampling.seed if sampling.seed is not None else (self._seed + number * 1_000_003) % 2**63,
            **details,
        )
        seats = width(request)  # refuses a strategy that does not exist
        if seats > self.scheduler.limits.max_num_seqs:
            limit = self.scheduler.limits.max_num_seqs
            raise RequestError(
                f"n is {seats}, but this engine computes {limit} sequences at once; raise max_num_seqs", param="n"
            )
        return request

    def add(self, request: Request) -> None:
        """The request is taken up by the next step."""
        self.inbox.put(Add(request))

    def abort(self, request_id: str) -> None:
        """Ends all choices of the request with the next step. Unknown ids are ignored: it may just have finished."""
        self.inbox.put(Abort(request_id))

    def has_work(self) -> bool:
        return bool(len(self.inbox)) or self.scheduler.has_work()

    def _check(self, token_ids: list[int], sampling: SamplingParams) -> None:
        limit = self.context.max_model_len
        if not token_ids:
            raise RequestError("the prompt is empty: it yields no tokens; give it some text", param="prompt")
        rows = self.runner.embedding_rows
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < rows:
                raise RequestError(f"prompt token ids must lie between 0 and {rows - 1}; found {token}", param="prompt")
        if len(token_ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, but the context holds {limit} with the answer; shorten the prompt"
                " or raise max_model_len",
                param="prompt",
            )
        if sampling.max_tokens is not None and len(token_ids) + sampling.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens and max_tokens is {sampling.max_tokens}: {len(token_ids)} +"
                f" {sampling.max_tokens} is more than the context of {limit}; lower max_tokens to"
                f" {limit - len(token_ids)} or shorten the prompt",
                param="max_tokens",
            )
        for token in sampling.stop_token_ids:
            if token >= rows:
                raise RequestError(f"stop_token_ids holds {token}, which is not in the vocabulary", param="stop_token_ids")
