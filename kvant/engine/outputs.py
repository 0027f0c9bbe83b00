"""From the engine's Outputs to what users see: text, log-probabilities by token, metrics.

    Output (new token ids of one choice) ──▶ detokeniser ──▶ stop trimmer ──▶ text delta
                                                                              └─▶ RequestOutput, when somebody collects

No character that is not complete and no part of a stop string leaves here. Imports no torch.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvant.tokenizer.detokenizer import Detokenizer
from kvant.tokenizer.stops import StopTrimmer
from kvant.tokenizer.tokenizer import Tokenizer
from kvant.types import FinishReason, Output, Request, TokenLogprobs


class Logprob(NamedTuple):
    """A token's raw log-probability, its rank (1 = most probable) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Counts and times (seconds, from the arrival of the request) of one request."""

    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first one, over the time they took."""
        if self.first_token is None or self.last_token is None or self.last_token <= self.first_token:
            return None
        return (self.num_output_tokens - 1) / (self.last_token - self.first_token)


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One choice. `cumulative_logprob` and `logprobs` are there when log-probabilities were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """All choices of one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """What one choice of a request has to say since the last event. `metrics` comes with the request's last event."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None


def joined(events: list[StreamEvent]) -> list[StreamEvent]:
    """The same news in one event per choice, in order of their first."""
    by_choice: dict[int, list[StreamEvent]] = {}
    for event in events:
        by_choice.setdefault(event.index, []).append(event)
    return [
        replace(
            several[-1],
            text="".join(event.text for event in several),
            token_ids=tuple(token for event in several for token in event.token_ids),
        )
        for several in by_choice.values()
    ]


class RequestText:
    """The user's side of one request: turns its Outputs into events and keeps the whole."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer, arrival: float):
        self.request = request
        self.tokenizer = tokenizer
        sampling = request.sampling
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[CompletionOutput(index=index) for index in range(sampling.n)],
            metrics=RequestMetrics(arrival=arrival, num_prompt_tokens=len(request.prompt_token_ids)),
        )
        self._texts = [_TextStream(request, tokenizer) if sampling.detokenize else None for _ in range(sampling.n)]

    def receive(self, news: Output, now: float) -> StreamEvent:
        """Takes one Output in and gives what it adds."""
        choice = self.output.outputs[news.index]
        self._measure(news, now)
        stream = self._texts[news.index]
        text = stream.add(news) if stream is not None else ""
        choice.text += text
        choice.token_ids.extend(news.token_ids)
        if news.prompt_logprobs is not None:
            self.output.prompt_logprobs = [self._table(entry) if entry else None for entry in news.prompt_logprobs]
        if self.request.sampling.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + [self._table(entry) for entry in news.logprobs]
            choice.cumulative_logprob = news.score
        choice.finish_reason = news.finish_reason.value if news.finish_reason else None
        choice.stop_reason, choice.error = news.stop_reason, news.error
        return StreamEvent(
            index=news.index,
            text=text,
            token_ids=news.token_ids,
            finish_reason=choice.finish_reason,
            stop_reason=news.stop_reason,
            error=news.error,
            metrics=self.output.metrics if self.output.finished else None,
        )

    def _measure(self, news: Output, now: float) -> None:
        metrics = self.output.metrics
        metrics.num_cached_tokens = max(metrics.num_cached_tokens, news.num_cached_tokens)
        metrics.num_output_tokens += len(news.token_ids)
        if news.token_ids:
            metrics.last_token = now
            if metrics.first_token is None:
                metrics.first_token = now

    def _table(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The alternatives, and the token itself where it is not among them."""
        table = {token: self._logprob(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
        table.setdefault(entry.token_id, self._logprob(entry.token_id, entry.logprob, entry.rank))
        return table

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, self.tokenizer.token_bytes(token).decode("utf-8", "replace"))


class _TextStream:
    """Tokens of one choice -> text that may be shown."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        sampling = request.sampling
        # An answer continues its prompt: a space before its first word is part of it, and stop strings may begin with it.
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, continues=True)
        self._trimmer = StopTrimmer(sampling.stop, include=sampling.include_stop_str_in_output)

    def add(self, news: Output) -> str:
        if news.finish_reason is None:
            return self._trimmer.add(self._detokenizer.add(news.token_ids))
        # The last token alone is what may have completed a stop string; earlier ones are text.
        shown = self._trimmer.add(self._detokenizer.add(news.token_ids[:-1]))
        text = self._detokenizer.add(news.token_ids[-1:]) + self._detokenizer.finish()
        stop = news.stop_reason if news.finish_reason is FinishReason.STOP and isinstance(news.stop_reason, str) else None
        return shown + self._trimmer.finish(text, stop)
