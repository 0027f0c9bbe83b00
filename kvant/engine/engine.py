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
from kvant.decoding.strategy import decode
from kvant.engine.admission import Admission
from kvant.engine.inbox import Inbox
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
        self.inbox = Inbox()
        self.admission = Admission(
            max_model_len=context.max_model_len,
            max_num_seqs=scheduler.limits.max_num_seqs,
            embedding_rows=runner.embedding_rows,
            vocab_size=runner.vocab_size,
            end_token_ids=end_token_ids,
            seed=seed,
        )
        self._numbers = count()

    def step(self, step_input: StepInput) -> list[Output]:
        """One step over everything that is running. Returns what is new, request by request.

        Where it raises, no request is lost: all that run wait again, with the tokens they have.
        """
        schedule = self.scheduler.schedule(step_input)
        if not schedule.rows:
            return self.scheduler.commit(schedule, Decision(advances=()))
        try:
            prepared = self.runner.prepare(schedule)
            hidden = self.runner.run(prepared)
            selection = self.runner.select(prepared, hidden, schedule).arrive()
            decision = decode(schedule, selection, self.context)
        except BaseException:  # memory ran out, somebody pressed Ctrl-C: nobody may believe that this was computed
            self.scheduler.take_back()
            raise
        return self.scheduler.commit(schedule, decision)

    def request(self, token_ids: list[int], sampling: SamplingParams, **details: Any) -> Request:
        """A Request for these prompt tokens, checked against the model. Raises `RequestError` and its children."""
        return self.admission.request(next(self._numbers), token_ids, sampling, **details)

    def add(self, request: Request) -> None:
        """The request is taken up by the next step."""
        self.inbox.put(Add(request))

    def abort(self, request_id: str) -> None:
        """Ends all choices of the request with the next step. Unknown ids are ignored: it may just have finished."""
        self.inbox.put(Abort(request_id))

    def has_work(self) -> bool:
        return bool(len(self.inbox)) or self.scheduler.has_work()
