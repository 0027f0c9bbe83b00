"""A network without tensors for the policy's tests. It fails where a real one would silently read the wrong keys.

ShadowNetwork keeps what a device keeps: block tables by seat, updated only from what a Schedule says, and one dict of slots
per layer group. Into a slot it writes a digest of everything that a key at this position depends on (salt, adapter, media,
all tokens up to it). Every query then looks at every key of its window and compares. The next token is a hash of the
history, so a wrong history shows in the tokens as well; `lone_run` computes the same answer with a loop and no cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from zlib import crc32

from kvant.config.model import CacheGroup
from kvant.config.sampling import SamplingParams
from kvant.decoding.stopping import DecodeContext
from kvant.decoding.strategy import decode, want, width
from kvant.kvcache.manager import KVCacheManager
from kvant.scheduler.budget import SchedulerLimits
from kvant.scheduler.scheduler import Scheduler
from kvant.types import (
    NULL_BLOCK,
    Add,
    FinishReason,
    Message,
    Output,
    Request,
    Schedule,
    Scheduled,
    Selected,
    Selection,
    Sequence,
    StepInput,
    TokenLogprobs,
)

VOCAB = 23
EOS = 0


def group(window: int | None = None, block_size: int = 4, name: str = "") -> CacheGroup:
    name = name or ("full" if window is None else f"sliding{window}")
    return CacheGroup(name=name, layers=(0,), window=window, num_kv_heads=1, head_dim=2, block_size=block_size)


def request(request_id: str, prompt: Iterable[int], *, end: bool = False, sampling: dict | None = None, **details) -> Request:
    """A request with greedy defaults; `end`: token 0 is an end token."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**{"max_tokens": 8, **(sampling or {})}),
        end_token_ids=frozenset({EOS}) if end else frozenset(),
        **details,
    )


def letters(tokens: Iterable[int]) -> str:
    """The tests' vocabulary: one letter a token."""
    return "".join(chr(ord("a") + token) for token in tokens)


class LetterMatcher:
    """Stop strings over `letters`, the plain way: it keeps the whole text."""

    def __init__(self, stop: tuple[str, ...], text: str = ""):
        self.stop = stop
        self.text = text

    def push(self, token_id: int) -> str | None:
        self.text += letters([token_id])
        return next((s for s in self.stop if self.text.endswith(s)), None)

    def fork(self) -> "LetterMatcher":
        return LetterMatcher(self.stop, self.text)


def mix(state: int, value: int) -> int:
    """One step of a 64-bit linear congruential generator: a cheap chain of hashes."""
    return (state * 6364136223846793005 + value * 2654435761 + 1442695040888963407) % 2**64


def digests(request: Request, tokens: list[int]) -> list[int]:
    """Per position, all that its keys and values depend on."""
    state = crc32(repr((request.cache_salt, request.adapter, request.adapter_version)).encode())
    chain = []
    for position, token in enumerate(tokens):
        for span in request.media:
            if span.offset <= position < span.offset + span.length:
                state = mix(state, crc32(span.digest) + position - span.offset)
        state = mix(state, token)
        chain.append(state)
    return chain


def next_token(request: Request, index: int, history: int) -> int:
    return (mix(mix(history, request.seed), index) >> 33) % VOCAB


def logprob(position: int, history: int) -> float:
    return -((history >> 40) % 1000) / 100 - position


@dataclass
class LoneAnswer:
    tokens: list[int]
    finish: FinishReason
    stop_reason: int | str | None = None


