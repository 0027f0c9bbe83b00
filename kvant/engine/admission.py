"""Admission: what is asked of a request before it meets anybody else's. Pure checks over a handful of numbers.

The numbers are those of one engine, and plain data: an engine in another process sends its Admission over, so that a
wrong request is refused where it was made and costs the engine nothing.
"""

from dataclasses import dataclass
from typing import Any

from kvant.config.sampling import SamplingParams
from kvant.decoding.strategy import width
from kvant.errors import ContextLengthError, RequestError
from kvant.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits of one engine, and what it adds to every request: the model's end tokens, a seed."""

    max_model_len: int
    max_num_seqs: int
    embedding_rows: int  # prompt token ids lie below this
    vocab_size: int  # ids that can be drawn lie below this
    end_token_ids: frozenset[int] = frozenset()
    seed: int = 0

    def request(self, number: int, token_ids: list[int], sampling: SamplingParams, **details: Any) -> Request:
        """The engine's `number`-th Request. Raises `RequestError` and its children."""
        self._check(token_ids, sampling)
        request = Request(
            request_id=details.pop("request_id", f"request-{number}"),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            end_token_ids=self.end_token_ids,
            # Unseeded requests get numbers of their own, far apart; a seeded engine repeats them run after run.
            seed=sampling.seed if sampling.seed is not None else (self.seed + number * 1_000_003) % 2**63,
            **details,
        )
        seats = width(request)  # refuses a strategy that does not exist
        if seats > self.max_num_seqs:
            raise RequestError(
                f"n is {seats}, but this engine computes {self.max_num_seqs} sequences at once; raise max_num_seqs", param="n"
            )
        return request

    def _check(self, token_ids: list[int], sampling: SamplingParams) -> None:
        limit, rows = self.max_model_len, self.embedding_rows
        if not token_ids:
            raise RequestError("the prompt is empty: it yields no tokens; give it some text", param="prompt")
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
        for token, _ in sampling.logit_bias:
            if token >= self.vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}, which is not in the vocabulary of {self.vocab_size}", param="logit_bias"
                )
