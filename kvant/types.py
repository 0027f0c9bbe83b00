"""What flows through the engine: plain data, no torch, no behaviour beyond one rule.

    Request  ──add──▶  Sequence  ──schedule──▶  Scheduled (a row of a Schedule)  ──▶  Batch (arrays, `batch.py`)
                          ▲                                                             │ network
    Output  ◀──commit── Decision  ◀──decode── Selection (what left the device)  ◀───────┘

A Request is immutable. A Sequence is the only mutable noun on the host; it belongs to the scheduler. One rule covers long
prompts, cache hits, resumed sequences, draft verification and ordinary decode:

    num_new = len(tokens) + num_pending + len(drafts) - num_computed

        tokens   [0 ........ num_prompt_tokens ........ len(tokens))
        network  [0 .................... num_computed)                  keys and values are in the cache
        pending                                        + num_pending    drawn, but known to the device only
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from kvant.config.sampling import SamplingParams

TARGET = "target"  # the network whose tokens are the answer; drafts and amateurs have names of their own
NULL_BLOCK = 0  # padding writes there; entries that fell out of a window point there; never handed out


class FinishReason(str, Enum):
    STOP = "stop"  # an end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the client left
    ERROR = "error"  # this request failed; `Output.error` says why


class Status(Enum):
    WAITING = "waiting"  # not on the device: new, or preempted
    RUNNING = "running"  # has a seat and blocks
    FINISHED = "finished"


class MediaSpan(NamedTuple):
    """Where one image, sound or film lies in the prompt, and what it is: the digest enters the prefix-cache key."""

    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for. `request_id` is unique inside the engine; `end_token_ids` are the model's own end tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    end_token_ids: frozenset[int] = frozenset()
    strategy: str = "ancestral"
    seed: int = 0  # the request's own seed, or one the engine drew for it
    cache_salt: str = ""
    adapter: str = ""
    adapter_version: int = 0
    media: tuple[MediaSpan, ...] = ()
    priority: int = 0
    arrival: float = 0.0


class Draft(NamedTuple):
    """A guessed token and the index of the draft it follows (-1: the last real token). A chain is the simple tree."""

    token: int
    parent: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens of a request. Owned and changed by the scheduler alone."""

    request: Request
    index: int  # which of the request's n choices
    tokens: list[int]
    num_computed: dict[str, int] = field(default_factory=lambda: {TARGET: 0})
    num_pending: int = 0
    drafts: list[Draft] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)  # per layer group: block ids in order of position
    state: Any = None  # the strategy's own: kept over preemption, forked by the strategy
    seat: int | None = None
    status: Status = Status.WAITING
    logprob_sum: float = 0.0
    prompt_logprobs: list["TokenLogprobs | None"] | None = None  # gathered chunk by chunk; the first entry is None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served, for the user to see
    num_preemptions: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    def num_new(self, network: str = TARGET) -> int:
        """The sequence rule: how many tokens `network` still has to compute."""
        return len(self.tokens) + self.num_pending + len(self.drafts) - self.num_computed[network]


# --- what a step is asked for -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw `count` tokens independently from the row's distribution: choices `first_index ... first_index + count - 1`."""

    count: int
    first_index: int


Want = Draw  # the closed set of what a strategy may ask of the device; top_k, verify, degeneration and pool join it


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """One row of a Schedule: `sequence` computes tokens [start, start + num_tokens), the drafts among them last.

    `want` is None while a prompt is not complete. `table_from[g]` is the first entry of the block table that is new on the
    device since the sequence's last step (0 after taking a seat).
    """

    sequence: Sequence
    start: int
    num_tokens: int
    want: Want | None
    drafts: tuple[Draft, ...] = ()
    table_from: tuple[int, ...] = ()
    newly_seated: bool = False
    score_prompt: bool = False  # prompt log-probabilities are wanted for the rows of this chunk


class BlockCopy(NamedTuple):
    """Copy one block's contents before the forward pass. Sources stay referenced until then; no block is both."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What one step computes. Immutable; everything the runner may know about sequences is here."""

    rows: tuple[Scheduled, ...]
    kv_copies: tuple[tuple[BlockCopy, ...], ...] = ()  # per layer group
    freed_seats: tuple[int, ...] = ()  # seats given up since the last step
    preempted: tuple[Sequence, ...] = ()
    step: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


# --- what comes back ----------------------------------------------------------------------------------------------------


class TokenLogprobs(NamedTuple):
    """One position's log-probabilities: of the token that stands there, its rank (1 = most probable), and the top ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What the device chose for one row of the schedule. Empty where the row wanted nothing."""

    token_ids: tuple[int, ...] = ()  # one per draw
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per draw, where the request wants them
    chosen_logprobs: tuple[float, ...] = ()  # one per draw, raw log-softmax of the chosen token; empty unless asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of tokens[start + 1 ...], as far as they lie in the prompt
    finite: bool = True  # False: the logits held NaN or infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What left the device after a step: one entry per row of the schedule, in its order."""

    rows: tuple[Selected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """One sequence goes on by `tokens`. With `fork_of`, `sequence` is new and shares the blocks of that one first."""

    sequence: Sequence
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    logprob_delta: float = 0.0
    fork_of: Sequence | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the strategies decided about a step: pure data, applied by `Scheduler.commit` in order."""

    advances: tuple[Advance, ...]
    drops: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """News about one choice of a request: `token_ids` are the ones added since the last Output."""

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float = 0.0  # cumulative log-probability of the choice, where it was asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    embedding: tuple[float, ...] | None = None
    error: str | None = None


# --- what a step consumes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget every cached prefix that no running sequence holds."""


Message = Add | Abort | ResetCache


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """All that a step may know of the outside: read on rank 0, the same on every rank. Policy reads no clock of its own."""

    now: float = 0.0
    step_cost: float = 0.0  # seconds the last step took
    messages: tuple[Message, ...] = ()