def lone_run(request: Request, index: int, max_model_len: int) -> LoneAnswer:
    """What choice `index` of `request` must say, whatever else happens: the rules again, one by one."""
    sampling, tokens, out = request.sampling, list(request.prompt_token_ids), []
    while True:
        token = next_token(request, index, digests(request, tokens)[-1])
        tokens.append(token)
        out.append(token)
        if len(out) >= sampling.min_tokens:
            if not sampling.ignore_eos and token in request.end_token_ids:
                return LoneAnswer(out, FinishReason.STOP)
            if token in sampling.stop_token_ids:
                return LoneAnswer(out, FinishReason.STOP, token)
            for stop in sampling.stop:
                if letters(out).endswith(stop):
                    return LoneAnswer(out, FinishReason.STOP, stop)
        if len(tokens) == max_model_len or len(out) == sampling.max_tokens:
            return LoneAnswer(out, FinishReason.LENGTH)


class ShadowNetwork:
    def __init__(self, groups: tuple[CacheGroup, ...]):
        self.groups = groups
        self.slots: list[dict[int, int]] = [{} for _ in groups]
        self.tables: dict[int, list[list[int]]] = {}  # by seat
        self.num_computed = 0  # tokens, over all steps
        self.num_copies = 0

    def run(self, schedule: Schedule) -> Selection:
        self._mirror(schedule)
        self._copy(schedule)
        chains = [digests(row.sequence.request, inputs(row)) for row in schedule.rows]
        self._write(schedule, chains)
        for row, chain in zip(schedule.rows, chains, strict=True):
            self._read(row, chain)
        self.num_computed += schedule.num_tokens
        return Selection(rows=tuple(select(row, chain) for row, chain in zip(schedule.rows, chains, strict=True)))

    def _mirror(self, schedule: Schedule) -> None:
        """Seats and tables change by delta, as on a device."""
        for seat in schedule.freed_seats:
            self.tables.pop(seat, None)
        seats = [row.sequence.seat for row in schedule.rows]
        assert len(seats) == len(set(seats)), "two rows on one seat"
        for row in schedule.rows:
            if row.newly_seated:
                assert row.sequence.seat not in self.tables, "the seat was taken without having been freed"
                assert not any(row.table_from)
                self.tables[row.sequence.seat] = [[] for _ in self.groups]
            for table, source, first in zip(self.tables[row.sequence.seat], row.sequence.tables, row.table_from, strict=True):
                table[first:] = source[first:]

    def _copy(self, schedule: Schedule) -> None:
        for group, slots, copies in zip(self.groups, self.slots, schedule.kv_copies, strict=True):
            assert not {c.source for c in copies} & {c.target for c in copies}, "a block is source and target"
            assert len({c.target for c in copies}) == len(copies), "a block is the target of two copies"
            for copy in copies:
                self.num_copies += 1
                for offset in range(group.block_size):
                    slots[copy.target * group.block_size + offset] = slots.get(copy.source * group.block_size + offset, -1)

    def _write(self, schedule: Schedule, chains: list[list[int]]) -> None:
        written = [set() for _ in self.groups]
        for row, chain in zip(schedule.rows, chains, strict=True):
            for position in range(row.start, row.start + row.num_tokens):
                for g in range(len(self.groups)):
                    slot = self._slot(row, g, position)
                    assert slot not in written[g], "two tokens are written to one slot"
                    written[g].add(slot)
                    self.slots[g][slot] = chain[position]

    def _read(self, row: Scheduled, chain: list[int]) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            for g, group in enumerate(self.groups):
                first = 0 if group.window is None else max(0, position - group.window + 1)
                for key in range(first, position + 1):
                    assert self.slots[g].get(self._slot(row, g, key)) == chain[key], (
                        f"query {position} of {row.sequence.request.request_id} reads a wrong key at {key} in {group.name}"
                    )

    def _slot(self, row: Scheduled, g: int, position: int) -> int:
        size = self.groups[g].block_size
        block = self.tables[row.sequence.seat][g][position // size]
        assert block != NULL_BLOCK, "a live token lies in the null block"
        return block * size + position % size


def inputs(row: Scheduled) -> list[int]:
    """Known tokens and drafts up to the end of the row."""
    tokens = row.sequence.tokens + [draft.token for draft in row.drafts]
    assert len(tokens) >= row.start + row.num_tokens
    return tokens[: row.start + row.num_tokens]


def select(row: Scheduled, chain: list[int]) -> Selected:
    scores: tuple[TokenLogprobs, ...] = ()
    if row.score_prompt:
        prompt = row.sequence.request.prompt_token_ids
        stop = min(row.start + row.num_tokens + 1, len(prompt))
        scores = tuple(prompt_score(prompt, chain, position) for position in range(row.start + 1, stop))
    if row.want is None:
        return Selected(prompt_logprobs=scores)
    draws = range(row.want.first_index, row.want.first_index + row.want.count)
    tokens = tuple(next_token(row.sequence.request, index, chain[-1]) for index in draws)
    return Selected(token_ids=tokens, chosen_logprobs=tuple(-1.0 for _ in tokens), prompt_logprobs=scores)


def prompt_score(prompt: tuple[int, ...], chain: list[int], position: int) -> TokenLogprobs:
    return TokenLogprobs(prompt[position], logprob(position, chain[position - 1]), 1, ())


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    last: Output | None = None
    prompt_logprobs: tuple | None = None


class Loop:
    """Scheduler, decoding and the shadow network in the loop of the engine. Collects answers by (request id, index)."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...] = (),
        num_blocks: tuple[int, ...] = (),
        *,
        seqs: int = 8,
        tokens: int = 64,
        length: int = 64,
        caching: bool = True,
    ):
        groups = groups or (group(),)
        self.manager = KVCacheManager(groups, num_blocks or tuple(65 for _ in groups), caching)
        limits = SchedulerLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length)
        self.scheduler = Scheduler(self.manager, limits, want, width)
        self.network = ShadowNetwork(groups)
        self.context = DecodeContext(max_model_len=length, new_matcher=lambda sampling: LetterMatcher(sampling.stop))
        self.answers: dict[tuple[str, int], Answer] = {}
        self.schedules: list[Schedule] = []

    def step(self, *messages: Message) -> Schedule:
        schedule = self.scheduler.schedule(StepInput(messages=messages))
        assert schedule.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        self.scheduler.check()
        selection = self.network.run(schedule)
        self.receive(self.scheduler.commit(schedule, decode(schedule, selection, self.context)))
        self.scheduler.check()
        self.schedules.append(schedule)
        return schedule

    def receive(self, outputs: list[Output]) -> None:
        for output in outputs:
            answer = self.answers.setdefault((output.request_id, output.index), Answer())
            assert answer.finish is None, "news after the end"
            answer.tokens += output.token_ids
            answer.finish = output.finish_reason
            if output.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None, "prompt log-probabilities came twice"
                answer.prompt_logprobs = output.prompt_logprobs
            answer.last = output

    def drain(self, limit: int = 3000) -> None:
        """Steps until nothing is left to do; every step must do something."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            schedule = self.step()
            assert schedule.rows or not (self.scheduler.running or self.scheduler.waiting), "a step without progress"
        assert not self.scheduler.has_work()
        self.step()
        assert all(usage.free == usage.total for usage in self.manager.usage()), "blocks were lost"

    def run(self, *requests: Request) -> None:
        self.step(*(Add(r) for r in requests))
        self.drain()

    def assert_lone(self, request: Request) -> None:
        """Every choice of `request` said what it says alone."""
        for index in range(request.sampling.n):
            answer = self.answers[request.request_id, index]
            alone = lone_run(request, index, self.context.max_model_len)
            assert (answer.tokens, answer.finish) == (alone.tokens, alone.finish), f"choice {index} differs from a lone run"
            assert answer.last is not None and answer.last.stop_reason == alone.stop_reason

    def sequence(self, request_id: str, index: int = 0) -> Sequence:
        found = [*self.scheduler.running, *self.scheduler.waiting]
        return next(s for s in found if s.request.request_id == request_id and s.index == index)
