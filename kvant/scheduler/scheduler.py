"""Scheduler: who computes how many tokens in the next step, and what becomes of the results.

There are no phases. A sequence has tokens that are known and tokens that are computed; it is given the difference, up to
the token budget (`Sequence.num_new`). Long prompts, prefix hits, resumed sequences and ordinary decode are one rule.

    schedule   messages ─▶ running sequences, in order of admission ─▶ waiting ones, while seats, blocks and budget last
                           no blocks left? preempt the one admitted last: its tokens stay, its blocks and seat go
    commit     fork ─▶ append ─▶ take back rejected drafts ─▶ cache full blocks ─▶ finish ─▶ Outputs

A preempted sequence keeps its tokens and strategy state, waits at the front, and computes its tokens anew (or finds them in
the prefix cache); nothing is drawn again. Progress: the first running sequence may preempt all others, so it always moves
on; one that would not even fit alone ends with an error at once instead of blocking those behind it.

Messages come through `StepInput`, so every rank sees the same ones; no clock is read, no set is iterated. Outputs that
arise while scheduling (aborts, refusals) leave with the same step's commit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvant.kvcache.manager import KVCacheManager
from kvant.scheduler.budget import SchedulerLimits, Seats
from kvant.scheduler.policy import WaitingQueue, victim
from kvant.scheduler.refusal import outgrown, refusal
from kvant.types import (
    TARGET,
    Abort,
    Add,
    Advance,
    Decision,
    FinishReason,
    Message,
    Output,
    Request,
    ResetCache,
    Schedule,
    Scheduled,
    Sequence,
    Status,
    StepInput,
    Want,
)


@dataclass(slots=True)
class _Live:
    """A request under way: its unfinished choices, and the seats kept for those that have not forked yet."""

    sequences: list[Sequence]
    num_reserved: int = 0


@dataclass(slots=True)
class _Step:
    """A schedule in the making."""

    budget: int
    rows: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns every Sequence from Add to its last Output.

    `want` says what a sequence needs from the device once its known tokens are computed; `width` how many seats a request
    takes. Both are the decoding strategies', injected because policy does not know them.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        limits: SchedulerLimits,
        want: Callable[[Sequence], Want],
        width: Callable[[Request], int],
    ):
        self.manager = manager
        self.limits = limits
        self.running: list[Sequence] = []  # in order of admission
        self.waiting = WaitingQueue()
        self.num_steps = 0
        self.num_preemptions = 0
        self._want = want
        self._width = width
        self._seats = Seats(limits.max_num_seqs)
        self._unseen: set[Sequence] = set()  # have a seat, but no row yet that filled it
        self._live: dict[str, _Live] = {}
        self._outputs: list[Output] = []  # to leave with the next commit

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._outputs)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    # --- schedule -------------------------------------------------------------------------------------------------------

    def schedule(self, step_input: StepInput) -> Schedule:
        """The rows of the next step; possibly none. `num_computed` advances here."""
        for message in step_input.messages:
            self._receive(message)
        self.manager.release_copies()
        step = _Step(self.limits.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:  # what was just freed belongs to those who lacked it
            self._admit(step)
        self.num_steps += 1
        return Schedule(
            rows=tuple(step.rows),
            kv_copies=self.manager.copies(),
            freed_seats=self._seats.take_freed(),
            preempted=tuple(step.preempted),
            step=self.num_steps,
        )

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self.running) and step.budget > 0:
            sequence = self.running[index]
            num_new = sequence.num_new()
            if sequence.drafts:
                num_new = min(num_new, self.limits.max_model_len - sequence.num_computed[TARGET])
            if num_new > 0:
                num_new = min(num_new, step.budget)
                changed = self.manager.allocate(sequence, num_new)
                if changed is None:
                    index = self._schedule_under_pressure(step, index, num_new)
                    continue
                self._add_row(step, sequence, num_new, changed)
            index += 1

    def _schedule_under_pressure(self, step: _Step, index: int, num_new: int) -> int:
        """Schedules running[index] though blocks do not suffice for `num_new` tokens. Returns the index to go on with."""
        sequence = self.running[index]
        if not self.manager.fits_alone(sequence.num_computed[TARGET] + 1):
            self._end(sequence, FinishReason.ERROR, outgrown(sequence))
            return index
        while (num_tokens := min(num_new, self.manager.room(sequence))) == 0:
            chosen = victim(self.running, index)
            if chosen is None:
                return index + 1
            self.preempt(chosen)
            step.preempted.append(chosen)
            if chosen is sequence:
                return index
        changed = self.manager.allocate(sequence, num_tokens)
        assert changed is not None, "room and allocate disagree"
        self._add_row(step, sequence, num_tokens, changed)
        return index + 1

    def _admit(self, step: _Step) -> None:
        """Waiting sequences, strictly in order, while seats, blocks and budget last."""
        while self.waiting and step.budget > 0:
            sequence = self.waiting.peek()
            if not self.manager.fits_alone(len(sequence.tokens)):
                self._end(sequence, FinishReason.ERROR, outgrown(sequence))
                continue
            num_seats = self._width(sequence.request) if _before_fork(sequence) else 1
            if num_seats > self._seats.num_free:
                return
            hit = self.manager.find_prefix(sequence)
            num_new = min(len(sequence.tokens) - hit.num_tokens, step.budget)
            if self.running and not self.manager.can_admit(sequence, hit, num_new):
                return
            self.waiting.pop()
            self.manager.adopt(sequence, hit)
            sequence.num_computed[TARGET] = hit.num_tokens
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = hit.num_tokens
            self._take_seat(sequence)
            self._reserve(sequence, num_seats - 1)
            self.running.append(sequence)
            num_new = min(num_new, self.manager.room(sequence))
            changed = self.manager.allocate(sequence, num_new)
            assert changed is not None and num_new > 0, "admitted without room"
            self._add_row(step, sequence, num_new, changed)

    def why_waiting(self, schedule: Schedule) -> str:
        """Why the first of the queue did not join `schedule`, the last one made; "" where nobody waits. For traces."""
        if not self.waiting:
            return ""
        if schedule.preempted:
            return "blocks were just taken back from running sequences"
        if schedule.num_tokens >= self.limits.max_num_batched_tokens:
            return "the step's tokens are spent (max_num_batched_tokens)"
        sequence = self.waiting.peek()
        if (self._width(sequence.request) if _before_fork(sequence) else 1) > self._seats.num_free:
            return "no free seat (max_num_seqs)"
        return "not enough free blocks"

    def _add_row(self, step: _Step, sequence: Sequence, num_tokens: int, table_from: tuple[int, ...]) -> None:
        start = sequence.num_computed[TARGET]
        stop = start + num_tokens
        known = len(sequence.tokens) + sequence.num_pending
        newly_seated = sequence in self._unseen
        if newly_seated:
            self._unseen.remove(sequence)
            table_from = (0,) * len(table_from)
        step.rows.append(
            Scheduled(
                sequence=sequence,
                start=start,
                num_tokens=num_tokens,
                want=self._want(sequence) if stop >= known else None,
                drafts=tuple(sequence.drafts[: stop - known]) if stop > known else (),
                table_from=table_from,
                newly_seated=newly_seated,
                score_prompt=sequence.prompt_logprobs is not None and _lacks_scores(sequence, stop),
            )
        )
        step.budget -= num_tokens
        sequence.num_computed[TARGET] = stop

    # --- messages -------------------------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        match message:
            case Add(request):
                self._add(request)
            case Abort(request_id):
                self.abort(request_id)
            case ResetCache():
                self.manager.reset_prefix_cache()

    def _add(self, request: Request) -> None:
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        reason = refusal(request, self._width(request), self.limits, self.manager)
        sequence = Sequence(request=request, index=0, tokens=list(request.prompt_token_ids))
        if request.sampling.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None]  # nothing predicts the first token
        self._live[request.request_id] = _Live([sequence])
        self.waiting.push(sequence)
        if reason is not None:
            self._end(sequence, FinishReason.ERROR, reason)

    def abort(self, request_id: str) -> None:
        """Ends all choices of a request; results of theirs that are under way are dropped. Unknown ids are finished ones."""
        if request_id in self._live:
            for sequence in sorted(self._live[request_id].sequences, key=lambda s: s.index):
                self._end(sequence, FinishReason.ABORT)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the front of the queue. Not between a step's schedule and its commit."""
        if sequence.status is not Status.RUNNING or sequence.num_pending:
            raise ValueError("only a running sequence without pending tokens can be preempted")
        self._leave_device(sequence)
        for network in sequence.num_computed:
            sequence.num_computed[network] = 0
        sequence.drafts.clear()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.push_front(sequence)

    def take_back(self) -> None:
        """For a schedule that will not be committed, because its step failed: what it counted as computed never was."""
        for sequence in reversed(self.running):  # to the front of the queue one by one: their order stays
            self.preempt(sequence)

    # --- commit ---------------------------------------------------------------------------------------------------------

    def commit(self, schedule: Schedule, decision: Decision) -> list[Output]:
        """Applies a decision, in its order. Returns what is new for the clients."""
        outputs, self._outputs = self._outputs, []
        running = Status.RUNNING
        rows = {row.sequence: row for row in schedule.rows if row.drafts or row.score_prompt}
        for advance in decision.advances:
            sequence = advance.sequence
            if (advance.fork_of or sequence).status is not running:  # aborted while the step ran
                continue
            if advance.fork_of is not None:
                self._fork(advance.fork_of, sequence, leaves_at_once=advance.finish is not None)
            output = self._advance(advance, rows.get(sequence))
            if output is not None:
                outputs.append(output)
        for sequence in decision.drops:
            if sequence.status is running:
                self._finish(sequence)
        for row in schedule.rows:
            if row.sequence.status is running:
                self.manager.cache_full_blocks(row.sequence)
        return outputs

    def _advance(self, advance: Advance, row: Scheduled | None) -> Output | None:
        """Appends an advance's tokens to its sequence and finishes it where told to."""
        sequence, finish = advance.sequence, advance.finish
        prompt_logprobs = None
        if row is not None:
            _settle(advance, row)
        if advance.tokens and _before_fork(sequence):
            self._reserve(sequence, 0)
            if sequence.prompt_logprobs is not None:
                prompt_logprobs = tuple(sequence.prompt_logprobs)
        sequence.tokens.extend(advance.tokens)
        sequence.logprob_sum += advance.logprob_delta
        if sequence.drafts:
            sequence.drafts.clear()
        if finish is not None:
            if finish is not FinishReason.ERROR and sequence.seat is not None:  # what failed is not fit to be shared
                self.manager.cache_full_blocks(sequence)
            self._finish(sequence)
        elif not advance.tokens:
            return None
        return Output(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=advance.tokens,
            logprobs=advance.logprobs,
            score=sequence.logprob_sum,
            finish_reason=finish,
            stop_reason=advance.stop_reason,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=sequence.num_cached_tokens,
            error=advance.error,
        )

    def _fork(self, parent: Sequence, child: Sequence, leaves_at_once: bool) -> None:
        """A new choice begins where its parent stands, on a seat that was reserved. One that is over already needs none."""
        live = self._live[parent.request.request_id]
        live.sequences.append(child)
        child.num_cached_tokens = parent.num_cached_tokens
        child.status = Status.RUNNING
        if leaves_at_once:
            return
        if live.num_reserved == 0:
            raise ValueError(f"request {parent.request.request_id!r} forks more often than its width allows")
        self._reserve(parent, live.num_reserved - 1)
        self._take_seat(child)
        child.num_computed[TARGET] = min(parent.num_computed[TARGET], len(parent.tokens))
        self.manager.fork(parent, child)
        index = self.running.index(parent) + 1
        while index < len(self.running) and self.running[index].request is parent.request:
            index += 1
        self.running.insert(index, child)  # admitted together: siblings are neighbours

    # --- leaving --------------------------------------------------------------------------------------------------------

    def _take_seat(self, sequence: Sequence) -> None:
        sequence.seat = self._seats.take()
        sequence.status = Status.RUNNING
        self._unseen.add(sequence)

    def _leave_device(self, sequence: Sequence) -> None:
        """Seat, reservations and blocks go back. The tokens stay."""
        if _before_fork(sequence):
            self._reserve(sequence, 0)
        if sequence.seat is not None:
            self.running.remove(sequence)
            self._seats.give_back(sequence.seat)
            self._unseen.discard(sequence)
            sequence.seat = None
        self.manager.free(sequence)

    def _reserve(self, sequence: Sequence, num_seats: int) -> None:
        """Sets how many seats are kept for choices to come: none any more once choice 0 has its first token, or leaves."""
        live = self._live[sequence.request.request_id]
        self._seats.num_reserved += num_seats - live.num_reserved
        live.num_reserved = num_seats

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self._leave_device(sequence)
        sequence.status = Status.FINISHED
        live = self._live[sequence.request.request_id]
        live.sequences.remove(sequence)
        if not live.sequences:
            del self._live[sequence.request.request_id]

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Finishes a choice from outside a step; with choice 0 before its fork, those that were to come from it too."""
        indices = range(sequence.request.sampling.n) if _before_fork(sequence) else (sequence.index,)
        self._outputs += [
            Output(
                request_id=sequence.request.request_id,
                index=index,
                score=sequence.logprob_sum,
                finish_reason=reason,
                num_cached_tokens=sequence.num_cached_tokens,
                error=error,
            )
            for index in indices
        ]
        self._finish(sequence)

    # --- integrity ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError unless every choice is in one place, and seats, blocks and progress agree with it."""
        living = [sequence for live in self._live.values() for sequence in live.sequences]
        assert all(live.sequences for live in self._live.values()), "a request without choices is remembered"
        assert len(living) == len(self.running) + len(self.waiting), "a sequence is in two places, or in none"
        assert set(living) == {*self.running, *self.waiting}, "a sequence is in two places, or in none"
        for sequence in self.running:
            assert sequence.status is Status.RUNNING, "a sequence runs under a wrong status"
            assert sequence.num_new() >= 0, "more tokens are computed than known"
        for sequence in self.waiting:
            assert sequence.status is Status.WAITING and sequence.seat is None and not sequence.tables, "a waiting holder"
            assert not any(sequence.num_computed.values()), "a waiting sequence has computed tokens"
        assert self._unseen <= set(self.running), "a seat is remembered for nobody"
        assert self._seats.num_reserved == sum(live.num_reserved for live in self._live.values()), "reservations disagree"
        self._seats.check(sequence.seat for sequence in self.running)
        self.manager.check(living)


def _before_fork(sequence: Sequence) -> bool:
    """Whether this is choice 0 without its first token: the other choices of its request do not exist yet."""
    return sequence.index == 0 and sequence.num_output_tokens == 0


def _lacks_scores(sequence: Sequence, stop: int) -> bool:
    """Whether rows before `stop` give prompt log-probabilities not gathered yet; row p scores token p + 1."""
    num_gathered = len(sequence.prompt_logprobs or ())
    return num_gathered < sequence.num_prompt_tokens and stop >= num_gathered


def _settle(advance: Advance, row: Scheduled) -> None:
    """Takes back rejected drafts and gathers prompt log-probabilities, each position once."""
    sequence = row.sequence
    if row.drafts and advance.tokens:
        # The last of the tokens was drawn, the others are drafts that were right.
        sequence.num_computed[TARGET] -= len(row.drafts) - (len(advance.tokens) - 1)
    if advance.prompt_logprobs and sequence.prompt_logprobs is not None:
        num_known = len(sequence.prompt_logprobs) - (row.start + 1)
        sequence.prompt_logprobs.extend(advance.prompt_logprobs[num_known:])
